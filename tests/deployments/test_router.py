"""The router's ledger; how the router behaves in Serve is seen in test_serving.py."""

from __future__ import annotations

from dataclasses import replace

from app.dispatch import RequestSize
from deployments.router import Calls, Charge

CHARGE = Charge("http-1", "choice-0", RequestSize(num_prompt_tokens=60, num_expected_tokens=40))
SIBLING = replace(CHARGE, request_id="choice-1")


def loads(calls: Calls, *replica_ids: str) -> list[tuple[int, int]]:
    found = calls.ledger.loads(replica_ids, now=0.0)
    return [(load.num_requests, load.num_prefill_tokens + load.num_decode_tokens) for load in found]


def test_a_request_weighs_on_its_replica_until_it_has_ended() -> None:
    calls = Calls()
    calls.book(CHARGE, "a")
    assert loads(calls, "a", "b") == [(1, 100), (0, 0)]
    calls.complete("http-1", "a")
    assert loads(calls, "a", "b") == [(0, 0), (0, 0)]


def test_a_request_that_another_replica_took_moves_there() -> None:
    calls = Calls()
    calls.book(CHARGE, "a")
    calls.book(CHARGE, "b")
    assert loads(calls, "a", "b") == [(0, 0), (1, 100)]


def test_the_late_end_of_a_refused_try_leaves_the_request_where_it_went() -> None:
    calls = Calls()
    calls.book(CHARGE, "a")
    calls.book(CHARGE, "b")
    calls.complete("http-1", "a")
    assert loads(calls, "a", "b") == [(0, 0), (1, 100)]


def test_the_choices_of_one_http_request_are_counted_one_by_one() -> None:
    calls = Calls()
    calls.book(CHARGE, "a")
    calls.book(SIBLING, "a")
    assert loads(calls, "a") == [(2, 200)]
    calls.complete("http-1", "a")
    assert loads(calls, "a") == [(1, 100)]
    calls.complete("http-1", "a")
    calls.complete("http-1", "a")
    assert loads(calls, "a") == [(0, 0)]


def test_a_request_placed_nowhere_leaves_nothing() -> None:
    calls = Calls()
    calls.book(CHARGE, "a")
    calls.drop(CHARGE)
    calls.drop(CHARGE)
    assert loads(calls, "a") == [(0, 0)]


def test_a_replica_that_is_gone_takes_its_requests_along() -> None:
    calls = Calls()
    calls.book(CHARGE, "a")
    calls.book(SIBLING, "b")
    calls.keep_only({"b"})
    calls.complete("http-1", "a")
    assert loads(calls, "a", "b") == [(0, 0), (1, 100)]


def test_only_what_was_booked_counts_as_ended() -> None:
    calls = Calls()
    calls.book(CHARGE, "a")
    assert not calls.complete("control call", "a")
    assert calls.complete("http-1", "a")
    assert not calls.complete("http-1", "a")
