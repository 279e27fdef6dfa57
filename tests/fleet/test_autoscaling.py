"""The rule for how many replicas there should be, without any replica."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from app.config import AutoscalingConfig
from app.fleet.autoscaling import SHRINK_TO, ReplicaUse, Situation, desired_replicas, needed

SLOTS = 8


@st.composite
def configs(draw: st.DrawFn, lowest: int = 0) -> AutoscalingConfig:
    min_replicas = draw(st.integers(lowest, 5))
    return AutoscalingConfig(
        min_replicas=min_replicas,
        max_replicas=draw(st.integers(max(1, min_replicas), 20)),
        target_tokens=draw(st.integers(1, 10_000)),
    )


uses = st.builds(
    ReplicaUse,
    num_outstanding_tokens=st.integers(0, 100_000),
    num_requests=st.integers(0, 50),
    kv_use=st.floats(0, 1),
)
situations = st.builds(
    Situation,
    target=st.integers(0, 20),
    num_running=st.integers(0, 20),
    uses=st.lists(uses, max_size=20),
    num_queued=st.integers(0, 100),
    num_slots=st.just(SLOTS),
)


def load(tokens: float, *, target: int, requests: int = 1, queued: float = 0) -> Situation:
    """One replica that has it all: to the rule it makes no difference who has it."""
    use = ReplicaUse(num_outstanding_tokens=tokens, num_requests=requests, kv_use=0.0)
    return Situation(target=target, num_running=1, uses=[use], num_queued=queued, num_slots=SLOTS)


@given(situations, configs())
def test_the_limits_hold(situation: Situation, config: AutoscalingConfig) -> None:
    assert config.min_replicas <= desired_replicas(situation, config) <= config.max_replicas


@given(situations, configs(), uses)
def test_more_work_never_asks_for_fewer(situation: Situation, config: AutoscalingConfig, more: ReplicaUse) -> None:
    assume(situation.uses)
    first, *others = situation.uses
    raised = ReplicaUse(
        num_outstanding_tokens=first.num_outstanding_tokens + more.num_outstanding_tokens,
        num_requests=first.num_requests + more.num_requests,
        kv_use=max(first.kv_use, more.kv_use),
    )
    busier = Situation(
        target=situation.target,
        num_running=situation.num_running,
        uses=[raised, *others],
        num_queued=situation.num_queued,
        num_slots=SLOTS,
    )
    assert desired_replicas(busier, config) >= desired_replicas(situation, config)


@given(st.integers(0, 100_000), st.integers(0, 20), configs())
def test_a_constant_load_is_answered_with_one_number_for_good(
    tokens: int, target: int, config: AutoscalingConfig
) -> None:
    settled = desired_replicas(load(tokens, target=target), config)
    for _ in range(3):
        assert desired_replicas(load(tokens, target=settled), config) == settled


@given(st.integers(100, 100_000), st.lists(st.floats(SHRINK_TO + 0.01, 1.0), min_size=1, max_size=20), configs())
def test_a_load_that_varies_by_less_than_a_fifth_changes_nothing(
    peak: int, shares: list[float], config: AutoscalingConfig
) -> None:
    settled = desired_replicas(load(peak, target=0), config)
    assert {desired_replicas(load(peak * share, target=settled), config) for share in shares} == {settled}


@given(situations, configs())
def test_there_is_none_only_when_there_is_no_request_anywhere(situation: Situation, config: AutoscalingConfig) -> None:
    if desired_replicas(situation, config) == 0:
        assert (situation.num_requests, config.min_replicas) == (0, 0)


def test_one_that_is_still_starting_is_not_stopped_for_want_of_requests() -> None:
    config = AutoscalingConfig(min_replicas=0)
    starting = Situation(target=1, num_running=0, uses=[], num_queued=0, num_slots=SLOTS)
    assert desired_replicas(starting, config) == 1
    assert desired_replicas(load(0, target=1, requests=0), config) == 0


@given(st.integers(1, 100), configs())
def test_the_first_request_asks_for_one(num_queued: int, config: AutoscalingConfig) -> None:
    asleep = Situation(target=0, num_running=0, uses=[], num_queued=num_queued, num_slots=SLOTS)
    assert desired_replicas(asleep, config) >= 1


@pytest.mark.parametrize(
    ("use", "need"),
    [
        (ReplicaUse(num_outstanding_tokens=2500, num_requests=1, kv_use=0.1), 2.5),  # long answers to come
        (ReplicaUse(num_outstanding_tokens=100, num_requests=1, kv_use=0.96), 1.2),  # long prompts in memory
        (ReplicaUse(num_outstanding_tokens=100, num_requests=12, kv_use=0.1), 1.5),  # many short ones wait for slots
    ],
)
def test_whatever_is_short_decides(use: ReplicaUse, need: float) -> None:
    config = AutoscalingConfig(target_tokens=1000)
    situation = Situation(target=1, num_running=1, uses=[use], num_queued=0, num_slots=SLOTS)
    assert needed(situation, config) == pytest.approx(need)


def test_nobody_goes_while_a_replica_has_not_told_what_it_has() -> None:
    config = AutoscalingConfig(target_tokens=1000)
    silent = Situation(target=4, num_running=2, uses=load(100, target=4).uses, num_queued=0, num_slots=SLOTS)
    assert desired_replicas(silent, config) == 4
    assert desired_replicas(load(100, target=4), config) == 1


def test_full_slots_that_nobody_waits_for_are_no_reason_for_more() -> None:
    config = AutoscalingConfig(target_tokens=100_000)
    assert desired_replicas(load(100, target=1, requests=SLOTS), config) == 1
    assert desired_replicas(load(100, target=1, requests=SLOTS + 1), config) == 2
