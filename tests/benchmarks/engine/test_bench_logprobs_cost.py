"""What log-probabilities cost, end to end on the bundled model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine import logprobs_cost


@pytest.mark.parametrize("options", [[], ["--prompts", "--top", "0"]])
def test_both_ways_are_measured_in_turn(
    demo_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    line = {"prompt_token_ids": [3, 20, 21], "max_tokens": 4, "ignore_eos": True}
    workload = tmp_path / "workload.jsonl"
    workload.write_text("".join(json.dumps(line | {"id": f"r{number}"}) + "\n" for number in range(2)))
    arguments = ["--model", str(demo_path), "--workload", str(workload), "--threads", "1", "--device", "cpu"]
    assert logprobs_cost.main([*arguments, "--rounds", "3", *options]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name: len(each) for name, each in found["seconds"].items()} == {"without": 3, "with": 3}
    assert found["median_of_ratios"] > 0
    assert found["median_of_cpu_ratios"] > 0
