"""The reliability table in pieces and put together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.stage import Size
from benchmarks.chaos.summing import main, summed
from benchmarks.chaos.verdict import spread


def line(pauses_ms: list[float], **more: Any) -> dict[str, Any]:
    counts = {"runs": 2, "lost": 0, "other_ends": {"timeout": 1}, "left_over": {"blocks": 0}}
    setup = {"seed": 1, "cpu": "a CPU", "num_cores": 2, "commit": "abc"}
    return {"row": "R1", "fault": "kill one"} | counts | spread("pause_ms", pauses_ms) | setup | more


def test_counts_are_added_and_percentiles_are_those_of_all_samples() -> None:
    [found] = summed([line([1.0, 2.0]), line([9.0, 10.0, 11.0], lost=1, other_ends={"timeout": 1, "status 503": 2})])
    assert (found["runs"], found["lost"], found["pieces"]) == (4, 1, 2)
    assert found["other_ends"] == {"timeout": 2, "status 503": 2}
    assert (found["pause_p50_ms"], found["pause_max_ms"]) == (9.0, 11.0)
    assert (found["num_cores"], found["commit"]) == (2, "abc")


def test_rows_and_faults_stay_apart() -> None:
    assert [found["pieces"] for found in summed([line([1.0]), line([1.0], fault="kill two"), line([2.0])])] == [2, 1]


def test_what_does_not_belong_together_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, other in enumerate((line([1.0], commit="def"), line([1.0], lost="none"))):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(line([1.0])) + "\n" + json.dumps(other))
    assert main([str(tmp_path / "0.jsonl")]) == 2
    assert "commit is 'abc' in one line and 'def' in another" in capsys.readouterr().err
    assert main([str(tmp_path / "1.jsonl")]) == 2
    assert "lost cannot be added up" in capsys.readouterr().err
    assert main([str(tmp_path / "2.jsonl")]) == 2


def test_every_seed_and_row_has_its_own_moments() -> None:
    draws = {Size(1, 1, seed).source(row).random() for seed in (1, 2) for row in ("R1", "R4")}
    assert len(draws) == 4
    assert Size(1, 1, 1).source("R1").random() in draws
