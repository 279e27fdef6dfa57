"""Figures are printed before they are kept, and say how the program ends."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.command import BenchmarkError, command_parser, run_command


def run(figures: dict[str, Any], path: Path) -> int:
    parser = command_parser("x", None)
    return run_command(parser, lambda _: figures, ["--json", str(path)], is_bad=lambda found: found["hits"] > 0)


def test_a_file_that_cannot_be_written_does_not_cost_the_figures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run({"hits": 0}, tmp_path) == 2
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert printed["hits"] == 0
    assert set(printed["versions"]) == {"carousel", "llguidance", "torch", "transformers", "triton", "python"}
    assert f"--json {tmp_path} cannot be written" in err


@pytest.mark.parametrize("hits", [0, 1])
def test_figures_are_printed_and_kept_and_bad_ones_are_the_status(
    hits: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    assert run({"hits": hits}, path) == hits
    assert json.loads(path.read_text()) == json.loads(capsys.readouterr().out)


def test_what_cannot_be_measured_is_said_and_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(_: Namespace) -> dict[str, Any]:
        raise BenchmarkError("there is no model")

    assert run_command(command_parser("x", None), measure, [], is_bad=lambda figures: True) == 2
    assert capsys.readouterr() == ("", "error: there is no model\n")
