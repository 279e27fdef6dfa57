"""The dispatch rules, without anything that is dispatched to."""

from __future__ import annotations

import random

import pytest

from app.dispatch import LeastLoaded, ReplicaLoad, RoundRobin, make_policy
from app.errors import InvalidSetup


def loads(**num_tokens: int) -> list[ReplicaLoad]:
    return [
        ReplicaLoad(replica_id=replica_id, num_requests=tokens // 100, num_tokens=tokens)
        for replica_id, tokens in num_tokens.items()
    ]


def test_round_robin_gives_each_replica_its_turn_whatever_its_load() -> None:
    policy = RoundRobin()
    orders = [policy.order(loads(c=0, a=900, b=10)) for _ in range(4)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_round_robin_goes_on_after_a_replica_has_left_or_joined() -> None:
    policy = RoundRobin()
    assert policy.order(loads(a=0, b=0, c=0))[0] == "a"
    assert policy.order(loads(a=0, c=0))[0] == "c"
    assert policy.order(loads(a=0, b=0, c=0))[0] == "a"
    assert policy.order(loads(a=0, b=0, c=0))[0] == "b"


def test_least_loaded_prefers_fewer_outstanding_tokens_to_fewer_requests() -> None:
    many_short = ReplicaLoad(replica_id="many-short", num_requests=5, num_tokens=100)
    one_long = ReplicaLoad(replica_id="one-long", num_requests=1, num_tokens=4000)
    assert LeastLoaded(random.Random(0)).order([one_long, many_short]) == ["many-short", "one-long"]


def test_least_loaded_spreads_ties_evenly() -> None:
    policy = LeastLoaded(random.Random(7))
    firsts = [policy.order(loads(a=0, b=0, busy=100))[0] for _ in range(1000)]
    assert 400 < firsts.count("a") < 600
    assert "busy" not in firsts


def test_least_loaded_is_the_same_for_the_same_seed() -> None:
    ties = loads(a=0, b=0, c=0, d=0)
    first, second = LeastLoaded(random.Random(3)), LeastLoaded(random.Random(3))
    assert [first.order(ties) for _ in range(20)] == [second.order(ties) for _ in range(20)]


@pytest.mark.parametrize("name", ["round_robin", "least_loaded"])
def test_every_policy_orders_all_replicas_and_none_twice(name: str) -> None:
    policy = make_policy(name, random.Random(1))
    assert sorted(policy.order(loads(a=3, b=2, c=1))) == ["a", "b", "c"]
    assert policy.order([]) == []


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(InvalidSetup, match="'fastest'"):
        make_policy("fastest", random.Random(1))
