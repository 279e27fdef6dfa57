"""Histograms and what they add up to."""

from __future__ import annotations

import pickle
import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from app.engine.histogram import SECONDS, SMALL_NUMBERS, TOKENS, Distribution, Histogram, sum_distributions

BOUNDS = (1.0, 2.5, 10.0)
values = st.lists(st.integers(0, 200).map(lambda quarter: quarter / 4))


def spread_of(numbers: list[float]) -> Distribution:
    histogram = Histogram(BOUNDS)
    for number in numbers:
        histogram.observe(number)
    return histogram.snapshot()


@given(values)
def test_every_value_is_in_the_first_bucket_that_it_does_not_exceed(numbers: list[float]) -> None:
    spread = spread_of(numbers)
    below = Counter(next((bound for bound in BOUNDS if number <= bound), None) for number in numbers)
    assert spread.counts == tuple(below[bound] for bound in (*BOUNDS, None))
    assert (spread.total, spread.num_values) == (sum(numbers), len(numbers))


@given(st.lists(values))
def test_spreads_add_up_to_the_spread_of_all_values(parts: list[list[float]]) -> None:
    assert sum_distributions(map(spread_of, parts), BOUNDS) == spread_of([number for part in parts for number in part])


def test_a_value_can_be_counted_several_times_at_once() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(2.0, 3)
    assert histogram.snapshot() == Distribution(BOUNDS, (0, 3, 0, 0), 6.0)


def test_a_snapshot_stays_as_it_is_and_crosses_processes() -> None:
    histogram = Histogram(BOUNDS)
    before = histogram.snapshot()
    histogram.observe(1.0)
    assert before.num_values == 0
    assert pickle.loads(pickle.dumps(before)) == before


def test_all_ladders_rise() -> None:
    for bounds in (SECONDS, TOKENS, SMALL_NUMBERS):
        assert list(bounds) == sorted(set(bounds))


def test_the_sum_of_some_distributions_is_the_same_in_any_order_and_in_any_groups() -> None:
    rng = random.Random(1)
    spreads = [spread_of([rng.expovariate(1.0) for _ in range(20)]) for _ in range(30)]
    totals = set()
    for _ in range(50):
        rng.shuffle(spreads)
        at = rng.randrange(1, 29)
        parts = [sum_distributions(part, BOUNDS) for part in (spreads[:at], spreads[at:])]
        totals.add(sum(parts, start=Distribution.empty(BOUNDS)))
        totals.add(sum_distributions(spreads, BOUNDS))
    assert len(totals) == 1
