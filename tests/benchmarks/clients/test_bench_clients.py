"""What is made of a client's checks; the checks of the openai package against the API itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.clients import checks
from benchmarks.clients.__main__ import check, main
from benchmarks.clients.environments import CLIENTS, Client, shared_pins
from tests.benchmarks.servers import simulated_service


def test_checks_go_on_after_one_that_failed(capsys: pytest.CaptureFixture[str]) -> None:
    def fine() -> None:
        checks.expect(True, "never said")

    def wrong() -> None:
        checks.expect(False, "what was wrong")

    checks.run(wrong, fine)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        {"check": "wrong", "problem": "AssertionError: what was wrong"},
        {"check": "fine", "problem": None},
    ]


def test_a_client_that_does_not_start_has_not_passed() -> None:
    outcome = check(Client("pytest", "benchmarks.clients.there_is_none"), Path(sys.executable), "http://127.0.0.1:1")
    assert outcome.num_checks == 1
    assert "there_is_none" in outcome.problems[0]
    assert "| 0 of 1 |" in outcome.row()


def test_a_program_of_a_client_is_told_with_what_differs_between_machines_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks.ran("python", "-c", "pass", checks.BASE_URL, checks.OUT / "it")
    assert json.loads(capsys.readouterr().out) == {"command": "python -c pass $URL $OUT/it"}
    with pytest.raises(AssertionError, match=r"status 3: …so it is"):
        checks.ran("python", "-c", "import sys; print('so it is'); sys.exit(3)")


def test_whatever_needs_torch_takes_the_projects(tmp_path: Path) -> None:
    (tmp_path / "constraints.txt").write_text("numpy==2\ntorch==2.13.0\ntorchx==1\n")
    assert shared_pins(tmp_path / "constraints.txt") == ["torch==2.13.0\n"]


def test_a_client_that_cannot_be_installed_says_so_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = Client("nowhere", "benchmarks.clients.with_nowhere", before=("./no-such-folder",))
    monkeypatch.setattr("benchmarks.clients.__main__.CLIENTS", (missing,))
    assert main(["--environments", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "| nowhere | not installed | `make clients CLIENTS=nowhere` | none | nothing |" in captured.out
    assert "nowhere: not installed: " in captured.err
    assert "no-such-folder" in captured.err


def test_the_openai_package_makes_its_checks(demo_path: Path) -> None:
    with simulated_service(demo_path, step_ms=1) as url:
        outcome = check(CLIENTS[0], Path(sys.executable), url, model="simulated")
    assert outcome.num_checks == 11
    passed = {"chat_and_its_stream_agree", "several_choices_and_prompts", "errors_are_typed", "a_reply_and_its_stream"}
    failed = {problem.split(": ")[1] for problem in outcome.problems}
    assert not passed & failed, outcome.problems
