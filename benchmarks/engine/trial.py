"""One strategy with one policy, as it is to be measured."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from app.config import PRESETS, PolicyConfig, SchedulerConfig, StrategyConfig
from benchmarks.engine.engine_setup import configured
from benchmarks.harness.command import BenchmarkError, did_you_mean
from benchmarks.harness.settings import Assignment

_BRANCHES: dict[str, dict[str, type[StrategyConfig] | type[PolicyConfig]]] = {
    "strategy": {kind.model_fields["name"].default: kind for kind in StrategyConfig.__args__},
    "policy": {kind.model_fields["name"].default: kind for kind in PolicyConfig.__args__},
}
STRATEGIES = tuple(_BRANCHES["strategy"])
POLICIES = tuple(_BRANCHES["policy"])


@dataclass(frozen=True, slots=True)
class Trial:
    """A name for people and the settings behind it."""

    name: str
    scheduler: SchedulerConfig


def base_assignments(assignments: Sequence[Assignment]) -> list[Assignment]:
    """Those without the parameters of single strategies and policies: those are for the trials that have them.

    Raises:
        BenchmarkError: a strategy or policy is chosen by `--set`, which would choose it for all trials.
    """
    for assignment in assignments:
        if assignment.path in ("scheduler.strategy", "scheduler.policy"):
            plural = {"scheduler.strategy": "--strategies", "scheduler.policy": "--policies"}[assignment.path]
            raise BenchmarkError(f"--set {assignment.path}={assignment.value}: here they are chosen by {plural}")
    return [each for each in assignments if not each.path.startswith(("scheduler.strategy.", "scheduler.policy."))]


def trials(
    given: argparse.Namespace, assignments: Sequence[Assignment], *, strategies: str | None, policies: str | None
) -> list[Trial]:
    """Every strategy asked for with every policy; by default all strategies with fcfs, all policies with continuous.

    Whole batches are as large as `scheduler.max_running` unless a size is set, so that all have the same slots.

    Raises:
        BenchmarkError: a name is none; the message says what there is.
    """
    if strategies is None and policies is None:
        pairs = [(name, "fcfs") for name in STRATEGIES] + [("continuous", name) for name in POLICIES[1:]]
    else:
        pairs = [
            (strategy, policy)
            for strategy in _chosen(strategies or "continuous", "strategy")
            for policy in _chosen(policies or "fcfs", "policy")
        ]
    return [_trial(given, assignments, strategy, policy) for strategy, policy in pairs]


def preset_trials(given: argparse.Namespace, assignments: Sequence[Assignment], presets: str) -> list[Trial]:
    """Every preset asked for, with what `--set` says in place of its values.

    Raises:
        BenchmarkError: a name is none; the message says what there is.
    """
    return [
        Trial(name, configured(given, [Assignment("scheduler.preset", name), *assignments]).scheduler)
        for name in _names_in(presets, "preset", PRESETS)
    ]


def with_largest_limits(assignments: Sequence[Assignment], chosen: Sequence[Trial]) -> list[Assignment]:
    """The assignments of an engine that has room for the steps of all trials."""
    limits = (
        Assignment(f"scheduler.{name}", str(max(getattr(trial.scheduler, name) for trial in chosen)))
        for name in ("max_running", "max_step_tokens")
    )
    return [*assignments, *limits]


def _chosen(text: str, branch: str) -> list[str]:
    return _names_in(text, branch, _BRANCHES[branch])


def _names_in(text: str, kind: str, known: Collection[str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise BenchmarkError(f"there is no {kind} {name!r}{did_you_mean(name, known)}")
    return names


def _trial(given: argparse.Namespace, assignments: Sequence[Assignment], strategy: str, policy: str) -> Trial:
    base = base_assignments(assignments)
    max_running = configured(given, base).scheduler.max_running
    own = [
        *base,
        *_assignments("strategy", strategy, assignments, max_running),
        *_assignments("policy", policy, assignments, max_running),
    ]
    return Trial(f"{strategy} {policy}", configured(given, own).scheduler)


def _assignments(branch: str, name: str, given: Sequence[Assignment], max_running: int) -> Iterable[Assignment]:
    """The name, the size of a whole batch, then what `--set` says of its parameters."""
    path, known = f"scheduler.{branch}", _BRANCHES[branch][name].model_fields
    yield Assignment(path, name)
    if "batch_size" in known:
        yield Assignment(f"{path}.batch_size", str(max_running))
    for assignment in given:
        parent, _, parameter = assignment.path.rpartition(".")
        if parent == path and parameter in known:
            yield assignment
