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


def test_the_bundled_model_keeps_its_answers(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--texts", "12", "--tokens", "16", "--dtype", "fp32")
    figures = figures_of(capsys, "--model", "models/demo", "--quantization", *quality.KINDS, "--kv", "fp8", *options)
    for kind, cost in (("int8", 0.01), ("int4", 0.1), ("fp8", 0.1), ("kv fp8", 0.1), ("fp8, kv fp8", 0.1)):
        quantised = figures[kind]
        assert abs(quantised["perplexity_ratio"] - 1) < cost
        assert quantised["same_top_token"] > 1 - 3 * cost
        assert quantised["same_greedy_token"] > 1 - 3 * cost
        assert 0 < quantised["standard_error"] < cost
        assert quantised["mean_log_likelihood"] != figures["mean_log_likelihood"], "it has other weights"


def test_a_real_model_keeps_its_answers(smollm2_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Few texts, so the divergence is judged, which is the logarithm of the perplexities' ratio with less noise."""
    figures = figures_of(capsys, "--model", smollm2_path, "--texts", "24", "--tokens", "32", "--threads", "2")
    for kind, cost in (("int8", 0.005), ("int4", 0.04)):
        quantised = figures[kind]
        assert quantised["divergence"] < cost
        assert quantised["perplexity_ratio"] < 1 + cost + 3 * quantised["standard_error"]
        assert quantised["same_greedy_token"] > 0.93  # of float32 against bfloat16: 0.975
