"""What quantised weights cost the bundled model, and a real one."""

from __future__ import annotations

import pytest

from app.model.cpu.library import library
from benchmarks.engine import quality
from tests.benchmarks.conftest import Figures

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def _small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the KV memory for 200 long texts, a machine would provide every page for each of the engines."""
    monkeypatch.setattr(quality, "_KV_GIB", 0.1)


def test_the_bundled_model_keeps_its_answers(figures: Figures) -> None:
    options = ("--texts", "12", "--tokens", "16", "--dtype", "fp32", "--kv", "fp8")
    found = figures(quality.main, "--model", "models/demo", "--quantization", *quality.KINDS, *options)
    for kind, cost in (("int8", 0.01), ("int4", 0.1), ("fp8", 0.1), ("kv fp8", 0.1), ("fp8, kv fp8", 0.1)):
        quantised = found[kind]
        assert abs(quantised["perplexity_ratio"] - 1) < cost
        assert quantised["same_top_token"] > 1 - 3 * cost
        assert quantised["same_greedy_token"] > 1 - 3 * cost
        assert 0 < quantised["standard_error"] < cost
        assert quantised["mean_log_likelihood"] != found["mean_log_likelihood"], "it has other weights"


def test_a_real_model_keeps_its_answers(smollm2_path: str, figures: Figures) -> None:
    """Few texts, so the divergence is judged, which is the logarithm of the perplexities' ratio with less noise."""
    found = figures(quality.main, "--model", smollm2_path, "--texts", "8", "--tokens", "32", "--threads", "1")
    for kind, cost in (("int8", 0.005), ("int4", 0.04)):
        quantised = found[kind]
        assert quantised["divergence"] < cost
        assert quantised["perplexity_ratio"] < 1 + cost + 3 * quantised["standard_error"]
        assert quantised["same_greedy_token"] > 0.93  # of float32 against bfloat16: 0.975
