"""Conversations through several ingresses."""

from __future__ import annotations

from benchmarks.service.prefixes import measure


def test_ingresses_find_as_much_as_one_of_them_and_after_a_restart() -> None:
    figures = measure(ingresses=[1, 3], num_replicas=3, num_requests=150, num_slots=8, num_per_s=6.0, seed=1)
    alone, three = figures["1 ingresses"], figures["3 ingresses"]
    assert alone["found"] > 0.5
    assert abs(three["found"] - alone["found"]) < 0.02
    assert abs(three["restarted"] - alone["found"]) < 0.02
    assert three["bytes_per_s"]
