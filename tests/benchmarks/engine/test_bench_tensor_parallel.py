from __future__ import annotations

import json

import pytest

from app.model.cpu.library import library
from benchmarks.engine import tensor_parallel

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")


def test_steps_of_nothing_and_both_engines_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert tensor_parallel.main(["--model", "models/demo", "--sequences", "2", "--steps", "2"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["nothing_ms"].keys() == {"1", "64"}
    assert figures["decode"]["2"]["ratio"] > 0
