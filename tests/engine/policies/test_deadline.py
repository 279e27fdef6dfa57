"""Deadlines: the earliest that can be met first, the others refused; nothing is computed for expired requests."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.policies import EarliestDeadlineFirst
from app.engine.request import Request
from app.engine.sequence import EngineSequence
from app.errors import DeadlineMissed
from tests.kit.engine import POLICIES, TimedEngine, make_request


def test_the_earliest_deadline_goes_first_and_requests_without_one_have_the_default() -> None:
    timed = TimedEngine(policy="deadline", max_running=1)
    for name, deadline_s in {"90": 90, "none": None, "10": 10, "70": 70}.items():
        timed.add(make_request(request_id=name, max_tokens=1, deadline_s=deadline_s))
    timed.finish()
    assert timed.computed == ["10", "none", "70", "90"]


def test_short_deadlines_of_one_tenant_go_before_no_other_tenant() -> None:
    timed = TimedEngine(policy="deadline", max_running=1)
    for number in range(20):
        timed.add(make_request(request_id=f"hasty-{number}", tenant="hasty", max_tokens=1, deadline_s=50 - number))
    for number in range(4):
        timed.add(make_request(request_id=f"other-{number}", tenant="other", max_tokens=1))
    timed.finish()
    order = timed.computed
    others = [place for place, name in enumerate(order) if name.startswith("other")]
    assert others[-1] <= 8, "they take turns"
    assert [name for name in order if name.startswith("hasty")] == [f"hasty-{number}" for number in reversed(range(20))]


def test_of_one_tenant_the_latest_deadline_is_preempted_first_and_of_several_the_one_with_the_most_tokens() -> None:
    def sequence(number: int, tenant: str, deadline_s: float) -> EngineSequence:
        request = make_request((5,) * 10, tenant=tenant, deadline_s=deadline_s)
        return EngineSequence(request=request, arrival=number, arrived_at=0.0, order_key=())

    policy = EarliestDeadlineFirst()
    queue = policy.new_queue()

    def joined(each: EngineSequence) -> EngineSequence:
        queue.push(each)
        assert queue.pop() is each
        each.order_key = policy.order_key(each)
        policy.joined(each)
        return each

    late, early = joined(sequence(0, "one", 60)), joined(sequence(1, "one", 5))
    assert early.order_key < late.order_key
    other = joined(sequence(2, "other", 90))
    assert policy.has_new_order([late, early, other])
    assert not policy.has_new_order([late, early, other])
    assert other.order_key < joined(sequence(3, "one", 1)).order_key


def test_a_tenant_that_was_there_once_changes_no_order() -> None:
    """One tenant alone has the order of deadlines again, also among those that were running meanwhile."""
    timed = TimedEngine(policy="deadline", max_running=4, num_blocks=10)
    late = make_request((5,) * 6, request_id="late", tenant="one", deadline_s=60, max_tokens=20)
    timed.add(late)
    timed.step()
    timed.add(make_request(request_id="visitor", tenant="other", max_tokens=1))
    timed.step()
    timed.add(make_request((6,) * 6, request_id="early", tenant="one", deadline_s=20, max_tokens=20))
    timed.step()
    assert [each.request.request_id for each in timed.engine.running] == ["early", "late"]
    timed.finish()
    assert list(timed.outcome.reasons) == ["visitor", "early", "late"], "the latest deadline was preempted for memory"
    assert timed.stats.total_memory_preemptions


MOMENTS = st.lists(
    st.tuples(st.sampled_from(["one", "one", "other"]), st.sampled_from([None, 5.0, 90.0]), st.integers(1, 6)),
    max_size=12,
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(arrivals=MOMENTS)
def test_one_tenant_alone_is_ordered_by_deadline_whoever_was_there_before(
    arrivals: list[tuple[str, float | None, int]],
) -> None:
    timed = TimedEngine(policy="deadline", max_running=4)
    scheduler = timed.engine._scheduler
    assert isinstance(scheduler._policy, EarliestDeadlineFirst)
    for tenant, deadline_s, num_steps in arrivals:
        timed.add(make_request(tenant=tenant, deadline_s=deadline_s, max_tokens=9))
        for _ in range(num_steps):
            there = [*timed.engine.running, *scheduler.first_waiting(100)]
            timed.step()
            if len({each.request.tenant for each in there}) == 1:
                assert timed.engine.running == sorted(timed.engine.running, key=scheduler._policy.own_key)
    timed.finish()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_expires_in_the_queue_is_answered_and_computes_nothing(policy: str) -> None:
    timed = TimedEngine(policy=policy, max_running=1)
    runs = make_request(request_id="runs", max_tokens=30)
    timed.add(runs)
    timed.step()
    timed.add(make_request(request_id="expires", deadline_s=0.05, max_tokens=2))
    outcome = timed.finish()
    error = outcome.errors["expires"]
    assert isinstance(error, DeadlineMissed)
    assert "0.05 s" in error.message
    assert "expires" not in timed.computed
    assert timed.stats.total_missed == 1
    outcome.check(runs)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_expires_while_it_runs_ends_then_and_frees_its_blocks(policy: str) -> None:
    timed = TimedEngine(policy=policy)
    outcome = timed.finish(make_request(request_id="slow", max_tokens=900, deadline_s=0.055))
    assert isinstance(outcome.errors["slow"], DeadlineMissed)
    assert "while the request was running" in outcome.errors["slow"].message
    assert len(outcome.token_ids["slow"]) == 5
    assert len(timed.runner.batches) == 6
    assert timed.stats.num_free_blocks == timed.stats.num_blocks


def test_a_last_token_that_comes_too_late_is_not_delivered() -> None:
    timed = TimedEngine(policy="fcfs")
    outcome = timed.finish(make_request(request_id="late", max_tokens=2, deadline_s=0.015))
    assert isinstance(outcome.errors["late"], DeadlineMissed)
    assert len(outcome.token_ids["late"]) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_deadline_that_could_not_be_met_even_alone_is_refused_at_once(policy: str) -> None:
    timed = TimedEngine(policy=policy)
    timed.add(make_request(request_id="runs", max_tokens=100))
    timed.step(20)
    timed.add(make_request(request_id="impossible", max_tokens=50, ignore_eos=True, deadline_s=0.2))
    timed.add(make_request(request_id="possible", max_tokens=15, ignore_eos=True, deadline_s=0.2))
    timed.step()
    outcome = timed.outcome
    assert isinstance(outcome.errors["impossible"], DeadlineMissed)
    assert "cannot be met" in outcome.errors["impossible"].message
    timed.finish()
    assert "impossible" not in timed.computed
    assert "possible" in timed.computed


@pytest.mark.parametrize("policy", POLICIES)
def test_no_request_is_refused_by_a_guess_of_the_output_length(policy: str) -> None:
    """A chat without max_tokens may use the whole context; that it could says nothing of what it will."""
    timed = TimedEngine(policy=policy)
    timed.add(make_request(request_id="runs", max_tokens=100))
    timed.step(20)
    short = make_request(request_id="short", max_tokens=900, deadline_s=0.2, stop_token_ids=tuple(range(2, 50)))
    outcome = timed.finish(short)
    assert not outcome.errors


def test_an_idle_engine_tries_whatever_it_believes_of_its_own_pace() -> None:
    """A first step that took long (compilation) must not make it refuse everything for ever."""
    timed = TimedEngine(policy="deadline")
    timed.runner._step_s = 60.0
    timed.finish(make_request(max_tokens=1))
    timed.runner._step_s = 0.01
    outcome = timed.finish(make_request(request_id="next", max_tokens=2, deadline_s=5))
    assert not outcome.errors


def test_what_can_no_longer_make_it_is_refused_before_it_expires() -> None:
    timed = TimedEngine(policy="deadline", max_running=1)
    timed.add(make_request(request_id="first", max_tokens=40, deadline_s=0.45))
    timed.step(10)
    # Starts too late for its 20 steps.
    timed.add(make_request(request_id="second", max_tokens=20, ignore_eos=True, deadline_s=0.4))
    while "second" not in timed.outcome.errors:
        timed.step()
    assert timed.clock.at == pytest.approx(100 + 0.1 + 0.4 - 0.2, abs=0.03)
    timed.finish()
    assert "second" not in timed.computed


def test_a_deadline_that_has_passed_makes_no_request_more_urgent() -> None:
    timed = TimedEngine(policy="deadline", max_running=1)
    timed.add(make_request(request_id="runs", max_tokens=2))
    timed.step()
    timed.add(make_request(request_id="passed", deadline_s=0.005))
    timed.add(make_request(request_id="alive", deadline_s=10))
    timed.finish()
    assert timed.computed[:3] == ["runs", "runs", "alive"]
    assert "passed" not in timed.computed


def test_an_expiry_wakes_an_engine_that_waits_for_its_batch_to_fill() -> None:
    timed = TimedEngine(policy="fcfs", strategy={"name": "static", "max_wait_ms": 10_000}, max_running=4)
    timed.add(make_request(request_id="a", deadline_s=0.5))
    assert timed.engine.idle_s == pytest.approx(0.5)
    timed.clock.advance(0.5)
    timed.step()
    outcome = timed.outcome
    assert isinstance(outcome.errors["a"], DeadlineMissed)
    assert not timed.runner.batches
    assert not timed.engine.has_work


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_answered_late_and_nothing_expired_ever_takes_part_in_a_step(policy: str, seed: int) -> None:
    draw = random.Random(seed)
    timed = TimedEngine(policy=policy, max_running=4)
    deadlines: dict[str, float] = {}
    outcome, sent = timed.outcome, dict[str, Request]()
    ended_at: dict[str, float] = {}
    for step in range(400):
        if step < 300 and draw.random() < 0.5:  # twice of what can be served
            name = f"request-{step}"
            prompt = tuple(draw.randrange(2, 50) for _ in range(draw.randint(1, 20)))
            request = make_request(
                prompt, request_id=name, max_tokens=draw.randint(1, 30), deadline_s=draw.uniform(0.05, 0.8)
            )
            assert request.deadline_s is not None
            timed.add(request)
            deadlines[name], sent[name] = timed.clock.at + request.deadline_s, request
        if not timed.engine.has_work:
            timed.clock.advance(0.01)
            continue
        before, num_batches = timed.clock.at, len(timed.runner.batches)
        timed.step()
        for batch in timed.runner.batches[num_batches:]:
            assert all(before < deadlines[item.request_id] for item in batch.scheduled)
        for name in outcome.reasons.keys() - ended_at.keys():
            ended_at[name] = timed.clock.at
    assert set(outcome.reasons) == set(deadlines), "every one was answered"
    served = outcome.reasons.keys() - outcome.errors.keys()
    assert served
    assert outcome.errors
    for name in served:
        assert ended_at[name] <= deadlines[name]
        outcome.check(sent[name])


def goodput(policy: str) -> float:
    """Share of the asked tokens that were answered in time at twice the load that can be served."""
    draw = random.Random(11)
    timed = TimedEngine(policy=policy, max_running=4, max_waiting=10_000)
    next_at = timed.clock.at
    for number in range(1, 500):
        next_at += draw.expovariate(2 * 4 / (20 * 0.01))
        while timed.clock.at < next_at:
            if timed.engine.has_work:
                timed.step()
            else:
                timed.clock.at = next_at
        request = make_request(
            tuple(draw.randrange(2, 50) for _ in range(4)), request_id=str(number), max_tokens=20, deadline_s=1.0
        )
        timed.add(request)
    served = timed.outcome.reasons.keys() - timed.outcome.errors.keys()
    capacity = (timed.clock.at - 100) / 0.01 * 4
    return 20 * len(served) / capacity


def test_under_twice_the_load_deadlines_keep_the_goodput_where_first_come_first_served_collapses() -> None:
    assert goodput("deadline") >= 0.9
    assert goodput("fcfs") < 0.5
