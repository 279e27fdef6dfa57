"""The fitted time of a step, and the file that keeps it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from app.config import CacheConfig, EngineConfig, SchedulerConfig
from app.errors import InvalidSetup
from deployments.plan.step_cost import MeasuredReplica, MeasuredStep, StepCost, StepShape, measure
from tests.deployments.plan.measured import measured_replica, trace_of


def true_s(size: StepShape) -> float:
    """Of a machine that reads weights for small steps and computes for large ones."""
    base_s = max(0.004, 0.00005 * size.num_tokens)
    return base_s + 0.0001 * size.num_sequences + 2e-7 * size.num_decode_context + 1e-7 * size.num_prefill_pairs


def random_size(rng: random.Random) -> StepShape:
    num_decoding, chunk = rng.randrange(0, 32), rng.choice((0, 0, rng.randrange(2, 400)))
    num_decoding += not (num_decoding or chunk)
    context = sum(rng.randrange(1, 1000) for _ in range(num_decoding))
    return StepShape(num_decoding + chunk, num_decoding + bool(chunk), context, chunk * chunk // 2)


def test_the_fit_finds_the_times_of_a_machine_with_noise() -> None:
    rng = random.Random(1)
    sizes = [random_size(rng) for _ in range(3000)]
    steps = [MeasuredStep(size, true_s(size) * rng.choice((0.9, 1.0, 1.1))) for size in sizes]
    cost = StepCost.fit(steps)
    for size in (random_size(rng) for _ in range(100)):
        assert cost.seconds(size) == pytest.approx(true_s(size), rel=0.08)
    assert cost.total_error == pytest.approx(0, abs=0.02)
    assert cost.median_error < 0.12
    for ratios in cost.ratios:
        assert ratios[0] == pytest.approx(0.9, abs=0.08)
        assert ratios[-1] == pytest.approx(1.1, abs=0.08)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(InvalidSetup, match="only 2 steps were measured, but 100 are needed"):
        StepCost.fit([MeasuredStep(StepShape(1, 1, 1, 0), 0.1)] * 2)


def test_what_was_measured_is_read_back(tmp_path: Path) -> None:
    measured = measured_replica()
    measured.write(tmp_path / "costs.json")
    read = MeasuredReplica.read(tmp_path / "costs.json")
    assert read.model_info == measured.model_info
    size = StepShape(40, 4, 1000, 0)
    assert read.cost.seconds(size) == measured.cost.seconds(size)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(InvalidSetup, match="contains no valid step times"):
        MeasuredReplica.read(tmp_path / "other.json")


def test_the_real_engine_is_measured() -> None:
    config = EngineConfig.model_validate({"model": {"path": "models/demo"}, "cache": {"num_blocks": 200}})
    settings = [
        SchedulerConfig(max_running=number, max_step_tokens=64, prefill_chunk_tokens=32) for number in (1, 8)
    ]  # fmt: skip
    measured = measure(config, trace_of((0, 40, 10), (1, 20, 30)), settings, seconds=0.6)
    assert measured.num_blocks == 200
    assert measured.cost.num_steps >= 100
    assert 0 < measured.cost.seconds(StepShape(8, 8, 200, 0)) < 1
    assert CacheConfig().block_size == measured.block_size
