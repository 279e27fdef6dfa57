"""Figures are printed before they are kept, and say how the program ends."""

from __future__ import annotations

import json
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.harness.command import BenchmarkError, command_parser, run_command
from benchmarks.service import canary, fuzz, online

SOUND: dict[ModuleType, dict[str, Any]] = {
    canary: {"statuses": {"200": 5}, "hits": 0, "cached": {"unexplained": 0}, "differ_from_alone": 0, "sang": 1.0},
    fuzz: {"server_errors": 0, "restarts": 0, "honest_failed": 0},
    online: {"rate": 5.0},
}
BAD = {canary: {"hits": 1}, fuzz: {"restarts": 1}}


@pytest.fixture(params=SOUND, ids=lambda module: module.__name__)
def program(request: pytest.FixtureRequest) -> ModuleType:
    found: ModuleType = request.param
    return found


def run(program: ModuleType, monkeypatch: pytest.MonkeyPatch, figures: dict[str, Any], path: Path) -> int:
    """The exit status of a program that measures these figures, with no service."""

    async def searched(*_: Any) -> dict[str, Any]:
        return figures

    nothing: dict[str, Any] = {
        "stage": lambda *_, **__: nullcontext(Namespace(target=None)),
        "service": lambda *_: nullcontext(),
        "_run": searched,
        "attack": lambda *_: figures,
        "measure": lambda *_: figures,
    }
    for name in nothing.keys() & vars(program).keys():
        monkeypatch.setattr(program, name, nothing[name])
    options = ["--base-url", "http://127.0.0.1:9", "--model", "x", "--workload", "x"] if program is online else []
    status: int = program.main([*options, "--json", str(path)])
    return status


def test_a_file_that_cannot_be_written_does_not_cost_the_figures(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(program, monkeypatch, SOUND[program], tmp_path) == 2
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert SOUND[program].items() <= printed.items()
    assert set(printed["versions"]) == {"carousel", "llguidance", "torch", "transformers", "triton", "python"}
    assert f"--json {tmp_path} cannot be written" in err


def test_sound_figures_are_printed_and_kept(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    assert run(program, monkeypatch, SOUND[program], path) == 0
    assert json.loads(path.read_text()) == json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("program", BAD, ids=lambda module: module.__name__)
def test_bad_figures_are_kept_and_are_the_status(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    assert run(program, monkeypatch, SOUND[program] | BAD[program], path) == 1
    assert json.loads(path.read_text()) == json.loads(capsys.readouterr().out)


def test_what_cannot_be_measured_is_said_and_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(_: Namespace) -> dict[str, Any]:
        raise BenchmarkError("there is no model")

    assert run_command(command_parser("x", None), measure, [], is_bad=lambda figures: True) == 2
    assert capsys.readouterr() == ("", "error: there is no model\n")
