"""Which strategies and policies are measured, with what parameters."""

from __future__ import annotations

import argparse

import pytest

from app.config import PRESETS, BucketedConfig
from benchmarks.engine.strategies import preset_trials, trials, with_largest_limits
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.settings import parse_assignments

GIVEN = argparse.Namespace(model="m", dtype=None, threads=1, device="cpu")


def test_presets_are_trials_and_the_engine_has_room_for_all_of_them() -> None:
    chosen = preset_trials(GIVEN, parse_assignments(["scheduler.max_running=16"]), "latency,batch")
    assert [(trial.name, trial.scheduler.preset, trial.scheduler.max_running) for trial in chosen] == [
        ("latency", "latency", 16), ("batch", "batch", 16),
    ]  # fmt: skip
    limits = with_largest_limits([], preset_trials(GIVEN, [], "latency,batch"))
    largest = PRESETS["batch"]
    assert [(each.path, each.value) for each in limits] == [
        (f"scheduler.{name}", str(largest[name])) for name in ("max_running", "max_step_tokens")
    ]
    with pytest.raises(BenchmarkError, match="there is no preset 'fast'; there are latency, throughput, mixed, batch"):
        preset_trials(GIVEN, [], "fast")


def test_a_parameter_that_is_set_goes_to_the_trials_that_have_it() -> None:
    given = parse_assignments(["scheduler.strategy.max_wait_ms=7"])
    found = trials(GIVEN, given, strategies="bucketed,continuous", policies="priority,fcfs")
    bucketed = found[0].scheduler.strategy
    assert isinstance(bucketed, BucketedConfig)
    assert bucketed.max_wait_ms == 7
