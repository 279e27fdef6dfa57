"""The command end to end on the bundled model, and which strategies and policies are measured, with what parameters."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from app.config import PRESETS, BucketedConfig
from benchmarks.engine import strategies
from benchmarks.engine.strategies import POLICIES, STRATEGIES, preset_trials, trials, with_largest_limits
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.settings import parse_assignments
from tests.benchmarks.conftest import Figures, Refusal

GIVEN = argparse.Namespace(model="m", dtype=None, threads=1, device="cpu")
SETTINGS = ["scheduler.max_running=2", "scheduler.strategy.max_wait_ms=5"]


def test_every_strategy_and_policy_serves_the_same_arrivals_with_the_same_tokens(
    tiny_run: list[str], tmp_path: Path, figures: Figures
) -> None:
    written = tmp_path / "out.json"
    options = ["--set", *SETTINGS, "--arrival", "burst:4", "--slo-latency-s", "60", "--json", written]
    found = figures(strategies.main, *tiny_run, *options)
    assert json.loads(written.read_text()) == found
    by_name = {trial["name"]: trial for trial in found["trials"]}
    assert list(by_name) == [*(f"{name} fcfs" for name in STRATEGIES), *(f"continuous {name}" for name in POLICIES[1:])]
    for trial in found["trials"]:
        assert trial["num_equal_outputs"] == trial["num_requests"] == 4
        assert (trial["num_output_tokens"], trial["num_failed"], trial["slo_share"]) == (24, 0, 1)
        assert 0 < trial["ttft_p50_s"] <= trial["latency_p50_s"] <= trial["latency_p95_s"] <= trial["latency_p99_s"]
        assert 0 <= trial["bubble_share"] < 1
    assert by_name["static fcfs"]["bubble_share"] > by_name["continuous fcfs"]["bubble_share"]
    assert (found["num_slots"], found["settings"], found["capacity_requests_per_s"]) == (2, SETTINGS, None)


def test_every_load_is_a_multiple_of_the_capacity_that_was_measured(tiny_run: list[str], figures: Figures) -> None:
    found = figures(strategies.main, *tiny_run, "--policies", "fcfs", "--load", "2,4")
    assert found["capacity_requests_per_s"] > 0
    assert [trial["load"] for trial in found["trials"]] == [2, 4]
    for trial in found["trials"]:
        assert trial["rate"] == pytest.approx(trial["load"] * found["capacity_requests_per_s"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "statik"], "did you mean static"),
        (["--arrival", "uniform"], "write poisson"),
        (["--load", "0"], "--load 0: write numbers above 0"),
        (["--set", "scheduler.policy=sjf"], "here they are chosen by --policies"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(
    tiny_run: list[str], arguments: list[str], message: str, refusal: Refusal
) -> None:
    assert message in refusal(strategies.main, *tiny_run, *arguments)


def test_presets_are_trials_and_the_engine_has_room_for_all_of_them() -> None:
    chosen = preset_trials(GIVEN, parse_assignments(["scheduler.max_running=16"]), "latency,batch")
    assert [(trial.name, trial.scheduler.preset, trial.scheduler.max_running) for trial in chosen] == [
        ("latency", "latency", 16), ("batch", "batch", 16),
    ]  # fmt: skip
    assert with_largest_limits({}, preset_trials(GIVEN, {}, "latency,batch")) == {
        f"scheduler.{name}": str(PRESETS["batch"][name]) for name in ("max_running", "max_step_tokens")
    }
    with pytest.raises(BenchmarkError, match="there is no preset 'fast'; there are latency, throughput, mixed, batch"):
        preset_trials(GIVEN, {}, "fast")


def test_a_parameter_that_is_set_goes_to_the_trials_that_have_it() -> None:
    given = parse_assignments(["scheduler.strategy.max_wait_ms=7"])
    bucketed = trials(GIVEN, given, strategies="bucketed,continuous", policies="priority,fcfs")[0].scheduler.strategy
    assert isinstance(bucketed, BucketedConfig)
    assert bucketed.max_wait_ms == 7
