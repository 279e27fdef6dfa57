"""What log-probabilities, a step log and grammars cost, end to end on the bundled model at the smallest size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import feature_cost, replay


@pytest.fixture
def workload(demo_path: Path, tmp_path: Path) -> list[str]:
    """The options of a feature that is measured on a workload."""
    line = {"prompt_token_ids": [3, 20, 21], "max_tokens": 4, "ignore_eos": True}
    path = tmp_path / "workload.jsonl"
    path.write_text("".join(json.dumps(line | {"id": f"r{number}"}) + "\n" for number in range(2)))
    return ["--model", str(demo_path), "--workload", str(path), "--threads", "1", "--device", "cpu", "--rounds", "3"]


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


@pytest.mark.parametrize("options", [[], ["--prompts", "--top", "0"]])
def test_log_probabilities_are_measured_in_turn_with_none(
    workload: list[str], capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert feature_cost.main(["logprobs", *workload, *options]) == 0
    found = printed(capsys)
    assert {name: len(each) for name, each in found["seconds"].items()} == {"without": 3, "with": 3}
    assert found["ratio"]["with"] > 0
    assert found["cpu_ratio"]["with"] > 0


def test_a_step_log_is_measured_in_turn_with_none_and_can_be_replayed(
    workload: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "log"
    assert feature_cost.main(["step_log", *workload, "--step-log", str(folder)]) == 0
    found = printed(capsys)
    assert {name: len(each) for name, each in found["seconds"].items()} == {"without": 3, "with": 3}
    assert found["ratio"]["with"] > 0
    assert found["writer_cpu_share"] > 0
    assert replay.main([str(folder), "--simulated"]) == 0


def test_each_kind_of_grammar_is_measured_in_turn_with_free_text(
    demo_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(demo_path), "--batch", "2", "--tokens", "12", "--rounds", "1"]
    assert feature_cost.main(["structured_output", *options]) == 0
    found = printed(capsys)
    assert found["ratio"].keys() == {"schema", "any object", "regex", "free until a tag"}
    assert all(len(each) == 1 for each in found["seconds"].values())
