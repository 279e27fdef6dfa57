"""One strategy with one policy, as it is to be measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from app.config import EngineConfig, PolicyConfig, SchedulerConfig, StrategyConfig
from benchmarks.engine.engine_setup import configured
from benchmarks.harness.command import BenchmarkError, did_you_mean
from benchmarks.harness.options import Options
from benchmarks.harness.settings import Assignment, parse_assignments

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


@dataclass(frozen=True, slots=True)
class _Chosen:
    """`static:batch_size=8`, taken apart."""

    text: str
    name: str
    parameters: tuple[tuple[str, str], ...]


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

    Whole batches are as large as `scheduler.max_running` unless a size is given, so that all have the same slots.

    Raises:
        BenchmarkError: a name or a parameter is none; the message says what there is.
    """
    if strategies is None and policies is None:
        pairs = [(_Chosen(name, name, ()), _Chosen("fcfs", "fcfs", ())) for name in STRATEGIES]
        pairs += [(_Chosen("continuous", "continuous", ()), _Chosen(name, name, ())) for name in POLICIES[1:]]
    else:
        pairs = [
            (strategy, policy)
            for strategy in _chosen(strategies or "continuous", "strategy")
            for policy in _chosen(policies or "fcfs", "policy")
        ]
    return [_trial(options, strategy, policy) for strategy, policy in pairs]


def _chosen(text: str, branch: str) -> list[_Chosen]:
    found = []
    for one in text.split(","):
        name, *parameters = (part.strip() for part in one.split(":"))
        if name not in _BRANCHES[branch]:
            raise BenchmarkError(f"there is no {branch} {name!r}{did_you_mean(name, _BRANCHES[branch])}")
        wrong = next((parameter for parameter in parameters if "=" not in parameter), None)
        if wrong is not None:
            raise BenchmarkError(f"{one}: write parameters as NAME:PARAMETER=VALUE, not {wrong!r}")
        found.append(_Chosen(one.strip(), name, tuple(_pair(parameter) for parameter in parameters)))
    return found


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def _trial(options: Options, strategy: _Chosen, policy: _Chosen) -> Trial:
    base = configured(base_options(options))
    assignments = [
        *base_options(options).assignments,
        *_assignments("strategy", strategy, options.assignments, base),
        *_assignments("policy", policy, options.assignments, base),
    ]
    config = configured(replace(options, assignments=tuple(assignments)))
    return Trial(f"{strategy.text} {policy.text}", config.scheduler)


def _assignments(branch: str, chosen: _Chosen, given: Sequence[Assignment], base: EngineConfig) -> Iterable[Assignment]:
    """The name, the size of a whole batch, what `--set` says of its parameters, then what was written beside it."""
    path, known = f"scheduler.{branch}", _BRANCHES[branch][chosen.name].model_fields
    yield Assignment(path, chosen.name)
    if "batch_size" in known:
        yield Assignment(f"{path}.batch_size", str(base.scheduler.max_running))
    for assignment in given:
        parent, _, parameter = assignment.path.rpartition(".")
        if parent == path and parameter in known:
            yield assignment
    for name, value in chosen.parameters:
        if name not in known or name == "name":
            parameters = [parameter for parameter in known if parameter != "name"]
            there = did_you_mean(name, parameters) if parameters else "; it has none"
            raise BenchmarkError(f"{chosen.name} has no parameter {name!r}{there}")
        yield from parse_assignments([f"{path}.{name}={value}"])


def _is_parameter(assignment: Assignment) -> bool:
    return assignment.path.startswith(("scheduler.strategy.", "scheduler.policy."))
