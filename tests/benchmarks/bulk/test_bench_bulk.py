"""The benchmarks of bulk runs: their inputs and verdicts. The runs themselves are tested with the Ray tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.config import ApplicationConfig
from app.jobs.results import JOURNAL
from benchmarks.bulk import kills, lending, memory, pool
from benchmarks.bulk.bulk_run import BulkRun


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


def test_a_workload_becomes_rows_that_ask_the_same(tmp_path: Path) -> None:
    line = {"id": "a", "prompt_token_ids": [5, 6], "max_tokens": 3, "ignore_eos": True}
    (tmp_path / "workload.jsonl").write_text(json.dumps(line) + "\n")
    [row] = pool.rows_of(tmp_path / "workload.jsonl")
    assert row == {"id": "a", "prompt": [5, 6], "max_tokens": 3, "ignore_eos": True, "temperature": 0}


def test_the_service_that_lends_takes_further_settings_of_the_scheduler() -> None:
    given = lending._parser().parse_args(["--slots", "7", "--scheduler", '{"max_waiting": 9}', "--per-token-ms", "0.5"])
    [model] = ApplicationConfig.model_validate(lending.application(given)).models
    assert (model.engine.scheduler.max_running, model.engine.scheduler.max_waiting) == (7, 9)
    assert model.engine.model.simulated is not None
    assert model.engine.model.simulated["per_token_ms"] == 0.5


def test_the_pace_of_a_bulk_run_counts_whole_records_from_a_moment_on(tmp_path: Path) -> None:
    journal = tmp_path / JOURNAL
    run = BulkRun(tmp_path, [])
    assert lending.Pace(run).so_far()[0] == 0
    journal.write_text("0 0 0 9 0 5 {}\n0 1 0 9 0 7 {}\n0 2 0 9")
    assert (run.num_records(), run.num_tokens()) == (2, 12)
    pace = lending.Pace(run)
    with journal.open("a") as file:
        file.write(" 0 4 {}\n0 3 0 9 0 2 {}\n")
    tokens, seconds = pace.so_far()
    assert tokens == 6
    assert run.num_records() == 4
    assert seconds > 0


def test_growth_is_that_of_the_second_half_of_the_rows() -> None:
    def look(rows: int, driver: float) -> memory.Look:
        return memory.Look(seconds=0.0, rows=rows, driver=driver, readers=0.0, engines=0.0)

    looks = [look(0, 100), look(300_000, 300), look(600_000, 310), look(800_000, 314), look(1_000_000, 400)]
    assert memory.growth(looks, 1_000_000) == 2.0
    assert memory.growth(looks[:3], 1_000_000) is None


@pytest.mark.parametrize("page", [kills, lending, memory, pool])
def test_every_command_prints_its_options(page: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        page.main(["--help"])
    assert ended.value.code == 0
    assert page.__doc__.splitlines()[0] in capsys.readouterr().out
