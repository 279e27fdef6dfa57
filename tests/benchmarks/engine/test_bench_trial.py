"""Which strategies and policies are measured, with what parameters."""

from __future__ import annotations

import argparse

import pytest

from app.config import PRESETS, BucketedConfig
from benchmarks.engine.trial import (
    Trial,
    preset_trials,
    trials,
    with_largest_limits,
)
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.options import Options


def asked(*assignments: str, strategies: str | None = None, policies: str | None = None) -> list[Trial]:
    return trials(options(*assignments), strategies=strategies, policies=policies)


def options(*assignments: str) -> Options:
    return Options.of(
        argparse.Namespace(
            model="m", workload="w", dtype=None, threads=1, device="cpu", repeat=1, outputs=None, set=assignments
        )
    )


def test_presets_are_trials_and_the_engine_has_room_for_all_of_them() -> None:
    given = options("scheduler.max_running=16")
    chosen = preset_trials(given, "latency,batch")
    assert [(trial.name, trial.scheduler.preset, trial.scheduler.max_running) for trial in chosen] == [
        ("latency", "latency", 16), ("batch", "batch", 16),
    ]  # fmt: skip
    limits = with_largest_limits(options(), preset_trials(options(), "latency,batch")).assignments
    largest = PRESETS["batch"]
    assert [(each.path, each.value) for each in limits] == [
        (f"scheduler.{name}", str(largest[name])) for name in ("max_running", "max_step_tokens")
    ]
    with pytest.raises(BenchmarkError, match="there is no preset 'fast'; there are latency, throughput, mixed, batch"):
        preset_trials(options(), "fast")


def test_a_parameter_that_is_set_goes_to_the_trials_that_have_it() -> None:
    found = asked(
        "scheduler.strategy.max_wait_ms=7", strategies="bucketed,continuous", policies="priority,fcfs",
    )  # fmt: skip
    bucketed = found[0].scheduler.strategy
    assert isinstance(bucketed, BucketedConfig)
    assert bucketed.max_wait_ms == 7
