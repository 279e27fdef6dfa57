"""One strategy with one policy, as it is to be measured."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from app.config import PRESETS, PolicyConfig, SchedulerConfig, StrategyConfig
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


def preset_trials(options: Options, presets: str) -> list[Trial]:
    """Every preset asked for, with what `--set` says in place of its values.

    Raises:
        BenchmarkError: a name is none; the message says what there is.
    """
    chosen = (replace(options, assignments=(Assignment("scheduler.preset", name), *options.assignments))
              for name in _names_in(presets, "preset", PRESETS))  # fmt: skip
    return [Trial(config.scheduler.preset, config.scheduler) for config in map(configured, chosen)]


def with_largest_limits(options: Options, chosen: Sequence[Trial]) -> Options:
    """The options of an engine that has room for the steps of all trials."""
    limits = (
        Assignment(f"scheduler.{name}", str(max(getattr(trial.scheduler, name) for trial in chosen)))
        for name in ("max_running", "max_step_tokens")
    )
    return replace(options, assignments=(*options.assignments, *limits))


def _chosen(text: str, branch: str) -> list[str]:
    return _names_in(text, branch, _BRANCHES[branch])


def _names_in(text: str, kind: str, known: Collection[str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise BenchmarkError(f"there is no {kind} {name!r}{did_you_mean(name, known)}")
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
