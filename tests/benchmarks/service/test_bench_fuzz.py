"""Hostile requests: always the same ones, of every kind; a real service takes them and serves others meanwhile."""

from __future__ import annotations

import os
from collections import Counter
from itertools import islice
from pathlib import Path

from benchmarks.harness.http_call import Target
from benchmarks.harness.service import Service
from benchmarks.service.fuzz import Plan, attack
from benchmarks.service.hostile_requests import hostile_requests
from tests.benchmarks.servers import simulated_service

PLAN = Plan(cases=200, rate=200.0, connections=64, honest_rate=20.0, window_s=0.5, seed=3)


def test_the_same_seed_makes_the_same_requests_of_every_kind() -> None:
    some, again, other = (list(islice(hostile_requests(seed), 300)) for seed in (1, 1, 2))
    assert some == again
    assert some != other
    kinds = Counter(request.kind for request in some)
    assert len(kinds) == 8
    assert all(request.data.startswith(b"POST /"[: len(request.data)]) for request in some)
    assert {request.kind for request in some if request.is_cut} == {"cut_short", "broken_head", "stopped_chunks"}


def test_no_hostile_request_is_a_server_error_and_honest_ones_are_answered(demo_path: Path) -> None:
    with simulated_service(demo_path, step_ms=5) as url:
        target = Target.parse(url.replace("/v1", ""))
        figures = attack(Service(target, os.getpid()), PLAN)
    assert figures["cases"] == PLAN.cases
    assert figures["server_errors"] == []
    assert figures["outcomes"]["400"] > PLAN.cases / 2
    assert figures["honest_failed"] == 0
    assert figures["num_honest"] == {"calm": 20, "attacked": 20}
    assert figures["ratio_p99"] > 0
