"""Commands as they are typed: their figures, or the line that says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

Main = Callable[[Sequence[str]], int]
Figures = Callable[..., dict[str, Any]]
Refusal = Callable[..., str]


@pytest.fixture
def figures(capsys: pytest.CaptureFixture[str]) -> Figures:
    """Runs a command with its arguments and returns the JSON object in the last line; `status`: how it should end."""

    def run(main: Main, *arguments: object, status: int = 0) -> dict[str, Any]:
        assert main(list(map(str, arguments))) == status, capsys.readouterr().err
        found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return found

    return run


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Runs a command that is wrong: nothing on stdout, and this line on stderr."""

    def run(main: Main, *arguments: object) -> str:
        assert main(list(map(str, arguments))) == 2
        out, err = capsys.readouterr()
        assert out == ""
        return err.splitlines()[-1]

    return run


def write_workload(path: Path, *lines: dict[str, Any]) -> Path:
    """A file of such requests; what is not said is short."""
    usual = {"prompt_token_ids": [3] * 8, "max_tokens": 4, "ignore_eos": True}
    path.write_text("".join(json.dumps({"id": f"r{at}"} | usual | line) + "\n" for at, line in enumerate(lines)))
    return path


@pytest.fixture(scope="session")
def tiny_workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four requests of two tenants, each longer than the one before, with 24 tokens to generate."""
    lines = [
        {"prompt_token_ids": [3, *range(20, 22 + 9 * number)], "max_tokens": 3 + 2 * number,
         "arrival_s": 0.01 * number, "tenant": f"tenant-{number % 2}"}
        for number in range(4)
    ]  # fmt: skip
    return write_workload(tmp_path_factory.mktemp("workload") / "tiny.jsonl", *lines)


@pytest.fixture
def tiny_run(demo_path: Path, tiny_workload: Path) -> list[str]:
    """The arguments of a command that serves it by the bundled model."""
    # One thread: a second one would wait for whatever else this machine is doing.
    return ["--model", str(demo_path), "--workload", str(tiny_workload), "--threads", "1", "--device", "cpu"]
