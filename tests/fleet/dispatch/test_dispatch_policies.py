"""The dispatch rules, without anything that is dispatched to."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from app.fleet.dispatch import (
    Candidate,
    Decision,
    DispatchPolicy,
    LeastLoaded,
    PrefixAffinity,
    RequestSize,
    RoundRobin,
    make_policy,
)

SIZE = RequestSize(num_prompt_tokens=100, num_expected_tokens=50)
POLICIES = ("round_robin", "least_loaded", "prefix_affinity")


def load(replica_id: str, **known: Any) -> Candidate:
    return Candidate(replica_id=replica_id, **known)


def loads(**num_decode_tokens: int) -> list[Candidate]:
    return [load(replica_id, num_decode_tokens=tokens) for replica_id, tokens in num_decode_tokens.items()]


def order(policy: DispatchPolicy, *given: Candidate) -> list[str]:
    return ids(policy.decide(given, SIZE))


def ids(decision: Decision) -> list[str]:
    return [each.replica_id for each in decision.candidates]


def least_loaded() -> LeastLoaded:
    return LeastLoaded(random.Random(0))


def prefix_affinity(max_imbalance_tokens: int = 1000) -> PrefixAffinity:
    return PrefixAffinity(random.Random(0), max_imbalance_tokens=max_imbalance_tokens)


def test_round_robin_gives_each_replica_its_turn_whatever_its_load() -> None:
    policy = RoundRobin()
    orders = [order(policy, *loads(c=0, a=900, b=10)) for _ in range(4)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_round_robin_goes_on_after_a_replica_has_left_or_joined() -> None:
    policy = RoundRobin()
    assert order(policy, *loads(a=0, b=0, c=0))[0] == "a"
    assert order(policy, *loads(a=0, c=0))[0] == "c"
    assert order(policy, *loads(a=0, b=0, c=0))[0] == "a"
    assert order(policy, *loads(a=0, b=0, c=0))[0] == "b"


def test_least_loaded_counts_prompts_to_compute_and_tokens_to_generate_and_not_requests() -> None:
    many_short = load("many-short", num_requests=5, num_prefill_tokens=60, num_decode_tokens=40)
    one_long = load("one-long", num_requests=1, num_prefill_tokens=4000, num_decode_tokens=16)
    assert order(least_loaded(), one_long, many_short) == ["many-short", "one-long"]


def test_least_loaded_spreads_ties_evenly() -> None:
    policy = LeastLoaded(random.Random(7))
    firsts = [order(policy, *loads(a=0, b=0, busy=100))[0] for _ in range(1000)]
    assert 400 < firsts.count("a") < 600
    assert "busy" not in firsts


def test_least_loaded_is_the_same_for_the_same_seed() -> None:
    ties = loads(a=0, b=0, c=0, d=0)
    first, second = LeastLoaded(random.Random(3)), LeastLoaded(random.Random(3))
    assert [order(first, *ties) for _ in range(20)] == [order(second, *ties) for _ in range(20)]


def test_an_idle_slow_replica_waits_until_the_fast_ones_would_be_later() -> None:
    slow = load("slow", tokens_per_s=100)
    fast = load("fast", tokens_per_s=1000, num_decode_tokens=1000)  # 1,150 tokens: 1.15 s, the slow one takes 1.5 s
    assert order(least_loaded(), slow, fast)[0] == "fast"
    assert order(least_loaded(), slow, replace(fast, num_decode_tokens=1400))[0] == "slow"


@pytest.mark.parametrize(("speeds", "shares"), [((0, 0), (32, 32)), ((500, 500), (32, 32)), ((900, 300), (48, 16))])
def test_least_loaded_shares_requests_that_come_at_once_by_speed(speeds: Any, shares: Any) -> None:
    policy = least_loaded()
    replicas = {name: load(name, tokens_per_s=speed) for name, speed in zip("ab", speeds, strict=True)}
    for _ in range(64):
        chosen = replicas[order(policy, *replicas.values())[0]]
        replicas[chosen.replica_id] = replace(
            chosen,
            num_requests=chosen.num_requests + 1,
            num_prefill_tokens=chosen.num_prefill_tokens + SIZE.num_prompt_tokens,
            num_decode_tokens=chosen.num_decode_tokens + SIZE.num_expected_tokens,
        )
    assert tuple(each.num_requests for each in replicas.values()) == shares


def test_a_replica_of_unknown_speed_is_taken_for_a_usual_one() -> None:
    new = load("new", num_decode_tokens=100)
    known = [load(name, tokens_per_s=500, num_decode_tokens=101) for name in ("a", "b")]
    assert order(least_loaded(), *known, new)[0] == "new"
    assert order(least_loaded(), *known, replace(new, num_decode_tokens=102))[-1] == "new"


def test_prefix_affinity_takes_the_longest_match_near_the_least_load() -> None:
    short = load("short", num_cached_tokens=16)
    long = load("long", num_cached_tokens=64, num_decode_tokens=100)
    assert order(prefix_affinity(), load("none"), short, long) == ["long", "short", "none"]


def test_prefix_affinity_takes_no_more_load_than_the_match_is_worth() -> None:
    policy, idle = prefix_affinity(), load("idle", num_cached_tokens=256)
    assert order(policy, idle, load("busy", num_cached_tokens=512, num_decode_tokens=700))[0] == "busy"
    assert order(policy, idle, load("busy", num_cached_tokens=512, num_decode_tokens=800))[0] == "idle"
    alike = load("alike", num_cached_tokens=256, num_decode_tokens=10)
    assert order(policy, alike, idle)[0] == "idle", "of two that have the same prefix"


def test_prefix_affinity_takes_the_longest_match_where_all_have_queues() -> None:
    policy = prefix_affinity()
    short = load("short", num_cached_tokens=256, num_ahead=1)
    long = load("long", num_cached_tokens=512, num_ahead=2, num_decode_tokens=900)
    assert order(policy, short, long)[0] == "long"
    assert order(policy, replace(short, num_ahead=0), long)[0] == "short"


def test_a_prefix_that_all_requests_share_comes_to_all_replicas() -> None:
    policy, tokens, cached = prefix_affinity(4096), dict.fromkeys("abcdefgh", 0), {"a"}
    for _ in range(200):
        candidates = [
            load(each, num_decode_tokens=number, num_cached_tokens=256 * (each in cached))
            for each, number in tokens.items()
        ]
        chosen = policy.decide(candidates, SIZE).replica_id
        tokens[chosen] += 150
        cached.add(chosen)
    assert cached == set(tokens)
    assert max(tokens.values()) - min(tokens.values()) <= 3 * 256 + 150 + 150


def test_prefix_affinity_passes_over_a_match_beyond_the_bound_and_says_so() -> None:
    matching = load("matching", num_cached_tokens=64, num_prefill_tokens=1, num_decode_tokens=1000)
    decision = prefix_affinity().decide([matching, load("idle")], SIZE)
    assert ids(decision) == ["idle", "matching"]
    assert "the replicas with a matching prefix have too much" in decision.reason


def test_prefix_affinity_takes_the_second_best_match_when_the_best_is_too_loaded() -> None:
    best = load("best", num_cached_tokens=640, num_decode_tokens=5000)
    second = load("second", num_cached_tokens=624, num_decode_tokens=500)
    assert order(prefix_affinity(), best, second, load("idle")) == ["second", "idle", "best"]


def test_prefix_affinity_keeps_a_session_on_its_replica_where_nothing_is_known_to_be_cached() -> None:
    home = load("home", holds_session=True, num_decode_tokens=10)
    assert order(prefix_affinity(), load("other"), home)[0] == "home"
    assert order(prefix_affinity(), load("other", num_cached_tokens=16), home)[0] == "other"


def test_prefix_affinity_without_a_match_is_least_loaded() -> None:
    assert order(prefix_affinity(), *loads(a=3, b=1, c=2)) == ["b", "c", "a"]


def test_a_decision_is_told_in_one_line_with_its_numbers() -> None:
    busy = load("a", num_prefill_tokens=1200, num_decode_tokens=300, tokens_per_s=200)
    idle = load("b", tokens_per_s=100, is_full=True)
    decision = least_loaded().decide([idle, busy], SIZE)
    assert decision.reason == "least_loaded: a, the least work"
    assert decision.explain_loads() == (
        "a (1,200 prompt + 300 output + 150 of this request at speed 1.33 = 1,238 tokens); "
        "b (0 prompt + 0 output + 150 of this request at speed 0.67 = 225 tokens, full)"
    )


def test_of_many_candidates_the_line_shows_the_first_and_counts_the_rest() -> None:
    line = least_loaded().decide([load(f"r{n}", num_decode_tokens=n) for n in range(16)], SIZE).explain_loads()
    assert "r3" in line
    assert line.endswith("; and 12 more")


@st.composite
def any_loads(draw: st.DrawFn) -> list[Candidate]:
    count = st.integers(0, 10_000)
    return [
        Candidate(
            replica_id=replica_id,
            num_requests=draw(count),
            num_prefill_tokens=draw(count),
            num_decode_tokens=draw(count),
            tokens_per_s=draw(st.sampled_from([0.0, 1e-3, 100.0, 1e6])),
            num_cached_tokens=draw(count),
            holds_session=draw(st.booleans()),
            is_full=draw(st.booleans()),
        )
        for replica_id in draw(st.lists(st.text(max_size=3), unique=True, min_size=1, max_size=8))
    ]


@pytest.mark.parametrize("choice", POLICIES, ids=str)
@given(many=any_loads())
def test_every_policy_orders_all_replicas_once_and_the_full_ones_last(choice: Any, many: list[Candidate]) -> None:
    decision = make_policy(choice, random.Random(1)).decide(many, SIZE)
    assert sorted(ids(decision)) == sorted(each.replica_id for each in many)
    fullness = [candidate.is_full for candidate in decision.candidates]
    assert fullness == sorted(fullness)
    assert "\n" not in decision.reason + decision.explain_loads() or any("\n" in each.replica_id for each in many)


def test_an_awake_replica_goes_before_one_that_sleeps_while_it_has_room_soon() -> None:
    asleep = load("asleep", wake_s=2.0)
    for speed in (0.0, 100.0):
        busy, loaded = load("busy", num_decode_tokens=150, tokens_per_s=speed), load("loaded", num_decode_tokens=250)
        assert order(least_loaded(), asleep, busy) == ["busy", "asleep"]
        assert order(least_loaded(), asleep, replace(loaded, tokens_per_s=speed)) == ["asleep", "loaded"]


def test_the_time_to_wake_is_explained() -> None:
    assert "wakes in 2 s" in least_loaded().decide([load("asleep", wake_s=2.0)], SIZE).explain_loads()
