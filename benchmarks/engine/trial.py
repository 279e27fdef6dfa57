"""One strategy with one policy, as it is to be measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from app.config import PolicyConfig, SchedulerConfig, StrategyConfig
from benchmarks.engine.engine_setup import configured
from benchmarks.harness.command import BenchmarkError, did_you_mean
from benchmarks.harness.options import Options
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


def base_options(options: Options) -> Options:
    """The options without the parameters of single strategies and policies: those are for the trials that have them.

    Raises:
        BenchmarkError: a strategy or policy is chosen by `--set`, which would choose it for all trials.
    """
    for assignment in options.assignments:
        if assignment.path in ("scheduler.strategy", "scheduler.policy"):
            plural = {"scheduler.strategy": "--strategies", "scheduler.policy": "--policies"}[assignment.path]
            raise BenchmarkError(f"--set {assignment.path}={assignment.value}: here they are chosen by {plural}")
    return replace(options, assignments=tuple(a for a in options.assignments if not _is_parameter(a)))


def trials(options: Options, *, strategies: str | None, policies: str | None) -> list[Trial]:
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
    return [_trial(options, strategy, policy) for strategy, policy in pairs]


def _chosen(text: str, branch: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in _BRANCHES[branch]:
            raise BenchmarkError(f"there is no {branch} {name!r}{did_you_mean(name, _BRANCHES[branch])}")
    return names


def _trial(options: Options, strategy: str, policy: str) -> Trial:
    base = base_options(options)
    max_running = configured(base).scheduler.max_running
    assignments = [
        *base.assignments,
        *_assignments("strategy", strategy, options.assignments, max_running),
        *_assignments("policy", policy, options.assignments, max_running),
    ]
    config = configured(replace(options, assignments=tuple(assignments)))
    return Trial(f"{strategy} {policy}", config.scheduler)


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


def _is_parameter(assignment: Assignment) -> bool:
    return assignment.path.startswith(("scheduler.strategy.", "scheduler.policy."))
