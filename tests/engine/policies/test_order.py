"""First come first served, shortest job first and priority: the order, and how long others may overtake."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.engine import Engine
from app.engine.request import Request
from tests.fakes import (
    CountingRunner,
    FakeClock,
    Outcome,
    TimedRunner,
    build_fake_engine,
    expected_tokens,
    make_request,
    run_to_end,
)

pytestmark = pytest.mark.usefixtures("small_lengths")


def first_steps(runner: CountingRunner) -> list[str]:
    """Request ids in the order in which something was first computed for them."""
    return list(dict.fromkeys(item.request_id for batch in runner.batches for item in batch.scheduled))


def one_by_one(policy: Any, **settings: Any) -> tuple[Engine, TimedRunner, FakeClock]:
    """An engine that runs one request at a time, in steps of 10 ms."""
    clock = FakeClock()
    runner = TimedRunner(clock, step_s=0.01)
    engine = build_fake_engine(
        runner=runner, clock=clock, policy=policy, **({"max_running": 1, "num_blocks": 256} | settings)
    )
    return engine, runner, clock


def wait_under_a_stream(
    policy: Any, long_waiting: Request, rival: Any, *, every_s: float, max_steps: int = 3_000, **fields: Any
) -> float:
    """Seconds until `long_waiting` starts, with rivals arriving faster than they can be served, for ever."""
    engine, runner, clock = one_by_one(policy, **fields)
    engine.add(rival(0))
    engine.step()
    engine.add(long_waiting)
    arrived_at, next_at, number = clock.at, clock.at, 1
    for _ in range(max_steps):
        while next_at <= clock.at:
            engine.add(rival(number))
            number, next_at = number + 1, next_at + every_s
        engine.step()
        if any(item.request_id == long_waiting.request_id for item in runner.batches[-1].scheduled):
            return clock.at - arrived_at
    raise AssertionError("it starved")


def test_fcfs_is_the_order_of_arrival() -> None:
    engine, runner, clock = one_by_one("fcfs")
    run_to_end(engine, *(make_request((5,) * (9 - n), request_id=str(n), priority=-n) for n in range(4)), clock=clock)
    assert first_steps(runner) == ["0", "1", "2", "3"]


def test_sjf_takes_the_least_work_first() -> None:
    engine, runner, clock = one_by_one("sjf")
    sizes = {"long prompt": (60, 2), "short": (2, 2), "long output": (2, 80), "middle": (10, 10)}
    run_to_end(
        engine,
        *(make_request((5,) * prompt, request_id=name, max_tokens=output) for name, (prompt, output) in sizes.items()),
        clock=clock,
    )
    assert first_steps(runner) == ["short", "middle", "long prompt", "long output"]


def test_sjf_learns_which_tenants_outputs_are_short() -> None:
    engine, runner, clock = one_by_one("sjf")
    for _ in range(5):  # its requests may be long but never are: any token ends them
        run_to_end(engine, make_request(tenant="terse", max_tokens=90, stop_token_ids=tuple(range(2, 50))), clock=clock)
        run_to_end(engine, make_request(tenant="wordy", max_tokens=60), clock=clock)
    assert engine.stats().mean_length_error_tokens > 0
    runner.batches.clear()
    run_to_end(
        engine,
        make_request(request_id="wordy", tenant="wordy", max_tokens=80),
        make_request(request_id="terse", tenant="terse", max_tokens=90),
        clock=clock,
    )
    assert first_steps(runner) == ["terse", "wordy"]


@pytest.mark.parametrize("max_overtaking_s", [0.2, 1.0])
def test_under_an_endless_stream_of_shorter_jobs_a_long_one_waits_no_longer_than_the_bound(
    max_overtaking_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.engine.policies.MAX_OVERTAKING_S", max_overtaking_s)
    waited_s = wait_under_a_stream(
        "sjf",
        make_request((5,) * 100, max_tokens=200),
        lambda number: make_request((5, 6), request_id=f"rival-{number}", max_tokens=2),
        every_s=0.015,
    )
    # Requests that arrive within the bound go first; to serve them takes 20 ms for every 15 ms of arrivals.
    assert max_overtaking_s - 0.05 <= waited_s <= max_overtaking_s * 20 / 15 + 0.05


def test_waiting_buys_priority_at_a_constant_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.engine.policies.MAX_OVERTAKING_S", 1000.0)
    waited_s = wait_under_a_stream(
        "sjf",
        make_request((5,) * 100, max_tokens=104),  # 200 tokens more than a rival: 2 s
        lambda number: make_request((5, 6), request_id=f"rival-{number}", max_tokens=2),
        every_s=0.02,
    )
    assert 1.9 <= waited_s <= 2.1


def test_under_an_endless_stream_of_better_classes_a_low_one_waits_no_longer_than_the_bound() -> None:
    waited_s = wait_under_a_stream(
        "priority",
        make_request(priority=10),
        lambda number: make_request((5, 6), request_id=f"rival-{number}", max_tokens=2, priority=0),
        every_s=0.02,
    )
    assert 0.45 <= waited_s <= 0.6  # ten classes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    policy=st.sampled_from(["sjf", "priority"]),
    seed=st.integers(0, 2**32),
)
def test_no_request_is_overtaken_by_one_that_arrives_later_than_the_bound(policy: str, seed: int) -> None:
    draw = random.Random(seed)
    engine, runner, clock = one_by_one(policy)
    arrivals: dict[str, tuple[float, int]] = {}
    outcome = Outcome()
    for number in range(40):
        request = make_request(
            (5,) * draw.randint(1, 30), request_id=str(number), max_tokens=draw.randint(1, 6),
            priority=draw.randint(-3, 3), cache_salt=str(number),
        )  # fmt: skip
        engine.add(request)
        arrivals[request.request_id] = (clock.at, request.priority)
        for _ in range(draw.randint(0, 6)):
            if engine.has_work:
                outcome.book(engine.step())
    while engine.has_work:
        outcome.book(engine.step())
    started = first_steps(runner)
    for place, name in enumerate(started):
        at, priority = arrivals[name]
        for earlier in started[:place]:
            overtaker_at, overtaker_priority = arrivals[earlier]
            bound_s = 0.3 if policy == "sjf" else 0.05 * max(0, priority - overtaker_priority)
            assert overtaker_at - at <= bound_s + 1e-9, f"{name} was overtaken by {earlier}"


def test_a_better_class_takes_the_slot_of_a_running_lower_one_which_goes_on_later_with_the_same_tokens() -> None:
    engine, runner, _ = one_by_one("priority")
    low = make_request((5, 6, 7), request_id="low", max_tokens=9, priority=1)
    engine.add(low)
    outcome = Outcome()
    outcome.book(engine.step())
    engine.add(make_request((8, 9), request_id="high", max_tokens=2, priority=0))
    while engine.has_work:
        outcome.book(engine.step())
    scheduled = [item.request_id for batch in runner.batches for item in batch.scheduled]
    assert scheduled[:4] == ["low", "high", "high", "low"]
    assert outcome.token_ids["low"] == expected_tokens(low.prompt_token_ids, 9)
    assert engine.stats().total_preemptions == 1


def test_a_better_class_takes_the_blocks_of_lower_ones_only_if_that_is_enough() -> None:
    engine, runner, _ = one_by_one("priority", max_running=4, num_blocks=8)  # 32 slots
    engine.add(make_request((5,) * 8, request_id="same class", max_tokens=16, priority=0))
    engine.add(make_request((6,) * 4, request_id="low", max_tokens=8, priority=5))
    engine.step()
    engine.add(make_request((7,) * 26, request_id="too large", max_tokens=2, priority=0))
    engine.step()
    assert {item.request_id for item in runner.batches[-1].scheduled} == {"same class", "low"}
    engine.abort("too large")
    engine.add(make_request((7,) * 17, request_id="fits", max_tokens=2, priority=0))
    engine.step()
    assert {item.request_id for item in runner.batches[-1].scheduled} == {"same class", "fits"}


def test_neither_an_equal_class_nor_one_that_has_aged_is_preempted() -> None:
    engine, runner, clock = one_by_one("priority")
    engine.add(make_request(request_id="low", max_tokens=60, priority=1))
    engine.step()
    engine.add(make_request(request_id="equal", priority=1))
    engine.step()
    clock.advance(0.2)
    engine.add(make_request(request_id="high, but late", priority=0))
    engine.step()
    assert {item.request_id for batch in runner.batches for item in batch.scheduled} == {"low"}


def test_whole_batches_are_not_broken_up_for_a_better_class() -> None:
    engine, _, clock = one_by_one("priority", strategy={"name": "static", "batch_size": 1})
    engine.add(make_request(request_id="low", priority=1))
    engine.step()
    run_to_end(engine, make_request(request_id="high", priority=0), clock=clock)
    assert engine.stats().total_preemptions == 0


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority", "fair", "deadline"])
def test_a_sequence_that_does_not_fit_keeps_its_place_at_the_head(policy: str) -> None:
    """It is not put back at the tail, and no other overtakes it."""
    engine, runner, clock = one_by_one(policy, max_running=8, num_blocks=6)  # 24 slots
    engine.add(make_request((5,) * 13, request_id="runs", max_tokens=3, priority=-1))
    engine.step()
    # First in every order: the least work, the best class, the earliest deadline.
    engine.add(make_request((6,) * 16, request_id="too large", max_tokens=1, priority=-1, deadline_s=1000))
    engine.add(make_request((7,) * 20, request_id="after it", max_tokens=2, deadline_s=2000))
    engine.step()
    assert {item.request_id for item in runner.batches[-1].scheduled} == {"runs"}
    run_to_end(engine, clock=clock)
    assert first_steps(runner) == ["runs", "too large", "after it"]
