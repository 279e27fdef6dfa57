"""Each stage to its end, standing in on a CPU: the code is tried, its figures say nothing."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import engine_config, made_model
from benchmarks.gpu.stages import STAGES
from benchmarks.gpu.stand_in import standing_in

Measured = Callable[[str], tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(out=tmp_path, file=tmp_path / "figures.json", stands_in=True, earlier={})


@pytest.fixture
def measured(bench: Bench) -> Measured:
    """The name of a stage → its figures and its tables."""

    def run(name: str) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
        [module] = [stage.module for stage in STAGES if stage.name == name]
        with standing_in():
            import_module(module).measure(bench)
        return bench.figures, bench.tables

    return run


def test_rates(measured: Measured) -> None:
    figures, _ = measured("rates")
    assert figures["torch_version"]
    assert {"copy_gb_per_s", "bf16_tflop_per_s", "fp8_tflop_per_s"} <= set(figures)


def test_decode_steps_are_replayed(measured: Measured) -> None:
    figures, tables = measured("decode")
    assert figures["graphs"] == 2
    steps = tables["decode steps"]
    assert [(row["sequences"], row["context"]) for row in steps] == [(1, 20), (2, 20), (1, 33), (2, 33)]
    assert all(row["replay_ms"] > 0 and row["floor_ms"] > 0 for row in steps)


def test_the_engine_answers_every_request_in_every_variant(measured: Measured) -> None:
    _, tables = measured("engine")
    assert [row["variant"] for row in tables["engine"]] == [
        "graphs, overlap", "no overlap", "no graphs", "batch_invariant",
    ]  # fmt: skip
    assert not any(row["failed"] for row in tables["engine"])


def test_a_made_model_is_the_same_each_time(bench: Bench) -> None:
    config = engine_config(bench, num_blocks=4)
    with standing_in():
        first, second = (made_model(config).module for _ in range(2))
    assert first is not None
    assert second is not None
    for name, weight in first.named_parameters():
        assert weight.equal(second.get_parameter(name))
