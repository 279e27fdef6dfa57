"""Lanes of the Gantt chart."""

from __future__ import annotations

from benchmarks.engine.slots import Holding, holdings
from benchmarks.engine.step_trace import Step


def steps(*present: str) -> list[Step]:
    return [
        Step(began_s=at, ended_s=at + 1, num_tokens=dict.fromkeys(names, 1), num_running=len(names), num_waiting=0)
        for at, names in enumerate(present)
    ]


def test_a_request_keeps_its_slot_and_the_next_takes_the_lowest_free_one() -> None:
    assert set(holdings(steps("ab", "b", "bc"))) == {
        Holding("a", 0, 0, 1),
        Holding("b", 1, 0, 3),
        Holding("c", 0, 2, 3),
    }


def test_one_that_was_preempted_comes_again_and_idle_time_holds_nothing() -> None:
    assert holdings(steps("a", "", "a")) == [Holding("a", 0, 0, 1), Holding("a", 0, 2, 3)]


def test_no_two_requests_share_a_slot_at_one_time() -> None:
    found = holdings(steps("abc", "bcd", "cdef", "f", "fgh"))
    for one in found:
        for other in found:
            if one is not other and one.slot == other.slot:
                assert one.ended_s <= other.began_s or other.ended_s <= one.began_s
