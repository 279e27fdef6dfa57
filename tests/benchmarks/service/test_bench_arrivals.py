"""Arrival times: the asked rate and no other, random where they say so, the same for the same seed."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.harness.workload import TimedRequest, Workload
from benchmarks.service.arrivals import bursts, poisson
from tests.fakes import make_request

NUM = 20_000
RATE = 8.0


def workload(*arrivals_s: float) -> Workload:
    return Workload(
        tuple(
            TimedRequest(request=make_request(request_id=f"r{number}"), arrival_s=at_s)
            for number, at_s in enumerate(arrivals_s)
        )
    )


def times(found: Workload) -> list[float]:
    return [timed.arrival_s for timed in found.requests]


@pytest.fixture(scope="module")
def poisson_times() -> list[float]:
    return list(islice(poisson(RATE, seed=7), NUM))


def test_poisson_arrivals_come_at_the_asked_rate(poisson_times: list[float]) -> None:
    """Not at half of it, as when a fixed gap is added to the exponential one."""
    assert poisson_times[-1] / NUM == pytest.approx(1 / RATE, rel=0.02)


def test_a_burst_comes_at_once_and_the_next_keeps_the_mean_rate() -> None:
    assert list(islice(bursts(3, 6.0), 7)) == [0, 0, 0, 0.5, 0.5, 0.5, 1.0]
