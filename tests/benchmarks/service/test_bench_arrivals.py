"""Arrival times: the asked rate and no other, random where they say so, the same for the same seed."""

from __future__ import annotations

from itertools import islice, pairwise
from statistics import fmean, pvariance

import pytest

from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.workload import TimedRequest, Workload
from benchmarks.service.arrivals import Arrivals, bursts, poisson
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


def test_gaps_between_poisson_arrivals_vary_as_exponential_ones_do(poisson_times: list[float]) -> None:
    gaps = [after - before for before, after in pairwise([0.0, *poisson_times])]
    assert min(gaps) < 0.001 / RATE
    assert pvariance(gaps) / fmean(gaps) ** 2 == pytest.approx(1, abs=0.05)


def test_counts_of_poisson_arrivals_have_an_index_of_dispersion_of_one(poisson_times: list[float]) -> None:
    counts = [0] * int(poisson_times[-1])  # of whole seconds
    for at_s in poisson_times:
        if at_s < len(counts):
            counts[int(at_s)] += 1
    assert pvariance(counts) / fmean(counts) == pytest.approx(1, abs=0.1)


def test_a_seed_gives_the_same_times_and_another_load_the_same_scaled() -> None:
    arrivals, work = Arrivals.parse("poisson:8"), workload(0, 0, 0, 0)
    once = times(arrivals.arrange(work, rate=None, seed=1))
    assert times(arrivals.arrange(work, rate=None, seed=1)) == once
    assert times(arrivals.arrange(work, rate=None, seed=2)) != once
    assert times(arrivals.arrange(work, rate=None, load=2, seed=1)) == pytest.approx([at_s / 2 for at_s in once])


def test_a_burst_comes_at_once_and_the_next_keeps_the_mean_rate() -> None:
    assert list(islice(bursts(3, 6.0), 7)) == [0, 0, 0, 0.5, 0.5, 0.5, 1.0]


def test_one_burst_for_all_needs_no_rate() -> None:
    arrivals = Arrivals.parse("burst:3")
    assert not arrivals.needs_rate(workload(0, 1, 2))
    assert times(arrivals.arrange(workload(0, 1, 2), rate=None)) == [0, 0, 0]
    assert arrivals.needs_rate(workload(0, 1, 2, 3))
    assert times(arrivals.arrange(workload(0, 1, 2, 3), rate=6.0)) == [0, 0, 0, 0.5]


def test_a_trace_keeps_the_times_of_the_workload_or_plays_them_faster() -> None:
    arrivals = Arrivals.parse("trace")
    assert not arrivals.needs_rate(workload(0, 1, 5))
    assert times(arrivals.arrange(workload(0, 1, 5), rate=None)) == [0, 1, 5]
    assert times(arrivals.arrange(workload(0, 1, 5), rate=None, load=2)) == [0, 0.5, 2.5]


def test_arrivals_without_a_rate_of_their_own_take_the_one_they_are_given() -> None:
    assert Arrivals.parse("poisson").needs_rate(workload(0))
    assert not Arrivals.parse("poisson:8").needs_rate(workload(0))
    own = Arrivals.parse("poisson:8").arrange(workload(0, 0), rate=100.0)
    assert times(Arrivals.parse("poisson").arrange(workload(0, 0), rate=8.0)) == times(own)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("uniform", "write poisson"),
        ("poisson:fast", "'fast' is no number above 0"),
        ("poisson:0", "'0' is no number"),
        ("poisson:inf", "'inf' is no number"),
        ("burst:0", "a burst is of one request or more"),
        ("burst:4@x", "'x' is no number"),
        ("trace:2", "write poisson"),
    ],
)
def test_what_is_no_kind_of_arrival_is_told(text: str, message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        Arrivals.parse(text)
