"""The benchmark of structured output, at their smallest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine import structured_output_cost


def test_the_cost_is_told_of_each_kind_of_grammar(demo_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(demo_path), "--batch", "2", "--tokens", "12", "--rounds", "1"]
    assert structured_output_cost.main(options) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["median_of_ratios"].keys() == {"schema", "any object", "regex", "free until a tag"}
    assert all(len(each) == 1 for each in told["seconds"].values())
