"""Arrival times: the asked rate and no other, random where they say so, the same for the same seed."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.service.arrivals import bursts, poisson

NUM = 20_000
RATE = 8.0


def test_poisson_arrivals_come_at_the_asked_rate() -> None:
    """Not at half of it, as when a fixed gap is added to the exponential one."""
    *_, last = islice(poisson(RATE, seed=7), NUM)
    assert last / NUM == pytest.approx(1 / RATE, rel=0.02)


def test_a_burst_comes_at_once_and_the_next_keeps_the_mean_rate() -> None:
    assert list(islice(bursts(3, 6.0), 7)) == [0, 0, 0, 0.5, 0.5, 0.5, 1.0]
