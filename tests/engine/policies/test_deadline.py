"""Deadlines: the earliest that can be met first, the others refused; nothing is computed for expired requests."""

from __future__ import annotations

import random
from typing import Any

import pytest

from app.engine.engine import Engine
from app.engine.policies import EarliestDeadlineFirst
from app.engine.sequence import Sequence
from app.errors import DeadlineMissed
from tests.fakes import FakeClock, Outcome, TimedRunner, build_fake_engine, expected_tokens, make_request, run_to_end

POLICIES = ["fcfs", "sjf", "priority", "fair", "deadline"]


def timed_engine(policy: Any, **settings: Any) -> tuple[Engine, TimedRunner, FakeClock]:
    clock = FakeClock()
    runner = TimedRunner(clock, step_s=0.01)
    return build_fake_engine(runner=runner, clock=clock, policy=policy, num_blocks=256, **settings), runner, clock


def computed(runner: TimedRunner) -> list[str]:
    return [item.request_id for batch in runner.batches for item in batch.scheduled]


def test_the_earliest_deadline_goes_first_and_requests_without_one_have_the_default() -> None:
    engine, runner, clock = timed_engine("deadline", max_running=1)
    for name, deadline_s in {"90": 90, "none": None, "10": 10, "70": 70}.items():
        engine.add(make_request(request_id=name, max_tokens=1, deadline_s=deadline_s))
    run_to_end(engine, clock=clock)
    assert computed(runner) == ["10", "none", "70", "90"]


def test_short_deadlines_of_one_tenant_go_before_no_other_tenant() -> None:
    engine, runner, clock = timed_engine("deadline", max_running=1)
    for number in range(20):
        engine.add(make_request(request_id=f"hasty-{number}", tenant="hasty", max_tokens=1, deadline_s=50 - number))
    for number in range(4):
        engine.add(make_request(request_id=f"other-{number}", tenant="other", max_tokens=1))
    run_to_end(engine, clock=clock)
    order = computed(runner)
    others = [place for place, name in enumerate(order) if name.startswith("other")]
    assert others[-1] <= 8, "they take turns"
    assert [name for name in order if name.startswith("hasty")] == [f"hasty-{number}" for number in reversed(range(20))]


def test_of_one_tenant_the_latest_deadline_is_preempted_first_and_of_several_the_one_with_the_most_tokens() -> None:
    def sequence(number: int, tenant: str, deadline_s: float) -> Sequence:
        request = make_request((5,) * 10, tenant=tenant, deadline_s=deadline_s)
        return Sequence(request=request, arrival=number, arrived_at=0.0, order_key=())

    policy = EarliestDeadlineFirst()
    queue = policy.new_queue()

    def joined(each: Sequence) -> Sequence:
        queue.push(each)
        assert queue.pop() is each
        each.order_key = policy.order_key(each)
        policy.joined(each)
        return each

    late, early = joined(sequence(0, "one", 60)), joined(sequence(1, "one", 5))
    assert early.order_key < late.order_key
    other = joined(sequence(2, "other", 90))
    assert other.order_key < joined(sequence(3, "one", 1)).order_key


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_expires_in_the_queue_is_answered_and_computes_nothing(policy: str) -> None:
    engine, runner, clock = timed_engine(policy, max_running=1)
    engine.add(make_request(request_id="runs", max_tokens=30))
    engine.step()
    engine.add(make_request(request_id="expires", deadline_s=0.05, max_tokens=2))
    outcome = run_to_end(engine, clock=clock)
    error = outcome.errors["expires"]
    assert isinstance(error, DeadlineMissed)
    assert "0.05 s" in error.message
    assert "expires" not in computed(runner)
    assert engine.stats().total_missed == 1
    assert len(outcome.token_ids["runs"]) == 29


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_expires_while_it_runs_ends_then_and_frees_its_blocks(policy: str) -> None:
    engine, runner, clock = timed_engine(policy)
    outcome = run_to_end(engine, make_request(request_id="slow", max_tokens=900, deadline_s=0.055), clock=clock)
    assert isinstance(outcome.errors["slow"], DeadlineMissed)
    assert "while it ran" in outcome.errors["slow"].message
    assert len(outcome.token_ids["slow"]) == 5
    assert len(runner.batches) == 6
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_last_token_that_comes_too_late_is_not_delivered() -> None:
    engine, _, clock = timed_engine("fcfs")
    outcome = run_to_end(engine, make_request(request_id="late", max_tokens=2, deadline_s=0.015), clock=clock)
    assert isinstance(outcome.errors["late"], DeadlineMissed)
    assert len(outcome.token_ids["late"]) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_deadline_that_could_not_be_met_even_alone_is_refused_at_once(policy: str) -> None:
    engine, runner, clock = timed_engine(policy)
    engine.add(make_request(request_id="runs", max_tokens=100))
    for _ in range(20):
        engine.step()
    engine.add(make_request(request_id="impossible", max_tokens=50, ignore_eos=True, deadline_s=0.2))
    engine.add(make_request(request_id="possible", max_tokens=15, ignore_eos=True, deadline_s=0.2))
    outcome = Outcome()
    outcome.book(engine.step())
    assert isinstance(outcome.errors["impossible"], DeadlineMissed)
    assert "cannot be met" in outcome.errors["impossible"].message
    run_to_end(engine, clock=clock)
    assert "impossible" not in computed(runner)
    assert "possible" in computed(runner)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_request_is_refused_by_a_guess_of_the_output_length(policy: str) -> None:
    """A chat without max_tokens may use the whole context; that it could says nothing of what it will."""
    engine, _, clock = timed_engine(policy)
    engine.add(make_request(request_id="runs", max_tokens=100))
    for _ in range(20):
        engine.step()
    short = make_request(request_id="short", max_tokens=900, deadline_s=0.2, stop_token_ids=tuple(range(2, 50)))
    outcome = run_to_end(engine, short, clock=clock)
    assert not outcome.errors


def test_an_idle_engine_tries_whatever_it_believes_of_its_own_pace() -> None:
    """A first step that took long (compilation) must not make it refuse everything for ever."""
    engine, runner, clock = timed_engine("deadline")
    runner._step_s = 60.0
    run_to_end(engine, make_request(max_tokens=1), clock=clock)
    runner._step_s = 0.01
    outcome = run_to_end(engine, make_request(request_id="next", max_tokens=2, deadline_s=5), clock=clock)
    assert not outcome.errors


def test_what_can_no_longer_make_it_is_refused_before_it_expires() -> None:
    engine, runner, clock = timed_engine("deadline", max_running=1)
    engine.add(make_request(request_id="first", max_tokens=40, deadline_s=0.45))
    for _ in range(10):
        engine.step()
    # Starts too late for its 20 steps.
    engine.add(make_request(request_id="second", max_tokens=20, ignore_eos=True, deadline_s=0.4))
    outcome = Outcome()
    while "second" not in outcome.errors:
        outcome.book(engine.step())
    assert clock.at == pytest.approx(100 + 0.1 + 0.4 - 0.2, abs=0.03)
    run_to_end(engine, clock=clock)
    assert "second" not in computed(runner)


def test_a_deadline_that_has_passed_makes_no_request_more_urgent() -> None:
    engine, runner, clock = timed_engine("deadline", max_running=1)
    engine.add(make_request(request_id="runs", max_tokens=2))
    engine.step()
    engine.add(make_request(request_id="passed", deadline_s=0.005))
    engine.add(make_request(request_id="alive", deadline_s=10))
    run_to_end(engine, clock=clock)
    assert computed(runner)[:3] == ["runs", "runs", "alive"]
    assert "passed" not in computed(runner)


def test_an_expiry_wakes_an_engine_that_waits_for_its_batch_to_fill() -> None:
    engine, runner, clock = timed_engine("fcfs", strategy={"name": "static", "batch_size": 4, "max_wait_ms": 10_000})
    engine.add(make_request(request_id="a", deadline_s=0.5))
    assert engine.idle_s == pytest.approx(0.5)
    clock.advance(0.5)
    outcome = Outcome()
    outcome.book(engine.step())
    assert isinstance(outcome.errors["a"], DeadlineMissed)
    assert not runner.batches
    assert not engine.has_work


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_answered_late_and_nothing_expired_ever_takes_part_in_a_step(policy: str, seed: int) -> None:
    draw = random.Random(seed)
    engine, runner, clock = timed_engine(policy, max_running=4)
    deadlines: dict[str, float] = {}
    outcome = Outcome()
    asked: dict[str, tuple[tuple[int, ...], int]] = {}
    ended_at: dict[str, float] = {}
    for step in range(400):
        if step < 300 and draw.random() < 0.5:  # twice of what can be served
            name = f"request-{step}"
            prompt = tuple(draw.randrange(2, 50) for _ in range(draw.randint(1, 20)))
            request = make_request(
                prompt, request_id=name, max_tokens=draw.randint(1, 30), deadline_s=draw.uniform(0.05, 0.8)
            )
            assert request.deadline_s is not None
            engine.add(request)
            deadlines[name], asked[name] = clock.at + request.deadline_s, (prompt, request.sampling.max_tokens)
        if not engine.has_work:
            clock.advance(0.01)
            continue
        before, num_batches = clock.at, len(runner.batches)
        outcome.book(engine.step())
        for batch in runner.batches[num_batches:]:
            assert all(before < deadlines[item.request_id] for item in batch.scheduled)
        for name in outcome.reasons.keys() - ended_at.keys():
            ended_at[name] = clock.at
    assert set(outcome.reasons) == set(deadlines), "every one was answered"
    served = outcome.reasons.keys() - outcome.errors.keys()
    assert served
    assert outcome.errors
    for name in served:
        assert ended_at[name] <= deadlines[name]
        assert outcome.token_ids[name] == expected_tokens(*asked[name])


def goodput(policy: str) -> float:
    """Share of the asked tokens that were answered in time at twice the load that can be served."""
    draw = random.Random(11)
    engine, _, clock = timed_engine(policy, max_running=4, max_waiting=10_000)
    outcome, sizes = Outcome(), {}
    next_at = clock.at
    for number in range(1, 500):
        next_at += draw.expovariate(2 * 4 / (20 * 0.01))
        while clock.at < next_at:
            if engine.has_work:
                outcome.book(engine.step())
            else:
                clock.at = next_at
        request = make_request(
            tuple(draw.randrange(2, 50) for _ in range(4)), request_id=str(number), max_tokens=20, deadline_s=1.0
        )
        sizes[request.request_id] = 20
        engine.add(request)
    served = outcome.reasons.keys() - outcome.errors.keys()
    capacity = (clock.at - 100) / 0.01 * 4
    return sum(sizes[name] for name in served) / capacity


def test_under_twice_the_load_deadlines_keep_the_goodput_where_first_come_first_served_collapses() -> None:
    assert goodput("deadline") >= 0.9
    assert goodput("fcfs") < 0.5
