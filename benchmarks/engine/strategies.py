"""Every batching strategy and scheduling policy on the same arrivals, in one run and around one loaded model.

    python -m benchmarks.engine.strategies --model DIR --workload FILE --arrival poisson --load 0.5,0.8,1 --plot OUT.png
    python -m benchmarks.engine.strategies --model DIR --workload FILE --strategies static:batch_size=8,continuous

Prints a table and, as the last line, one JSON object. Each strategy × policy gets a fresh engine around the same
model, so nothing is cached or learnt from the one before. --load multiplies the rate that --arrival names; where it
names none, the rate is the capacity: what continuous batching serves when everything comes at once, measured first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

from app.assembly import assemble
from benchmarks.engine.carousel import Carousel, LoggedCarousel
from benchmarks.engine.engine_setup import LoadedEngine, load_engine
from benchmarks.engine.padded_batches import GROUPINGS, PaddedBatches
from benchmarks.engine.service_figures import Promise, Served, ServiceFigures
from benchmarks.engine.step_trace import StepTrace, logged
from benchmarks.engine.trial import POLICIES, STRATEGIES, Trial, base_options, trials
from benchmarks.harness import machine
from benchmarks.harness.command import BenchmarkError, add_json_option, command_parser, refused, report, tell
from benchmarks.harness.figures import cell, table
from benchmarks.harness.options import Options, add_run_options, add_settings_option
from benchmarks.harness.workload import Workload
from benchmarks.peers.hf_model import check_greedy, load_hf_model
from benchmarks.service.arrivals import Arrivals

BASELINE_WINDOW_S = 0.05  # as long as the engine's own dynamic strategy waits by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One trial (or baseline) at one load."""

    name: str
    load: float
    rate: float | None  # requests a second that were offered; None where the arrivals have no rate
    settings: dict[str, Any]
    figures: ServiceFigures
    num_equal_outputs: int  # requests with the same tokens as in the first trial at this load
    served: Served
    num_slots: int

    def to_dict(self) -> dict[str, Any]:
        names = ("name", "load", "rate", "settings", "num_equal_outputs")
        return {name: getattr(self, name) for name in names} | asdict(self.figures)


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    found: list[Outcome] = []

    def measured() -> dict[str, Any]:
        check_plot(given.plot)
        outcomes, summary = measure(Options.of(given), given)
        print(in_words(outcomes))
        found.extend(outcomes)
        return summary

    status = report(measured, given)
    return status if status or given.plot is None else _drawn(given.plot, found)


def _drawn(path: str, outcomes: Sequence[Outcome]) -> int:
    """The exit status. After the figures: a picture that cannot be written must not cost the run."""
    from benchmarks.engine import pictures  # only here: matplotlib is an extra

    try:
        pictures.draw(path, outcomes)
    except BenchmarkError as error:
        return refused(error)
    return 0


def check_plot(path: str | None) -> None:
    """Raises BenchmarkError where pictures are asked for and cannot be drawn: now, not after the run."""
    if path is not None and find_spec("matplotlib") is None:
        raise BenchmarkError("--plot needs matplotlib: pip install -c constraints.txt -e '.[plots]'")


def measure(options: Options, given: argparse.Namespace) -> tuple[list[Outcome], dict[str, Any]]:
    """Load once, warm up, then every trial and baseline at every load."""
    chosen = trials(options, strategies=given.strategies, policies=given.policies)
    arrivals, loads = Arrivals.parse(given.arrival), _loads(given.load)
    promise = _promise(given)
    loaded = load_engine(base_options(options))
    workload = _with_deadlines(loaded.workload, given.deadline_s)
    model = None
    if given.baselines:
        check_greedy(workload)
        model = load_hf_model(options)
    tell("warm-up")
    Carousel(loaded.engine).serve(loaded.workload.warm_up())
    capacity = None
    if arrivals.needs_rate(workload):
        capacity = _capacity(loaded)
        tell(f"capacity: {capacity:.3f} requests/s with everything at once")
    outcomes: list[Outcome] = []
    num_slots = loaded.config.scheduler.max_running
    for load in loads:
        arranged = arrivals.arrange(workload, rate=capacity, load=load, seed=given.seed)
        rate = arrivals.rate or capacity
        runs = _runs(loaded, model, chosen, arranged)
        outcomes += _outcomes(
            runs, arranged, promise, load=load, rate=None if rate is None else rate * load, num_slots=num_slots
        )
    return outcomes, {
        **asdict(loaded.setup),
        "settings": [f"{assignment.path}={assignment.value}" for assignment in options.assignments],
        "capacity_requests_per_s": capacity,
        "num_slots": num_slots,
        "trials": [outcome.to_dict() for outcome in outcomes],
        "gpu": machine.gpu_name(loaded.setup.device),
    }


def serve(loaded: LoadedEngine, trial: Trial, workload: Workload) -> Served:
    """One trial: a fresh engine, with empty memory and without experience, around the loaded model."""
    log = StepTrace(loaded.engine.now)
    engine = assemble(
        trial.scheduler,
        loaded.config.cache,
        num_blocks=loaded.engine.stats().num_blocks,
        runner=logged(loaded.engine.runner, log),
        facts=loaded.engine.facts,
    )
    run = LoggedCarousel(engine, log).serve(workload)
    return Served(
        run=run,
        joined_s=log.joined_s(),
        bubble_share=log.bubble_share(loaded.config.scheduler.max_running),
        mean_running=log.mean_running(),
        steps=log.steps,
    )


def in_words(outcomes: Sequence[Outcome]) -> str:
    """The figures that most choices hang on; the JSON has them all."""
    heads = ["load", "strategy policy", "requests/s", "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99",
             "latency mean", "p50", "p95", "p99", "longest wait", "bubble", "padding", "preempted", "Jain", "in SLO",
             "SLO req/s", "failed"]  # fmt: skip
    rows = []
    for outcome in outcomes:
        found = outcome.figures
        times = (found.ttft_p50_s, found.ttft_p99_s, found.itl_p50_s, found.itl_p99_s, found.latency_mean_s,
                 found.latency_p50_s, found.latency_p95_s, found.latency_p99_s, found.queue_wait_longest_s)  # fmt: skip
        rows.append(
            [
                f"{outcome.load:g}",
                outcome.name,
                f"{found.requests_per_s:.2f}",
                f"{found.output_tokens_per_s:,.0f}",
                *(cell(seconds, "{:.2f}" if seconds is None or seconds >= 0.1 else "{:.3f}") for seconds in times),
                cell(found.bubble_share, "{:.0%}"),
                f"{found.padding_share:.0%}",
                cell(found.preemptions, "{}"),
                cell(found.jain_index, "{:.2f}"),
                cell(found.slo_share, "{:.0%}"),
                cell(found.slo_requests_per_s, "{:.2f}"),
                str(found.num_failed),
            ]
        )
    return table(heads, rows)


def _runs(
    loaded: LoadedEngine, model: Any, chosen: Sequence[Trial], workload: Workload
) -> Iterator[tuple[str, dict[str, Any], Served]]:
    """(name, settings, what was served) of each trial and, with a transformers model, of the baselines."""
    for trial in chosen:
        yield trial.name, trial.scheduler.model_dump(mode="json"), serve(loaded, trial, workload)
    if model is None:
        return
    size = loaded.config.scheduler.max_running
    padded = PaddedBatches(model, batch_size=size, window_s=BASELINE_WINDOW_S)
    for padded.grouping in GROUPINGS:
        run = padded.serve(workload)
        settings = {"batch_size": size, "window_s": BASELINE_WINDOW_S}
        yield (
            f"hf {padded.grouping}",
            settings,
            Served(run=run, joined_s=padded.joined_s, padding_share=padded.padding_share),
        )


def _outcomes(
    runs: Iterator[tuple[str, dict[str, Any], Served]],
    workload: Workload,
    promise: Promise | None,
    *,
    load: float,
    rate: float | None,
    num_slots: int,
) -> Iterator[Outcome]:
    first: Served | None = None
    for name, settings, served in runs:
        first = first or served
        figures = ServiceFigures.of(workload, served, promise)
        tell(f"load {load:g}, {name}: {figures.requests_per_s:.2f} requests/s in {figures.seconds:.1f} s")
        yield Outcome(
            name=name,
            load=load,
            rate=rate,
            settings=settings,
            figures=figures,
            num_equal_outputs=_num_equal(first, served),
            served=served,
            num_slots=num_slots,
        )


def _num_equal(first: Served, served: Served) -> int:
    expected = first.run.timelines
    return sum(expected[name].token_ids == timeline.token_ids for name, timeline in served.run.timelines.items())


def _capacity(loaded: LoadedEngine) -> float:
    """Requests a second of continuous batching when everything is there from the start."""
    at_once = Workload(tuple(replace(timed, arrival_s=0.0) for timed in loaded.workload.requests))
    loaded.engine.clear_prefix_cache()
    return len(at_once.requests) / Carousel(loaded.engine).serve(at_once).seconds


def _with_deadlines(workload: Workload, deadline_s: float | None) -> Workload:
    """A deadline for requests that have none."""
    if deadline_s is None:
        return workload
    return Workload(
        tuple(
            replace(timed, request=replace(timed.request, deadline_s=timed.request.deadline_s or deadline_s))
            for timed in workload.requests
        )
    )


def _promise(given: argparse.Namespace) -> Promise | None:
    if given.slo_ttft_s is None and given.slo_latency_s is None:
        return None
    return Promise(ttft_s=given.slo_ttft_s, latency_s=given.slo_latency_s)


def _loads(text: str) -> list[float]:
    try:
        loads = [float(part) for part in text.split(",")]
    except ValueError:
        loads = []
    if not loads or not all(0 < load <= 1000 for load in loads):
        raise BenchmarkError(f"--load {text}: write numbers above 0, for example 0.5,0.8,1,2")
    return loads


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 86400")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("engine.strategies", __doc__)
    add_run_options(parser)
    add_settings_option(parser)
    parser.set_defaults(repeat=1)
    parser.add_argument(
        "--arrival", default="poisson", metavar="KIND", help="poisson, poisson:RATE, burst:N, burst:N@RATE or trace"
    )
    parser.add_argument("--load", default="1", metavar="L,L", help="multiples of the rate, each measured by itself")
    parser.add_argument("--seed", type=int, default=0, help="of the arrival times")
    parser.add_argument("--strategies", metavar="A,B", help=f"of {', '.join(STRATEGIES)}; NAME:PARAMETER=VALUE")
    parser.add_argument("--policies", metavar="A,B", help=f"of {', '.join(POLICIES)}; NAME:PARAMETER=VALUE")
    parser.add_argument("--slo-ttft-s", type=_seconds, metavar="S", help="first token within so many seconds")
    parser.add_argument("--slo-latency-s", type=_seconds, metavar="S", help="last token within so many seconds")
    parser.add_argument("--deadline-s", type=_seconds, metavar="S", help="a deadline for requests that have none")
    parser.add_argument("--baselines", action="store_true", help="also transformers' padded generate; slow")
    add_json_option(parser)
    parser.add_argument("--plot", metavar="OUT.png", help="draw the figures, and which request held which slot")
    return parser


if __name__ == "__main__":
    sys.exit(main())
