"""A histogram with cheap updates, and an immutable snapshot that can be added to other snapshots and sent."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from math import fsum

# Bounds from a millisecond to an hour, used by all histograms of times to make them comparable.
SECONDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 3600.0,
)  # fmt: skip
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
SMALL_NUMBERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

Bounds = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Distribution:
    """A snapshot of a histogram. `counts` has an entry for each bound and one for values above the last bound."""

    bounds: Bounds  # ascending; a value belongs to the first bound that it does not exceed
    counts: tuple[int, ...]
    total: float  # the sum of all values

    @property
    def num_values(self) -> int:
        return sum(self.counts)

    def __add__(self, other: Distribution) -> Distribution:
        """Return the sum of two distributions with the same bounds."""
        assert self.bounds == other.bounds, f"bounds differ: {self.bounds} and {other.bounds}"
        counts = tuple(mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True))
        return Distribution(self.bounds, counts, self.total + other.total)

    @classmethod
    def empty(cls, bounds: Bounds) -> Distribution:
        return cls(bounds, (0,) * (len(bounds) + 1), 0.0)


def sum_distributions(distributions: Iterable[Distribution], bounds: Bounds) -> Distribution:
    """Return the sum of distributions that all have these bounds."""
    several = list(distributions)
    assert all(each.bounds == bounds for each in several), f"bounds differ from {bounds}"
    if not several:
        return Distribution.empty(bounds)
    counts = tuple(map(sum, zip(*(each.counts for each in several), strict=True)))
    return Distribution(bounds, counts, fsum(each.total for each in several))


class Histogram:
    """Counts values by size. Only one thread may write, but a snapshot may be taken from any thread."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def snapshot(self) -> Distribution:
        """Return the distribution of the values so far.

        The total is rounded to a multiple of 2^-20. Sums of such totals are exact up to 2^33, so a sum over several
        processes does not depend on their order. This matters because Prometheus assumes that a counter was reset if it
        decreases, even in its last bit.
        """
        return Distribution(self._bounds, tuple(self._counts), round(self._total * 2**20) / 2**20)
