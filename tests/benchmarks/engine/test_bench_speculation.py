"""The benchmark of speculation on the bundled model at the smallest size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine import speculation


def test_both_ways_are_measured_in_turn_and_give_the_same_tokens(
    demo_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(demo_path), "--words", "--tokens", "16", "--streams", "3", "--rounds", "2"]
    assert speculation.main([*options, "--threads", "1"]) == 0
    cases = json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]
    assert list(cases) == ["copy", "chat", "chat, 3 streams", "JSON", "JSON, 3 streams"]
    for found in cases.values():
        assert 0 < found["lowest"] <= found["speed_ratio"] <= found["highest"]
        assert found["drafted_per_run"] >= found["kept_per_run"]
    assert cases["copy"]["kept_per_run"] > 0


def test_a_draft_model_of_the_first_layers_is_measured(demo_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(demo_path), "--words", "--tokens", "16", "--streams", "3", "--rounds", "1"]
    draft = ["--draft-model", str(demo_path), "--draft-layers", "1", "--cases", "copy"]
    assert speculation.main([*options, *draft, "--threads", "1"]) == 0
    cases = json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]
    assert list(cases) == ["copy"]
    assert cases["copy"]["drafted_per_run"] >= 0
