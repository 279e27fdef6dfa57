"""The arms of an A/B trial: their requests and their replicas."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import InvalidRequest
from app.fleet.dispatch import Candidate, Group, GroupChooser, group_of_rank, of_group

GROUPS = (Group("control", 0.9), Group("trial", 0.1))


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.9, 0.1), (1, 1, 2), (70, 20, 10)], ids=str)
def test_requests_are_split_by_share(shares: tuple[float, ...]) -> None:
    groups = [Group(f"group-{index}", share) for index, share in enumerate(shares)]
    chooser = GroupChooser(groups)
    counts = Counter(chooser.choose(f"request-{number}") for number in range(10_000))
    for group in groups:
        assert counts[group.name] / 10_000 == pytest.approx(group.share / sum(shares), abs=0.01)


def test_a_session_stays_in_its_group_on_every_ingress() -> None:
    first, second = GroupChooser(GROUPS), GroupChooser(GROUPS)
    sessions = [f"session-{number}" for number in range(100)]
    assert [first.choose(each) for each in sessions] == [second.choose(each) for each in sessions]
    assert first.choose("session-1") == first.choose("session-1")


def test_a_caller_may_name_a_group() -> None:
    chooser = GroupChooser(GROUPS)
    assert {chooser.choose(f"request-{number}", asked="trial") for number in range(50)} == {"trial"}


def test_an_unknown_group_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequest, match=r"no group 'B'; send one of control, trial") as caught:
        GroupChooser(GROUPS).choose("request-1", asked="B")
    assert caught.value.param == "group"


def test_a_caller_may_name_a_preset_and_gets_a_group_that_has_it() -> None:
    chooser = GroupChooser([Group("a", 1, "mixed"), Group("b", 1, "batch"), Group("c", 3, "batch")])
    counts = Counter(chooser.choose(f"request-{number}", preset="batch") for number in range(2000))
    assert counts.keys() == {"b", "c"}
    assert counts["c"] / 2000 == pytest.approx(0.75, abs=0.05)
    assert chooser.choose("request-1", asked="a", preset="batch") == "a", "a group is the more exact wish"


def test_a_preset_that_no_group_has_is_refused_with_those_there_are() -> None:
    chooser = GroupChooser([Group("a", 1, "mixed"), Group("b", 1, "batch"), Group("c", 3, "batch")])
    with pytest.raises(InvalidRequest, match=r"no group with the preset 'latency'; send one of mixed, batch") as caught:
        chooser.choose("request-1", preset="latency")
    assert caught.value.param == "preset"
    with pytest.raises(InvalidRequest, match="no group with the preset 'mixed'; this model has no groups"):
        GroupChooser(()).choose("request-1", preset="mixed")


def test_without_groups_no_replica_is_in_one_and_none_can_be_named() -> None:
    chooser = GroupChooser(())
    assert chooser.choose("request-1") == ""
    with pytest.raises(InvalidRequest, match="this model has no groups"):
        chooser.choose("request-1", asked="trial")


def test_replicas_are_given_to_groups_by_share() -> None:
    names = [group_of_rank(rank, GROUPS) for rank in range(10)]
    assert names == ["control", "trial", *["control"] * 8]
    assert group_of_rank(3, ()) == ""


SHARES = st.lists(st.floats(0.05, 10), min_size=1, max_size=5)


@given(shares=SHARES, num_more=st.integers(0, 30))
def test_every_group_has_a_replica_and_no_other_deserves_its_last_one_more(shares: list[float], num_more: int) -> None:
    groups = [Group(f"group-{index}", share) for index, share in enumerate(shares)]
    num_replicas = len(groups) + num_more
    counts = Counter(group_of_rank(rank, groups) for rank in range(num_replicas))
    assert set(counts) == {group.name for group in groups}
    # By Sainte-Laguë's divisors. A bound of the distance from the exact share is none of its properties: of four groups
    # that should have 1.4 each has 1, so the fifth has 1.6 too many.
    num = {group: counts[group.name] for group in groups}
    least_deserved = min((group.share / (2 * num[group] - 1) for group in groups if num[group] > 1), default=math.inf)
    assert all(group.share / (2 * num[group] + 1) <= least_deserved for group in groups)


def loads(**groups: str) -> list[Candidate]:
    return [Candidate(replica_id=replica_id, group=group) for replica_id, group in groups.items()]


def test_a_request_goes_to_the_replicas_of_its_group() -> None:
    found = of_group(loads(a="control", b="trial", c="control"), "control")
    assert [load.replica_id for load in found] == ["a", "c"]


def test_a_group_without_a_replica_falls_back_to_all() -> None:
    found = of_group(loads(a="control", b="control"), "trial")
    assert [load.replica_id for load in found] == ["a", "b"]


def test_without_a_group_all_replicas_will_do() -> None:
    found = of_group(loads(a="control", b=""), "")
    assert [load.replica_id for load in found] == ["a", "b"]
