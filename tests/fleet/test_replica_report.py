"""What a replica says of itself."""

from __future__ import annotations

from app.engine.stats import SleepState, SleepStats
from app.fleet import report_of
from tests.kit.engine import build_fake_engine, make_request


def test_a_report_says_what_the_engines_snapshot_says() -> None:
    engine = build_fake_engine(num_blocks=64, block_size=4, max_running=1)
    for prompt in ((5,) * 8, (6,) * 9):
        engine.add(make_request(prompt))
    engine.step()
    report = report_of(engine.stats(), num_requests=2, group="blue", max_requests=10, step_age_s=0.5)
    assert (report.num_requests, report.max_running, report.num_waiting_tokens) == (2, 1, 9)
    assert report.num_kv_tokens == 256
    assert (report.group, report.max_requests, report.step_age_s) == ("blue", 10, 0.5)


def test_a_report_says_how_long_a_replica_takes_to_wake() -> None:
    sleep = SleepStats(state=SleepState.ASLEEP, last_wake_s=1.5)
    report = report_of(build_fake_engine().stats(), num_requests=0, group="", max_requests=1, step_age_s=0, sleep=sleep)
    assert (report.state, report.wake_s) == ("asleep", 1.5)
    report = report_of(build_fake_engine().stats(), num_requests=0, group="", max_requests=1, step_age_s=0)
    assert (report.state, report.wake_s) == ("awake", 0.0)
