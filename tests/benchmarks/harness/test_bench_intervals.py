"""Intervals against published tables, values worked out by hand, and repeated draws."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.harness.intervals import Parts, critical_value, difference_of_means, difference_of_shares, share


def parts(sums: list[float], counts: list[float]) -> Parts:
    return Parts(np.array(sums, dtype=np.float64), np.array(counts, dtype=np.float64))


def test_with_equal_counts_the_difference_of_means_is_that_of_the_paired_t_test() -> None:
    ours, theirs = parts([3, 5, 4, 6], [1, 1, 1, 1]), parts([1, 4, 2, 2], [1, 1, 1, 1])
    found = difference_of_means(ours, theirs, 0.95)
    standard_error = math.sqrt(sum((each - 2.25) ** 2 for each in (2, 1, 2, 4)) / (4 * 3))
    assert found.value == pytest.approx(2.25)
    assert found.half_width == pytest.approx(critical_value(0.95, 4) * standard_error)


def test_wilsons_interval_of_a_share_is_that_of_newcombes_table() -> None:
    # 81 of 263 is 0.2553 … 0.3662 (Newcombe 1998, table I); so many parts make t normal.
    counts = [263 / 5000] * 5000
    found = share(parts([81 / 5000] * 5000, counts), 0.95)
    assert (found.low, found.high) == (pytest.approx(0.2553, abs=2e-4), pytest.approx(0.3662, abs=2e-4))


def test_19_of_20_intervals_have_the_true_difference_though_values_of_a_part_go_together() -> None:
    rng = np.random.default_rng(5)
    num_means = num_shares = 0
    for _ in range(400):
        load = rng.gamma(4, 0.25, 20)  # of the part, the same for both arms
        counts = rng.poisson(40, (2, 20)) + 1.0
        sums = np.array([[rng.exponential(mean * each, int(n)).sum() for each, n in zip(load, row, strict=True)]
                         for mean, row in zip((1.0, 0.8), counts, strict=True)])  # fmt: skip
        means = difference_of_means(Parts(sums[0], counts[0]), Parts(sums[1], counts[1]), 0.95)
        num_means += means.low <= 0.2 <= means.high
        in_time = rng.binomial(counts.astype(int), np.clip(0.9 - 0.05 * (load - 1), 0, 1)).astype(np.float64)
        shares = difference_of_shares(Parts(in_time[0], counts[0]), Parts(in_time[1], counts[1]), 0.95)
        num_shares += shares.low <= 0 <= shares.high
    assert 0.92 <= num_means / 400 <= 0.98
    assert num_shares / 400 >= 0.93
