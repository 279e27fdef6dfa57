"""The benchmark of kills: its rows and its verdict. Bulk runs themselves are tested with the Ray tests."""

from __future__ import annotations

from typing import Any

from benchmarks.bulk import kills


def record(row: int, text: str = "so", error: str | None = None) -> dict[str, Any]:
    return {"row": row, "text": text, "error": error}


def test_rows_are_judged_by_a_run_in_which_nothing_died() -> None:
    smooth = [record(row, f"text {row}") for row in range(5)]
    rough = [record(0, "text 0"), record(1, "text 1"), record(1, "text 1"), record(2, "other"), record(3, "", "why")]
    assert kills.judged(smooth, rough, 5) == {
        "rows_lost": 1, "rows_twice": 1, "rows_failed": 1, "rows_different": 2,
    }  # fmt: skip


def test_the_rows_to_kill_have_ids_of_their_own_and_the_lengths_asked_for() -> None:
    given = kills._parser().parse_args(["--rows", "50", "--output", "8"])
    rows = list(kills.rows(given))
    assert len({row["id"] for row in rows}) == 50
    assert all(4 <= row["max_tokens"] <= 12 for row in rows)
