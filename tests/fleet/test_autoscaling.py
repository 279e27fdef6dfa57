"""The rule for how many replicas there should be, without any replica."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config import AutoscalingConfig
from app.fleet.autoscaling import SHRINK_TO, AutoscalingLoad, decide, needed

SLOTS = 8


@st.composite
def configs(draw: st.DrawFn, lowest: int = 0) -> AutoscalingConfig:
    min_replicas = draw(st.integers(lowest, 5))
    return AutoscalingConfig(
        min_replicas=min_replicas,
        max_replicas=draw(st.integers(max(1, min_replicas), 20)),
        target_s=draw(st.floats(0.01, 100.0)),
    )


loads = st.builds(
    AutoscalingLoad,
    target=st.integers(0, 20),
    num_running=st.integers(0, 20),
    num_reporting=st.integers(0, 20),
    num_outstanding_tokens=st.integers(0, 1_000_000),
    speeds=st.lists(st.just(0.0) | st.floats(1.0, 1e5), max_size=3),
    num_replica_requests=st.integers(0, 500),
    kv_use=st.floats(0, 20),
    num_queued=st.integers(0, 100),
    num_slots=st.just(SLOTS),
)


def load(
    tokens: float, *, target: int, requests: int = 1, kv_use: float = 0.0, num_running: int = 1, speed: float = 1000.0
) -> AutoscalingLoad:
    """One replica that has it all: to the rule it makes no difference which replica has it."""
    return AutoscalingLoad(
        target=target,
        num_running=num_running,
        num_reporting=1,
        num_outstanding_tokens=tokens,
        speeds=[speed],
        num_replica_requests=requests,
        kv_use=kv_use,
        num_queued=0,
        num_slots=SLOTS,
    )


def without_replicas(*, target: int, num_queued: int) -> AutoscalingLoad:
    nothing = load(0, target=target, requests=0, num_running=0)
    return replace(nothing, num_reporting=0, num_queued=num_queued)


@given(loads, configs())
def test_the_limits_hold(situation: AutoscalingLoad, config: AutoscalingConfig) -> None:
    assert config.min_replicas <= decide(situation, config).number <= config.max_replicas


@given(loads, configs(), loads)
def test_more_work_never_asks_for_fewer(
    less: AutoscalingLoad, config: AutoscalingConfig, more: AutoscalingLoad
) -> None:
    busier = replace(
        less,
        num_outstanding_tokens=less.num_outstanding_tokens + more.num_outstanding_tokens,
        num_replica_requests=less.num_replica_requests + more.num_replica_requests,
        kv_use=less.kv_use + more.kv_use,
    )
    assert decide(busier, config).number >= decide(less, config).number


@given(st.integers(0, 100_000), st.integers(0, 20), configs())
def test_a_constant_load_is_answered_with_one_number_for_good(
    tokens: int, target: int, config: AutoscalingConfig
) -> None:
    settled = decide(load(tokens, target=target), config).number
    for _ in range(3):
        assert decide(load(tokens, target=settled), config).number == settled


@given(st.integers(100, 100_000), st.lists(st.floats(SHRINK_TO + 0.01, 1.0), min_size=1, max_size=20), configs())
def test_a_load_that_varies_by_less_than_a_fifth_changes_nothing(
    peak: int, shares: list[float], config: AutoscalingConfig
) -> None:
    settled = decide(load(peak, target=0), config).number
    assert {decide(load(peak * share, target=settled), config).number for share in shares} == {settled}


@given(loads, configs())
def test_there_is_none_only_when_there_is_no_request_anywhere(
    situation: AutoscalingLoad, config: AutoscalingConfig
) -> None:
    if decide(situation, config).number == 0:
        assert (situation.num_requests, config.min_replicas) == (0, 0)


def test_one_that_is_still_starting_is_not_stopped_for_want_of_requests() -> None:
    config = AutoscalingConfig(min_replicas=0)
    assert decide(without_replicas(target=1, num_queued=0), config).number == 1
    assert decide(load(0, target=1, requests=0), config).number == 0


@given(st.integers(1, 100), configs())
def test_the_first_request_asks_for_one(num_queued: int, config: AutoscalingConfig) -> None:
    assert decide(without_replicas(target=0, num_queued=num_queued), config).number >= 1


@pytest.mark.parametrize(
    ("given", "need"),
    [
        (load(2500, target=1, kv_use=0.1), 2.5),  # long answers to come
        (load(100, target=1, kv_use=0.96), 1.2),  # long prompts in memory
        (load(100, target=1, requests=12, kv_use=0.1), 1.5),  # many short ones wait for slots
    ],
)
def test_whatever_is_short_decides(given: AutoscalingLoad, need: float) -> None:
    assert needed(given, AutoscalingConfig(target_s=1.0))[0] == pytest.approx(need)


@given(st.floats(1.0, 100.0), st.floats(0.01, 100.0), st.floats(1.0, 1e5))
def test_replicas_twice_as_fast_are_half_as_many(need: float, target_s: float, speed: float) -> None:
    config, tokens = AutoscalingConfig(target_s=target_s), need * target_s * speed
    assert needed(load(tokens, target=1, speed=speed), config)[0] == pytest.approx(need)
    assert needed(load(tokens, target=1, speed=2 * speed), config)[0] == pytest.approx(need / 2)


def test_a_replica_that_has_not_measured_counts_with_what_the_others_have() -> None:
    some = replace(load(3000, target=4), speeds=[0.0, 1000.0, 0.0, 1000.0])
    assert needed(some, AutoscalingConfig(target_s=1.0))[0] == pytest.approx(3.0)
    one_paused = replace(some, speeds=[1000.0, 1000.0, 10.0])
    assert needed(one_paused, AutoscalingConfig(target_s=1.0))[0] == pytest.approx(3.0)


def test_no_replica_is_stopped_while_one_has_not_reported() -> None:
    config = AutoscalingConfig(target_s=1.0)
    assert decide(load(100, target=4, num_running=2), config).number == 4
    assert decide(load(100, target=4), config).number == 1


def test_full_slots_without_a_queue_are_no_reason_for_more() -> None:
    config = AutoscalingConfig(target_s=100.0)
    assert decide(load(100, target=1, requests=SLOTS), config).number == 1
    assert decide(load(100, target=1, requests=SLOTS + 1), config).number == 2


@pytest.mark.parametrize(
    ("num_missing", "num_running", "num_reporting", "expected"),
    [(0, 2, 2, 1), (1, 2, 2, 3), (2, 2, 2, 3), (1, 3, 3, 1), (2, 1, 1, 1), (2, 2, 1, 2)],
)
def test_where_half_of_the_replicas_miss_their_targets_there_is_one_more(
    num_missing: int, num_running: int, num_reporting: int, expected: int
) -> None:
    config = AutoscalingConfig(max_replicas=4, target_s=1.0)
    missing = replace(
        load(100, target=2, num_running=num_running), num_reporting=num_reporting, num_missing=num_missing
    )  # fmt: skip
    assert decide(missing, config).number == expected


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        (
            load(9_400, target=1, speed=620.0),
            (
                4,
                "tokens",
                "9,400 tokens at 620 tokens/s per replica are 15.2 s of work, with a target of 4 s per replica",
            ),
        ),
        (
            load(0, target=1, kv_use=1.7),
            (3, "kv", "the KV memory of 1.70 replicas is in use, with a target of 0.8 per replica"),
        ),
        (
            load(100, target=1, requests=SLOTS + 1),
            (2, "requests", f"{SLOTS + 1} requests need slots, and each replica has {SLOTS}"),
        ),
        (
            load(90_000, target=4),
            (
                4,
                "tokens",
                "90,000 tokens at 1,000 tokens/s per replica are 90.0 s of work, with a target of 4 s per replica; "
                "the number would be 23, but max_replicas is 4",
            ),
        ),
        (
            load(90_000, target=1, requests=SLOTS + 1, speed=0.0),
            (
                2,
                "requests",
                f"{SLOTS + 1} requests need slots, and each replica has {SLOTS}; no replica has measured its speed yet",
            ),
        ),
        (load(0, target=1, requests=0), (1, "idle", "no requests; the number would be 0, but min_replicas is 1")),
        (load(100, target=4, num_running=2), (4, "reports", "only 1 of 2 replicas have reported")),
    ],
)
def test_it_says_why(situation: AutoscalingLoad, expected: tuple[int, str, str]) -> None:
    assert decide(situation, AutoscalingConfig(target_s=4.0)) == expected
