"""Tokens a second over the last minute, by a clock that the test turns."""

from __future__ import annotations

from app.jobs.batch_runner import TokenRate


def test_tokens_of_the_last_minute_count_and_of_no_one_else() -> None:
    now = 1000.5
    rate = TokenRate(lambda: now)
    assert rate.per_second("ann") == 0
    rate.add("ann", 30)
    rate.add("ann", 30)
    rate.add("bob", 1)
    assert rate.per_second("ann") == 60, "a second at least"
    now += 30
    rate.add("ann", 240)
    assert rate.per_second("ann") == 10
    now += 30
    assert rate.per_second("ann") == 4, "the first ones are a minute old"
    now += 31
    assert rate.per_second("ann") == 0
    assert rate.per_second("bob") == 0


def test_what_it_remembers_is_bounded() -> None:
    now = 0.0
    rate = TokenRate(lambda: now)
    for _ in range(10_000):
        now += 0.5
        rate.add("ann", 1)
    assert len(rate._seconds["ann"]) <= 60
    assert round(rate.per_second("ann")) == 2
