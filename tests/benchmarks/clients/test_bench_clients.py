"""What is made of a client's checks; the checks of the openai package against the API itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.clients import checks
from benchmarks.clients.__main__ import check
from benchmarks.clients.environments import CLIENTS
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


def test_the_openai_package_makes_its_checks(demo_path: Path) -> None:
    with simulated_service(demo_path, step_ms=1) as url:
        outcome = check(CLIENTS[0], Path(sys.executable), url, model="simulated")
    assert outcome.num_checks == 12
    passed = {"chat_and_its_stream_agree", "several_choices_and_prompts", "errors_are_typed", "a_reply_and_its_stream"}
    failed = {problem.split(": ")[1] for problem in outcome.problems}
    assert not passed & failed, outcome.problems
