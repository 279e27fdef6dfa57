"""The tuner against each fixed setting of a sweep, on traffic that changes: goodput after a change and later.

    python -m benchmarks.engine.tuner --costs FILE [--data FOLDER] [--ttft-s 0.5] [--itl-ms 20] [--load 0.4] [--real]

In simulated time: the real engine and scheduler, with step times that were measured on this machine (the file of
--costs is written if it is not there). The traffic has phases: conversations, code completions with longer prompts,
conversations with a load twice as high, and longer conversations. A request is good if its first token came within
--ttft-s and at most a hundredth of its gaps were longer than --itl-ms. Each phase has two windows, by the arrival of
requests: the first 30 s and the rest. --real serves the same in real time on one engine, with the tuner
and with the best of the sweep. Prints a table and one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.assembly import assemble, build_sync_engine
from app.config import CacheConfig, EngineConfig, SchedulerConfig, TargetsConfig
from app.engine.async_engine import AsyncEngine
from app.engine.model_runner import ModelRunner
from app.engine.request import Request, TokenDelta
from app.engine.trace.recorder import Recorder
from app.engine.tuner import StepLimits
from benchmarks.harness.command import command_parser, run_command, tell
from benchmarks.harness.figures import table
from benchmarks.service.plan_error import OpenLoop, trace_with_prompts
from deployments.plan.planner import full_rate
from deployments.plan.simulation import FleetSimulation
from deployments.plan.step_cost import MeasuredReplica, measure
from deployments.plan.traces import Trace, read_trace
from deployments.threads import keep_waits_for_the_interpreter_short

_MODEL = "models/demo"
HIGHEST = SchedulerConfig(max_running=128, max_step_tokens=2048, prefill_chunk_tokens=2048)
WINDOW_S = 30.0
_BUDGETS = (16, 32, 64, 128, 192, 256, 512, 1024, 2048)
_RUNNING = (32, 128)
_CHUNK_PARTS = (1, 4)  # of the budget


@dataclass(frozen=True, slots=True)
class Phase:
    """One kind of traffic. Lengths are multiplied, since the bundled model takes 2,048 tokens."""

    name: str
    trace: str  # conv or code
    lengths: float
    load: float  # multiple of --load


PHASES = (
    Phase("conversations", "conv", 0.1, 1.0),
    Phase("code", "code", 0.25, 1.0),
    Phase("burst", "conv", 0.1, 2.0),
    Phase("long conversations", "conv", 0.25, 1.0),
)


class PromiseLog(Recorder):
    """Notes of each request what the promise is about, and the tuner's limits."""

    def __init__(self, *, ttft_s: float, itl_s: float) -> None:
        self._ttft_s = ttft_s
        self._itl_s = itl_s
        self._arrived: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._num_gaps: dict[str, int] = {}
        self._num_long: dict[str, int] = {}
        self._in_time: set[str] = set()
        self._now = 0.0
        self.moves: list[tuple[float, StepLimits]] = []

    def arrived(self, request: Request, *, at: float) -> None:
        self._arrived[request.request_id] = at

    def limited(self, limits: StepLimits) -> None:
        self.moves.append((self._now, limits))

    def step_ended(self, deltas: list[TokenDelta], *, at: float) -> None:
        self._now = at
        for delta in deltas:
            if delta.token_ids:
                self._note_token(delta.request_id, at)

    def _note_token(self, name: str, at: float) -> None:
        if name in self._last:
            self._num_gaps[name] = self._num_gaps.get(name, 0) + 1
            self._num_long[name] = self._num_long.get(name, 0) + (at - self._last[name] > self._itl_s)
        elif at - self._arrived[name] <= self._ttft_s:
            self._in_time.add(name)
        self._last[name] = at

    def good(self, name: str) -> bool:
        """Whether a request's first token was in time and at most a hundredth of its gaps were too long."""
        return name in self._in_time and self._num_long.get(name, 0) <= self._num_gaps.get(name, 0) / 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Phases one after the other, each of the same length."""

    trace: Trace
    phase_s: float

    def goodput(self, log: PromiseLog) -> list[float]:
        """Good requests a second of the two windows of each phase."""
        num_good = [0] * (2 * len(PHASES))
        for number, traced in enumerate(self.trace.requests):
            phase = int(traced.arrival_s // self.phase_s)
            is_late = traced.arrival_s - phase * self.phase_s >= WINDOW_S
            num_good[2 * phase + is_late] += log.good(str(number))
        lengths = (WINDOW_S, self.phase_s - WINDOW_S) * len(PHASES)
        return [number / seconds for number, seconds in zip(num_good, lengths, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One setting."""

    name: str
    scheduler: SchedulerConfig
    goodput: list[float]
    moves: list[tuple[float, StepLimits]]

    @property
    def mean(self) -> float:
        """Good requests a second of the whole run, if all windows were equally long."""
        return sum(self.goodput) / len(self.goodput)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("engine.tuner", __doc__)
    parser.add_argument("--costs", required=True, metavar="FILE", help="step times are kept here")
    parser.add_argument("--data", metavar="FOLDER", help="of Azure's traces, conv.csv and code.csv")
    parser.add_argument("--ttft-s", type=float, default=0.5, metavar="S", help="target for first tokens (0.5)")
    parser.add_argument("--itl-ms", type=float, default=20.0, metavar="MS", help="target between tokens (20)")
    parser.add_argument("--load", type=float, default=0.4, metavar="L", help="of what the engine can do (0.4)")
    parser.add_argument("--phase-s", type=float, default=90.0, metavar="S", help="seconds of each phase (90)")
    parser.add_argument("--real", action="store_true", help="serve it in real time too")
    return run_command(parser, measured, arguments)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """The tuner, then each fixed setting; with --real the tuner and the best of them once more."""
    replica = _measured_replica(given)
    traffic = _traffic(given, replica)
    targets = TargetsConfig(ttft_p99_s=given.ttft_s, itl_p99_ms=given.itl_ms)
    tuned = HIGHEST.model_copy(update={"targets": targets})
    found = [_simulated("tuner", tuned, traffic, replica, given)]
    for scheduler in _sweep():
        limits = StepLimits.of(scheduler)
        name = f"{limits.max_step_tokens} / {limits.prefill_chunk_tokens} / {limits.max_running}"
        found.append(_simulated(name, scheduler, traffic, replica, given))
        tell(f"{name}: {found[-1].mean:.2f} good requests/s")
    best = max(found[1:], key=lambda each: each.mean)
    if given.real:
        found += _served_for_real(traffic, [found[0], best], replica, given)
    print(_in_words(found, best))
    return {
        "num_requests": len(traffic.trace.requests),
        "windows": [f"{phase.name} {part}" for phase in PHASES for part in ("0-30", "30-")],
        "served": [_described(each) for each in found],
    }


def _described(served: Served) -> dict[str, Any]:
    moves = [[round(at, 2), *limits] for at, limits in served.moves]
    return {"name": served.name, "goodput": served.goodput, "mean": served.mean, "moves": moves}


def _in_words(found: Sequence[Served], best: Served) -> str:
    """The tuner, the best single setting, the best of each window, and every setting."""
    fixed = [each for each in found if each.name != "tuner" and not each.name.startswith("real")]
    of_windows = [max(values) for values in zip(*(each.goodput for each in fixed), strict=True)]
    heads = [
        "budget / chunk / running",
        *(f"{phase.name} {part}" for phase in PHASES for part in ("0-30", "30-")),
        "mean",
    ]
    rows = [[each.name, *(f"{value:.2f}" for value in each.goodput), f"{each.mean:.2f}"] for each in found]
    tuner = found[0]
    rows.append(["best fixed of each window", *(f"{value:.2f}" for value in of_windows), ""])
    rows.append(["tuner / best fixed setting", *_ratios(tuner.goodput, best.goodput), f"{tuner.mean / best.mean:.2f}"])
    rows.append(["tuner / best of the window", *_ratios(tuner.goodput, of_windows), ""])
    return table(heads, rows)


def _ratios(values: Sequence[float], others: Sequence[float]) -> list[str]:
    return [f"{value / other:.2f}" if other else "-" for value, other in zip(values, others, strict=True)]


def _sweep() -> list[SchedulerConfig]:
    return [
        SchedulerConfig(max_running=min(running, budget), max_step_tokens=budget, prefill_chunk_tokens=budget // part)
        for budget in _BUDGETS
        for running in _RUNNING
        for part in _CHUNK_PARTS
    ]


# ---------------------------------------------------------------------- what is served


def _read(given: argparse.Namespace, phase: Phase) -> Trace:
    place = f"azure-{phase.trace}" if given.data is None else str(Path(given.data) / f"{phase.trace}.csv")
    trace = read_trace(place).with_lengths(phase.lengths)
    return Trace(trace.name, tuple(each for each in trace.requests if each.num_tokens <= 2000))


def _traffic(given: argparse.Namespace, replica: MeasuredReplica) -> Traffic:
    requests = []
    for number, phase in enumerate(PHASES):
        trace = _read(given, phase)
        rate = given.load * phase.load * full_rate(trace, replica, HIGHEST, CacheConfig())
        trace = trace.repeated(max(20, round(rate * given.phase_s))).at_rate(rate)
        tell(f"{phase.name}: {rate:.2f} requests/s")
        requests += [
            each.at(number * given.phase_s + each.arrival_s)
            for each in trace.requests
            if each.arrival_s < given.phase_s
        ]  # fmt: skip
    return Traffic(trace=Trace("phases", tuple(requests)), phase_s=given.phase_s)


def _measured_replica(given: argparse.Namespace) -> MeasuredReplica:
    path = Path(given.costs)
    if path.is_file():
        return MeasuredReplica.read(path)
    tell("measuring steps for 60 s")
    config = EngineConfig.model_validate(
        {"model": {"path": _MODEL, "num_threads": 1}, "scheduler": HIGHEST.model_dump()}
    )
    both = Trace("both", tuple(each for phase in PHASES[:2] for each in _read(given, phase).first(1000).requests))
    shapes = ((128, 1024), (128, 512), (128, 256), (64, 128), (32, 64), (16, 32), (8, 2048), (4, 512), (1, 512))
    settings = [
        SchedulerConfig(max_running=running, max_step_tokens=tokens, prefill_chunk_tokens=tokens)
        for running, tokens in shapes
    ]
    replica = measure(config, both, [HIGHEST, *settings], seconds=60.0)
    replica.write(path)
    return replica


def _simulated(
    name: str, scheduler: SchedulerConfig, traffic: Traffic, replica: MeasuredReplica, given: argparse.Namespace
) -> Served:
    log = PromiseLog(ttft_s=given.ttft_s, itl_s=given.itl_ms / 1e3)
    FleetSimulation([replica], scheduler, CacheConfig(), recorders={0: log}).run(traffic.trace)
    return Served(name=name, scheduler=scheduler, goodput=traffic.goodput(log), moves=log.moves)


# ---------------------------------------------------------------------- in real time


def _served_for_real(
    traffic: Traffic, chosen: Sequence[Served], replica: MeasuredReplica, given: argparse.Namespace
) -> list[Served]:
    keep_waits_for_the_interpreter_short()
    config = EngineConfig.model_validate(
        {"model": {"path": _MODEL, "num_threads": 1}, "scheduler": HIGHEST.model_dump()}
    )
    runner = build_sync_engine(config).runner
    real = replace(traffic, trace=trace_with_prompts(traffic.trace, vocab_size=replica.facts.vocab_size))
    found = []
    for each in chosen:
        tell(f"in real time: {each.name}")
        log = PromiseLog(ttft_s=given.ttft_s, itl_s=given.itl_ms / 1e3)
        asyncio.run(_play(runner, each.scheduler, real, log, replica))
        found.append(
            Served(name=f"real: {each.name}", scheduler=each.scheduler, goodput=real.goodput(log), moves=log.moves)
        )
    return found


async def _play(
    runner: ModelRunner, scheduler: SchedulerConfig, traffic: Traffic, log: PromiseLog, replica: MeasuredReplica
) -> None:
    engine = AsyncEngine(
        assemble(
            scheduler, CacheConfig(), num_blocks=replica.num_blocks, runner=runner, facts=replica.facts, recorder=log
        ),
        max_requests=scheduler.max_requests,
    )  # fmt: skip
    try:
        await OpenLoop(engine, traffic.trace).play()
    finally:
        engine.shutdown()


if __name__ == "__main__":
    sys.exit(main())
