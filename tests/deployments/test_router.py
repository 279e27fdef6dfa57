"""The router's ledger; how the router behaves in Serve is seen in test_serving.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.router import Charge, Ends, Ledger

CHARGE = Charge(internal_request_id="http-1", request_id="choice-0", num_tokens=100)
SIBLING = replace(CHARGE, request_id="choice-1")


def loads(ledger: Ledger, *replica_ids: str) -> list[tuple[int, int]]:
    return [(load.num_requests, load.num_tokens) for load in map(ledger.load, replica_ids)]


def test_a_request_weighs_on_its_replica_until_it_has_ended() -> None:
    ledger = Ledger()
    ledger.book(CHARGE, "a")
    assert loads(ledger, "a", "b") == [(1, 100), (0, 0)]
    ledger.complete("http-1", "a")
    assert loads(ledger, "a", "b") == [(0, 0), (0, 0)]


def test_a_request_that_another_replica_took_moves_there() -> None:
    ledger = Ledger()
    ledger.book(CHARGE, "a")
    ledger.book(CHARGE, "b")
    assert loads(ledger, "a", "b") == [(0, 0), (1, 100)]


def test_the_late_end_of_a_refused_try_leaves_the_request_where_it_went() -> None:
    ledger = Ledger()
    ledger.book(CHARGE, "a")
    ledger.book(CHARGE, "b")
    ledger.complete("http-1", "a")
    assert loads(ledger, "a", "b") == [(0, 0), (1, 100)]


def test_the_choices_of_one_http_request_are_counted_one_by_one() -> None:
    ledger = Ledger()
    ledger.book(CHARGE, "a")
    ledger.book(SIBLING, "a")
    assert loads(ledger, "a") == [(2, 200)]
    ledger.complete("http-1", "a")
    assert loads(ledger, "a") == [(1, 100)]
    ledger.complete("http-1", "a")
    ledger.complete("http-1", "a")
    assert loads(ledger, "a") == [(0, 0)]


def test_a_request_placed_nowhere_leaves_nothing() -> None:
    ledger = Ledger()
    ledger.book(CHARGE, "a")
    ledger.drop(CHARGE)
    ledger.drop(CHARGE)
    assert loads(ledger, "a") == [(0, 0)]


def test_a_replica_that_is_gone_takes_its_requests_along() -> None:
    ledger = Ledger()
    ledger.book(CHARGE, "a")
    ledger.book(SIBLING, "b")
    ledger.keep_only({"b"})
    ledger.complete("http-1", "a")
    assert loads(ledger, "a", "b") == [(0, 0), (1, 100)]


def test_how_fast_places_become_free_is_seen_from_those_that_did() -> None:
    ends = Ends()
    assert ends.per_s(1.0) == 0
    for n in range(1000):
        ends.note(100 + n / 4)
    assert ends.per_s(350.0) == pytest.approx(4, rel=0.02)
    assert ends.per_s(350.0 + 64) == pytest.approx(2, rel=0.02)  # nothing more has ended


def test_only_what_was_booked_counts_as_ended() -> None:
    ledger = Ledger()
    ledger.book(CHARGE, "a")
    assert not ledger.complete("control call", "a")
    assert ledger.complete("http-1", "a")
    assert not ledger.complete("http-1", "a")
