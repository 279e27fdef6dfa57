from __future__ import annotations

from app.jobs.runner import RATE_WINDOW_S, RecentRate, RunProgress


def test_a_line_of_progress_has_rates_of_now_and_what_is_left() -> None:
    pace = RunProgress(1000)
    pace.begin(0.0, 0)
    pace.generated(500)
    assert pace.line(10.0, 100) == "100 of 1,000 rows (10%), 10.0 rows/s, 50 tokens/s, 1:30 left"


def test_what_was_done_before_this_run_does_not_count_for_the_pace() -> None:
    pace = RunProgress(1000)
    pace.begin(0.0, 900)
    assert "0.0 rows/s" in pace.line(1.0, 900)
    assert pace.line(2.0, 910).startswith("910 of 1,000 rows (91%), 5.0 rows/s")


def test_the_pace_forgets_what_was_long_ago() -> None:
    pace = RunProgress(100_000)
    pace.begin(0.0, 0)
    for second in range(1, 101):
        line = pace.line(float(second), 100 if second <= 50 else 100 + 20 * (second - 50))
    assert second > 2 * RATE_WINDOW_S
    assert "20.0 rows/s" in line


def test_what_came_in_the_window_counts() -> None:
    rate = RecentRate(60, began_at=1000.5)
    assert rate.per_second(1000.5) == 0
    rate.add(30, at=1000.5)
    rate.add(30, at=1000.5)
    assert rate.per_second(1000.5) == 60, "a second at least"
    rate.add(240, at=1030.5)
    assert rate.per_second(1030.5) == 10
    assert rate.per_second(1060.5) == 4, "the first ones are a minute old"
    assert rate.per_second(1091.5) == 0


def test_what_it_remembers_is_bounded() -> None:
    rate = RecentRate(60, began_at=0.0)
    for number in range(10_000):
        rate.add(1, at=number / 2)
    assert len(rate._seconds) <= 60
    assert round(rate.per_second(5_000)) == 2
