"""The benchmark of predictions on the bundled model at the smallest size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine import predictions


@pytest.mark.parametrize("own", [False, True], ids=["dictated", "own"])
def test_all_ways_are_measured_in_turn_and_give_the_same_tokens(
    own: bool, demo_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "list.py"
    file.write_text("".join(f"item{n} = first(item, {n})\n" for n in range(4)))
    options = ["--model", str(demo_path), "--file", str(file), "--rename", "item=entry", "--rounds", "1"]
    options += ["--streams", "1", "2", "--threads", "1", "--tokens", "40"]
    assert predictions.main([*options, *(["--own"] if own else [])]) == 0
    one, two = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert (one["streams"], two["streams"]) == (1, 2)
    for found in (one, two):
        assert found["num_output_tokens"] <= 40 * found["streams"]
        assert found["prediction_ratio"] > 0
        assert own or found["accepted"] > 0
