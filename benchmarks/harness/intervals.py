"""Confidence intervals of means and shares, and of their differences, from a run that was cut into equal parts.

Requests that come at the same time share queues and steps, so they are not independent; parts of a run nearly are
(batch means, Law and Kelton, "Simulation Modeling and Analysis"). A mean is the sum of all parts over the count of all
parts: a ratio estimator, its variance by linearisation (Cochran, "Sampling Techniques", chapter 6).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

FloatArray = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate, and between which values it lies with the confidence asked for."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


@dataclass(frozen=True, slots=True)
class Parts:
    """A sum and a count for each part of a run, in the order of time. Their ratio is a mean or, of ones, a share."""

    sums: FloatArray
    counts: FloatArray  # of one arm at least one is above 0

    @property
    def num_values(self) -> float:
        return float(self.counts.sum())

    @property
    def ratio(self) -> float:
        return float(self.sums.sum() / self.counts.sum())

    def residuals(self) -> FloatArray:
        """What each part adds to the error of the ratio, times the number of parts; their sum is 0."""
        return (self.sums - self.ratio * self.counts) / float(self.counts.mean())


def difference_of_means(ours: Parts, theirs: Parts, confidence: float) -> Interval:
    """Our mean minus theirs. The parts are pairs: load that rises for both arms in a part cancels out."""
    difference = ours.ratio - theirs.ratio
    reach = critical_value(confidence, len(ours.sums)) * _standard_error(ours.residuals() - theirs.residuals())
    return Interval(difference, difference - reach, difference + reach)


def difference_of_shares(
    ours: Parts, theirs: Parts, confidence: float, *, limits: tuple[float, float] = (math.inf, math.inf)
) -> Interval:
    """Our share minus theirs, by Newcombe's method 10 (1998): from the Wilson interval of each.

    limits: as how many independent values ours and theirs count at most; tokens of one request are not independent.
    """
    a, b = share(ours, confidence, limits[0]), share(theirs, confidence, limits[1])
    difference = a.value - b.value
    return Interval(
        difference,
        difference - math.hypot(a.value - a.low, b.high - b.value),
        difference + math.hypot(a.high - a.value, b.value - b.low),
    )


def share(parts: Parts, confidence: float, limit: float = math.inf) -> Interval:
    """Wilson's interval of a share, which holds near 0 and 1 too.

    Where parts differ by more than independent values would, it is that of fewer values (design effect, Kish 1965).
    """
    found = min(1.0, max(0.0, parts.ratio))
    num_effective = min(parts.num_values, limit)
    spread = _standard_error(parts.residuals()) ** 2
    if spread > 0:
        num_effective = min(num_effective, found * (1 - found) / spread)
    square = critical_value(confidence, len(parts.sums)) ** 2
    weight = 1 + square / num_effective
    centre = (found + square / (2 * num_effective)) / weight
    reach = math.sqrt(square * (found * (1 - found) / num_effective + square / (4 * num_effective**2))) / weight
    return Interval(found, min(found, centre - reach), max(found, centre + reach))


def critical_value(confidence: float, num_parts: int) -> float:
    """Of Student's t with a degree of freedom less than there are parts: standard errors to each side.

    Abramowitz and Stegun 26.7.5; from 10 parts on it is within 0.001 of the tables at 95%.
    """
    x, freedom = NormalDist().inv_cdf((1 + confidence) / 2), num_parts - 1
    terms = (
        x,
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))


def _standard_error(residuals: FloatArray) -> float:
    num_parts = len(residuals)
    return math.sqrt(float((residuals**2).sum()) / (num_parts * (num_parts - 1)))
