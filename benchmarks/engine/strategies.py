"""Measure every batching strategy and scheduling policy on the same arrivals, in one run and around one loaded model.

    python -m benchmarks.engine.strategies --model DIR --workload FILE --arrival poisson --load 0.5,0.8,1
    python -m benchmarks.engine.strategies --model DIR --workload FILE --strategies static,hybrid --policies fcfs,sjf
    python -m benchmarks.engine.strategies --model DIR --workload FILE --presets latency,mixed --load 0.8

Prints a table and, as the last line, one JSON object. Each strategy × policy gets a fresh engine around the same model,
so nothing is cached or learnt from the previous trial. --load multiplies the rate of --arrival. If --arrival has no
rate, the rate is the capacity: the rate of continuous batching when all requests come at once, measured first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from app.build import assemble
from app.config import PRESETS, PolicyConfig, SchedulerConfig, StrategyConfig
from benchmarks.engine.carousel import Carousel
from benchmarks.engine.engine_setup import LoadedEngine, configured, load_engine
from benchmarks.engine.service_figures import Served, StepTrace, service_figures
from benchmarks.harness import machine
from benchmarks.harness.command import (
    BenchmarkError,
    above_zero,
    command_parser,
    did_you_mean,
    numbers_above_zero,
    run_command,
    tell,
)
from benchmarks.harness.figures import table_of
from benchmarks.harness.options import add_run_options
from benchmarks.harness.settings import Assignments, parse_assignments, told
from benchmarks.harness.timeline import Slo
from benchmarks.harness.workload import Workload
from benchmarks.service.arrivals import Arrivals

_BRANCHES: dict[str, dict[str, type[StrategyConfig] | type[PolicyConfig]]] = {
    "strategy": {kind.model_fields["name"].default: kind for kind in StrategyConfig.__args__},
    "policy": {kind.model_fields["name"].default: kind for kind in PolicyConfig.__args__},
}
STRATEGIES = tuple(_BRANCHES["strategy"])
POLICIES = tuple(_BRANCHES["policy"])


@dataclass(frozen=True, slots=True)
class Trial:
    """A name for people, and the settings of a trial."""

    name: str
    scheduler: SchedulerConfig


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Load the model once, warm up, run every trial at every load, and print the table."""
    assignments = parse_assignments(given.set)
    chosen = _trials(given, assignments)
    arrivals, loads = Arrivals.parse(given.arrival), numbers_above_zero("--load", given.load)
    slo = Slo(ttft_s=given.slo_ttft_s, latency_s=given.slo_latency_s)
    loaded = load_engine(given, with_largest_limits(base_assignments(assignments), chosen))
    workload = _with_deadlines(loaded.workload, given.deadline_s)
    tell("warm-up")
    Carousel(loaded.engine).serve(loaded.workload.warm_up())
    capacity = None
    if arrivals.needs_rate(workload):
        capacity = _capacity(loaded)
        tell(f"capacity: {capacity:.3f} requests/s with everything at once")
    found: list[dict[str, Any]] = []
    for load in loads:
        arranged = arrivals.arrange(workload, rate=capacity, load=load, seed=given.seed)
        rate = arrivals.rate or capacity
        rate = None if rate is None else rate * load
        found += _figures(loaded, chosen, arranged, slo if slo != Slo() else None, load=load, rate=rate)
    print(in_words(found))
    return {
        **asdict(loaded.setup),
        "settings": told(assignments),
        "capacity_requests_per_s": capacity,
        "num_slots": loaded.config.scheduler.max_running,
        "trials": found,
        "gpu": machine.gpu_name(loaded.setup.device),
    }


def _trials(given: argparse.Namespace, assignments: Assignments) -> list[Trial]:
    if given.presets is None:
        return trials(given, assignments, strategies=given.strategies, policies=given.policies)
    if given.strategies or given.policies:
        raise BenchmarkError("--presets sets the strategies and policies: leave out --strategies and --policies")
    return preset_trials(given, assignments, given.presets)


def serve(loaded: LoadedEngine, trial: Trial, workload: Workload) -> Served:
    """Run one trial: a fresh engine with empty memory and no experience, around the loaded model."""
    trace = StepTrace()
    engine = assemble(
        trial.scheduler,
        loaded.config.cache,
        num_blocks=loaded.engine.stats().num_blocks,
        runner=loaded.engine.runner,
        model_info=loaded.engine.model_info,
        recorder=trace,
    )
    return Served(
        run=Carousel(engine, trace=trace).serve(workload),
        joined_s=trace.joined_s(),
        bubble_share=trace.bubble_share(trial.scheduler.max_running),
        mean_running=trace.mean_running(),
        steps=trace.steps,
    )


_COLUMNS = (
    ("requests/s", "requests_per_s", "{:.2f}"), ("tokens/s", "output_tokens_per_s", "{:,.0f}"),
    ("TTFT p50", "ttft_p50_s", ""), ("TTFT p99", "ttft_p99_s", ""), ("ITL p50", "itl_p50_s", ""),
    ("ITL p99", "itl_p99_s", ""), ("latency mean", "latency_mean_s", ""), ("p50", "latency_p50_s", ""),
    ("p95", "latency_p95_s", ""), ("p99", "latency_p99_s", ""), ("longest wait", "queue_wait_longest_s", ""),
    ("bubble", "bubble_share", "{:.0%}"), ("preempted", "preemptions", "{}"), ("Jain", "jain_index", "{:.2f}"),
    ("in SLO", "slo_share", "{:.0%}"), ("SLO req/s", "slo_requests_per_s", "{:.2f}"), ("failed", "num_failed", "{}"),
)  # fmt: skip


def in_words(trials: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the most important figures; the JSON has all figures."""
    loads, names = [f"{each['load']:g}" for each in trials], [each["name"] for each in trials]
    return table_of(_COLUMNS, trials, **{"load": loads, "strategy policy": names})


def _figures(
    loaded: LoadedEngine,
    chosen: Sequence[Trial],
    workload: Workload,
    slo: Slo | None,
    *,
    load: float,
    rate: float | None,
) -> Iterator[dict[str, Any]]:
    """Yield the figures of each trial at one load. `num_equal_outputs` counts requests with the first trial's tokens.

    rate: the offered requests a second; None if the arrivals have no rate.
    """
    first: Served | None = None
    for trial in chosen:
        served = serve(loaded, trial, workload)
        first = first or served
        figures = service_figures(workload, served, slo)
        tell(f"load {load:g}, {trial.name}: {figures['requests_per_s']:.2f} requests/s in {figures['seconds']:.1f} s")
        settings = trial.scheduler.model_dump(mode="json")
        known = {"name": trial.name, "load": load, "rate": rate, "settings": settings}
        yield known | {"num_equal_outputs": _num_equal(first, served)} | figures


def _num_equal(first: Served, served: Served) -> int:
    expected = first.run.timelines
    return sum(expected[name].token_ids == timeline.token_ids for name, timeline in served.run.timelines.items())


def _capacity(loaded: LoadedEngine) -> float:
    """Return the requests a second of continuous batching when all requests are there from the start."""
    at_once = Workload(tuple(replace(timed, arrival_s=0.0) for timed in loaded.workload.requests))
    loaded.engine.clear_prefix_cache()
    return len(at_once.requests) / Carousel(loaded.engine).serve(at_once).seconds


def _with_deadlines(workload: Workload, deadline_s: float | None) -> Workload:
    """Return the workload with this deadline for requests that have none."""
    if deadline_s is None:
        return workload
    return Workload(
        tuple(
            replace(timed, request=replace(timed.request, deadline_s=timed.request.deadline_s or deadline_s))
            for timed in workload.requests
        )
    )


def base_assignments(assignments: Assignments) -> dict[str, str | None]:
    """Return the assignments without parameters of single strategies and policies, which only their trials take.

    Raises:
        BenchmarkError: `--set` chooses a strategy or policy, which would choose it for all trials.
    """
    for path, plural in (("scheduler.strategy", "--strategies"), ("scheduler.policy", "--policies")):
        if path in assignments:
            raise BenchmarkError(f"--set {path}={assignments[path]}: here they are chosen by {plural}")
    of_one = ("scheduler.strategy.", "scheduler.policy.")
    return {path: value for path, value in assignments.items() if not path.startswith(of_one)}


def trials(
    given: argparse.Namespace, assignments: Assignments, *, strategies: str | None, policies: str | None
) -> list[Trial]:
    """Return all pairs of given names; default: every strategy with fcfs, every policy with continuous.

    Whole batches have the size `scheduler.max_running` unless a size is set, so that all trials have equal slots.

    Raises:
        BenchmarkError: a name is unknown; the message says which names exist.
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


def preset_trials(given: argparse.Namespace, assignments: Assignments, presets: str) -> list[Trial]:
    """Return every given preset; `--set` overrides values of the presets.

    Raises:
        BenchmarkError: a name is unknown; the message says which names exist.
    """
    return [
        Trial(name, configured(given, {"scheduler.preset": name, **assignments}).scheduler)
        for name in _names_in(presets, "preset", PRESETS)
    ]


def with_largest_limits(assignments: Assignments, chosen: Sequence[Trial]) -> dict[str, str | None]:
    """Return the assignments of an engine that has room for the steps of all trials."""
    limits = {
        f"scheduler.{name}": str(max(getattr(trial.scheduler, name) for trial in chosen))
        for name in ("max_running", "max_step_tokens")
    }
    return {**assignments, **limits}


def _chosen(text: str, branch: str) -> list[str]:
    return _names_in(text, branch, _BRANCHES[branch])


def _names_in(text: str, kind: str, known: Collection[str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise BenchmarkError(f"there is no {kind} {name!r}{did_you_mean(name, known)}")
    return names


def _trial(given: argparse.Namespace, assignments: Assignments, strategy: str, policy: str) -> Trial:
    """Return a trial of these names. `--set` overrides their parameters."""
    own = base_assignments(assignments)
    for branch, name in (("strategy", strategy), ("policy", policy)):
        path, known = f"scheduler.{branch}", _BRANCHES[branch][name].model_fields
        own |= {path: name}
        parameters = {f"{path}.{parameter}" for parameter in known}
        own |= {each: value for each, value in assignments.items() if each in parameters}
    return Trial(f"{strategy} {policy}", configured(given, own).scheduler)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("engine.strategies", __doc__)
    add_run_options(parser, settings=True)
    parser.add_argument(
        "--arrival", default="poisson", metavar="KIND", help="poisson, poisson:RATE, burst:N, burst:N@RATE or trace"
    )
    parser.add_argument("--load", default="1", metavar="L,L", help="multiples of the rate; each is measured separately")
    parser.add_argument("--seed", type=int, default=0, help="seed of the arrival times")
    parser.add_argument("--strategies", metavar="A,B", help=f"some of {', '.join(STRATEGIES)}")
    parser.add_argument("--policies", metavar="A,B", help=f"some of {', '.join(POLICIES)}")
    parser.add_argument("--presets", metavar="A,B", help=f"instead of both: some of {', '.join(PRESETS)}")
    parser.add_argument("--slo-ttft-s", type=above_zero, metavar="S", help="limit of the first token, in seconds")
    parser.add_argument("--slo-latency-s", type=above_zero, metavar="S", help="limit of the last token, in seconds")
    parser.add_argument("--deadline-s", type=above_zero, metavar="S", help="a deadline for requests that have none")
    return parser


if __name__ == "__main__":
    sys.exit(main())
