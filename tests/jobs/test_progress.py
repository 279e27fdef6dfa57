from __future__ import annotations

from app.jobs.progress import RATE_WINDOW_S, RunProgress, Summary


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


def test_a_summary_tells_of_deaths_only_if_there_were_any() -> None:
    settings = {"rows": 10, "ok": 9, "failed": 1, "prompt_tokens": 5, "completion_tokens": 6, "seconds": 2.0}
    rates = {"rows_per_s": 5.0, "tokens_per_s": 3.0}
    smooth = Summary(**settings, **rates, runs=1, engines_lost=0, continued_rows=0, recomputed_rows=0)  # type: ignore[arg-type]
    rough = Summary(**settings, **rates, runs=2, engines_lost=1, continued_rows=3, recomputed_rows=1)  # type: ignore[arg-type]
    assert "9 ok, 1 failed" in str(smooth)
    assert "lost" not in str(smooth)
    assert "2 runs, 1 engines lost; 3 rows went on where they were, 1 began again (10.00%)" in str(rough)
