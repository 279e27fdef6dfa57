from __future__ import annotations

import json

import pytest

from app.model.cpu.library import library
from benchmarks.engine import quality

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")


def figures_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, float]]:
    assert quality.main(arguments) == 0
    found: dict[str, dict[str, float]] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_the_bundled_model_keeps_its_answers_in_int8(capsys: pytest.CaptureFixture[str]) -> None:
    figures = figures_of(capsys, "--model", "models/demo", "--texts", "12", "--tokens", "16", "--dtype", "fp32")
    quantised = figures["quantised"]
    assert 0.99 < quantised["perplexity_ratio"] < 1.01
    assert quantised["same_top_token"] > 0.97
    assert quantised["same_greedy_token"] > 0.97
    assert quantised["mean_log_likelihood"] != figures["mean_log_likelihood"], "it has other weights"
