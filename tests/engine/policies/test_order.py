"""First come first served, shortest job first and priority: the order, and how long others may overtake."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.config import SchedulerConfig
from app.engine.policies import make_policy
from app.engine.sequence import EngineSequence
from tests.kit.engine import POLICIES, TimedEngine, make_request

pytestmark = pytest.mark.usefixtures("small_lengths")


LONG: dict[str, Any] = {"prompt": (5,) * 100, "max_tokens": 200}


def one_by_one(policy: Any, **settings: Any) -> TimedEngine:
    """An engine that runs one request at a time."""
    return TimedEngine(policy=policy, **{"max_running": 1} | settings)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("waiting", "running", "may"),
    [
        # Each: whether it is background work, its priority, its order key. None: under `priority` alone.
        ((False, 0, 1), (True, 0, 2), True),
        ((False, 0, 1), (False, 0, 2), False),
        ((True, 0, 1), (False, 0, 2), False),
        ((True, 0, 1), (True, 0, 2), False),
        ((True, 0, 1), (True, 1, 2), False),
        ((False, 0, 1), (False, 1, 2), None),
        ((False, 0, 2), (False, 1, 1), False),
    ],
)
def test_only_a_better_class_takes_another_place_than_one_of_background_work(
    policy: Any, waiting: tuple[bool, int, int], running: tuple[bool, int, int], may: bool | None
) -> None:
    sequences = [
        EngineSequence(
            request=replace(make_request(priority=priority), is_background=is_background), arrival=key, order_key=(key,)
        )
        for is_background, priority, key in (waiting, running)
    ]
    expected = policy == "priority" if may is None else may
    assert make_policy(SchedulerConfig(policy=policy).policy).may_preempt(*sequences) is expected


def test_fcfs_is_the_order_of_arrival() -> None:
    timed = one_by_one("fcfs")
    timed.finish(*(make_request((5,) * (9 - n), request_id=str(n), priority=-n) for n in range(4)))
    assert timed.begun == ["0", "1", "2", "3"]


def test_sjf_takes_the_least_work_first() -> None:
    timed = one_by_one("sjf")
    sizes = {"long prompt": (60, 2), "short": (2, 2), "long output": (2, 80), "middle": (10, 10)}
    timed.finish(
        *(make_request((5,) * prompt, request_id=name, max_tokens=output) for name, (prompt, output) in sizes.items()),
    )
    assert timed.begun == ["short", "middle", "long prompt", "long output"]


def test_sjf_learns_which_tenants_outputs_are_short() -> None:
    timed = one_by_one("sjf")
    for _ in range(5):  # its requests may be long but never are: any token ends them
        timed.finish(make_request(tenant="terse", max_tokens=90, stop_token_ids=tuple(range(2, 50))))
        timed.finish(make_request(tenant="wordy", max_tokens=60))
    timed.runner.batches.clear()
    timed.finish(
        make_request(request_id="wordy", tenant="wordy", max_tokens=80),
        make_request(request_id="terse", tenant="terse", max_tokens=90),
    )
    assert timed.begun == ["terse", "wordy"]


@pytest.mark.parametrize(
    ("policy", "waiting", "every_s", "max_overtaking_s", "waited_s"),
    [
        # Requests that arrive within the bound go first; to serve them takes 20 ms for every 15 ms of arrivals.
        pytest.param("sjf", LONG, 0.015, 0.2, (0.15, 0.2 * 20 / 15 + 0.05), id="a-long-job-a-short-bound"),
        pytest.param("sjf", LONG, 0.015, 1.0, (0.95, 1.0 * 20 / 15 + 0.05), id="a-long-job-a-long-bound"),
        # 200 tokens more than a rival: 2 s. Waiting buys priority at a constant rate.
        pytest.param("sjf", LONG | {"max_tokens": 104}, 0.02, 1000.0, (1.9, 2.1), id="a-longer-job-without-a-bound"),
        pytest.param("priority", {"priority": 10}, 0.02, None, (0.45, 0.6), id="ten-classes"),
    ],
)
def test_under_an_endless_stream_of_better_requests_none_waits_longer_than_the_bound(
    policy: str,
    waiting: dict[str, Any],
    every_s: float,
    max_overtaking_s: float | None,
    waited_s: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rivals arrive faster than they can be served, for ever."""
    if max_overtaking_s is not None:
        monkeypatch.setattr("app.engine.policies.MAX_OVERTAKING_S", max_overtaking_s)
    rivals = (make_request((5, 6), request_id=f"rival-{number}", max_tokens=2) for number in itertools.count())
    timed = one_by_one(policy)
    timed.add(next(rivals))
    timed.step()
    timed.add(make_request(request_id="waiting", **waiting))
    arrived_at = next_at = timed.clock.at
    for _ in range(3_000):
        while next_at <= timed.clock.at:
            timed.add(next(rivals))
            next_at += every_s
        if "waiting" in timed.step():
            break
    assert waited_s[0] <= timed.clock.at - arrived_at <= waited_s[1]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    policy=st.sampled_from(["sjf", "priority"]),
    seed=st.integers(0, 2**32),
)
def test_no_request_is_overtaken_by_one_that_arrives_later_than_the_bound(policy: str, seed: int) -> None:
    draw = random.Random(seed)
    timed = one_by_one(policy)
    arrivals: dict[str, tuple[float, int]] = {}
    for number in range(40):
        request = make_request(
            (5,) * draw.randint(1, 30), request_id=str(number), max_tokens=draw.randint(1, 6),
            priority=draw.randint(-3, 3), cache_salt=str(number),
        )  # fmt: skip
        timed.add(request)
        arrivals[request.request_id] = (timed.clock.at, request.priority)
        for _ in range(draw.randint(0, 6)):
            if timed.engine.has_work:
                timed.step()
    timed.finish()
    started = timed.begun
    for place, name in enumerate(started):
        at, priority = arrivals[name]
        for earlier in started[:place]:
            overtaker_at, overtaker_priority = arrivals[earlier]
            bound_s = 0.3 if policy == "sjf" else 0.05 * max(0, priority - overtaker_priority)
            assert overtaker_at - at <= bound_s + 1e-9, f"{name} was overtaken by {earlier}"


def test_a_better_class_takes_the_slot_of_a_running_lower_one_which_goes_on_later_with_the_same_tokens() -> None:
    timed = one_by_one("priority")
    low = make_request((5, 6, 7), request_id="low", max_tokens=9, priority=1)
    timed.add(low)
    timed.step()
    timed.finish(make_request((8, 9), request_id="high", max_tokens=2, priority=0))
    assert timed.computed[:4] == ["low", "high", "high", "low"]
    timed.outcome.check(low)
    assert timed.stats.total_preemptions == 1


def test_a_better_class_takes_the_blocks_of_lower_ones_only_if_that_is_enough() -> None:
    timed = one_by_one("priority", max_running=4, num_blocks=8)  # 32 slots
    timed.add(make_request((5,) * 8, request_id="same class", max_tokens=16, priority=0))
    timed.add(make_request((6,) * 4, request_id="low", max_tokens=8, priority=5))
    timed.step()
    timed.add(make_request((7,) * 26, request_id="too large", max_tokens=2, priority=0))
    assert set(timed.step()) == {"same class", "low"}
    timed.engine.abort("too large")
    timed.add(make_request((7,) * 17, request_id="fits", max_tokens=2, priority=0))
    assert set(timed.step()) == {"same class", "fits"}


def test_neither_an_equal_class_nor_one_that_has_aged_is_preempted() -> None:
    timed = one_by_one("priority")
    timed.add(make_request(request_id="low", max_tokens=60, priority=1))
    timed.step()
    timed.add(make_request(request_id="equal", priority=1))
    timed.step()
    timed.clock.advance(0.2)
    timed.add(make_request(request_id="high, but late", priority=0))
    timed.step()
    assert timed.begun == ["low"]


def test_whole_batches_are_not_broken_up_for_a_better_class() -> None:
    timed = one_by_one("priority", strategy="static")
    timed.add(make_request(request_id="low", priority=1))
    timed.step()
    timed.finish(make_request(request_id="high", priority=0))
    assert timed.stats.total_preemptions == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sequence_that_does_not_fit_keeps_its_place_at_the_head(policy: str) -> None:
    """It is not put back at the tail, and no other overtakes it."""
    timed = one_by_one(policy, max_running=8, num_blocks=6)  # 24 slots
    timed.add(make_request((5,) * 13, request_id="runs", max_tokens=3, priority=-1))
    timed.step()
    # First in every order: the least work, the best class, the earliest deadline.
    timed.add(make_request((6,) * 16, request_id="too large", max_tokens=1, priority=-1, deadline_s=1000))
    timed.add(make_request((7,) * 20, request_id="after it", max_tokens=2, deadline_s=2000))
    assert timed.step() == ["runs"]
    timed.finish()
    assert timed.begun == ["runs", "too large", "after it"]
