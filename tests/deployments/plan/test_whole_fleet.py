"""A large fleet in parts: every request is served, and the parts together look like the whole."""

from __future__ import annotations

import pickle

import pytest

from app.config import CacheConfig, SchedulerConfig
from deployments.plan.simulation import SimulatedRun, simulate
from deployments.plan.whole_fleet import MAX_PART, WholeFleet
from tests.deployments.plan.measured import measured_replica, trace_of

NUM_REPLICAS = 2 * MAX_PART + 1
TRACE = trace_of(*((0.001 * number, 50, 10) for number in range(2000)))


def test_all_requests_are_simulated_in_parts_as_in_the_whole() -> None:
    fleet = WholeFleet(
        trace=TRACE, measured=measured_replica(), scheduler=SchedulerConfig(), cache=CacheConfig(),
        dispatch="least_loaded", num_replicas=NUM_REPLICAS,
    )  # fmt: skip
    run = SimulatedRun()
    run.share = 0.0
    for number in range(fleet.num_parts):
        sent = pickle.loads(pickle.dumps(fleet))  # to another process, and what it gives back
        run.add(pickle.loads(pickle.dumps(sent.part(number))))
    whole = simulate(TRACE, measured_replica(), SchedulerConfig(), CacheConfig(), num_replicas=NUM_REPLICAS)
    assert (fleet.num_parts, run.share) == (3, pytest.approx(1.0))
    assert (run.num_requests, run.num_output_tokens) == (2000, 20_000)
    assert run.output_tokens_per_s == pytest.approx(whole.output_tokens_per_s, rel=0.05)
    assert run.percentile_s("itl", 50) == pytest.approx(whole.percentile_s("itl", 50), rel=0.1)
