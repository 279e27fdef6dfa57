"""Which strategies and policies are measured, with what parameters."""

from __future__ import annotations

import argparse

import pytest

from app.config import BucketedConfig, PriorityConfig, StaticConfig
from benchmarks.engine.trial import POLICIES, STRATEGIES, Trial, base_options, trials
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


def test_by_default_all_strategies_go_with_fcfs_and_continuous_with_all_policies() -> None:
    assert [trial.name for trial in asked()] == [
        *(f"{name} fcfs" for name in STRATEGIES),
        *(f"continuous {name}" for name in POLICIES if name != "fcfs"),
    ]


def test_those_asked_for_are_combined() -> None:
    assert [trial.name for trial in asked(strategies="static,hybrid", policies="sjf,fair")] == [
        "static sjf", "static fair", "hybrid sjf", "hybrid fair"
    ]  # fmt: skip
    assert [trial.name for trial in asked(policies="sjf")] == ["continuous sjf"]


def test_whole_batches_have_as_many_slots_as_the_others_by_default() -> None:
    asked_for = asked("scheduler.max_running=12", strategies="static,static:batch_size=3,adaptive")
    found = [trial.scheduler.strategy for trial in asked_for]
    assert isinstance(found[0], StaticConfig)
    assert isinstance(found[1], StaticConfig)
    assert (found[0].batch_size, found[1].batch_size) == (12, 3)
    assert found[2].model_dump()["batch_size"] == 12


def test_a_parameter_that_is_set_goes_to_the_trials_that_have_it() -> None:
    found = asked(
        "scheduler.strategy.max_wait_ms=7", "scheduler.policy.preemption=false",
        strategies="bucketed,continuous", policies="priority,fcfs",
    )  # fmt: skip
    bucketed, policy = found[0].scheduler.strategy, found[0].scheduler.policy
    assert isinstance(bucketed, BucketedConfig)
    assert bucketed.max_wait_ms == 7
    assert isinstance(policy, PriorityConfig)
    assert not policy.preemption


def test_what_is_written_beside_a_name_outweighs_what_is_set() -> None:
    found = asked("scheduler.strategy.batch_size=3", strategies="static:batch_size=5:max_wait_ms=9")
    strategy = found[0].scheduler.strategy
    assert isinstance(strategy, StaticConfig)
    assert (strategy.batch_size, strategy.max_wait_ms) == (5, 9)
    assert found[0].name == "static:batch_size=5:max_wait_ms=9 fcfs"


@pytest.mark.parametrize(
    ("strategies", "message"),
    [
        ("statik", "there is no strategy 'statik'; did you mean static"),
        ("static:batchsize=3", "static has no parameter 'batchsize'; did you mean batch_size"),
        ("static:3", "write parameters as NAME:PARAMETER=VALUE, not '3'"),
        ("static:batch_size=0", "batch_size"),
    ],
)
def test_a_mistake_names_what_there_is(strategies: str, message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        asked(strategies=strategies)


def test_a_policy_without_parameters_says_so() -> None:
    with pytest.raises(BenchmarkError, match="fcfs has no parameter 'x'; it has none"):
        asked(policies="fcfs:x=1")


def test_one_strategy_for_all_trials_is_refused() -> None:
    with pytest.raises(BenchmarkError, match="here they are chosen by --strategies"):
        base_options(options("scheduler.strategy=static"))
