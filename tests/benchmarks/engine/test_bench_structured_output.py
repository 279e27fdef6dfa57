"""The two benchmarks of structured output, at their smallest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine import grammar_attack, structured_output_cost
from benchmarks.engine.hostile_grammars import cases


def test_the_cost_is_told_of_each_kind_of_grammar(demo_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(demo_path), "--batch", "2", "--tokens", "12", "--rounds", "1"]
    assert structured_output_cost.main(options) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["median_of_ratios"].keys() == {"schema", "any object", "regex", "free until a tag"}
    assert all(len(each) == 1 for each in told["seconds"].values())


def test_the_attack_is_told_beside_what_it_does_to_others(demo_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert grammar_attack.main(["--model", str(demo_path), "--streams", "2", "--seconds", "1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["alone"]["tokens"] > 0
    assert told["attacked"]["p99_ms"] >= told["attacked"]["p50_ms"] > 0
    assert told["hostile"]["InvalidRequest"] > 0


def test_hostile_grammars_have_names_of_their_own() -> None:
    assert len({(name, kind) for name, kind, _ in cases()}) == len(cases())
