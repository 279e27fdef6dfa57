"""How wrong the planner is: the same requests predicted and served, for strategies, replicas and loads.

    python -m benchmarks.service.plan_error --data FOLDER --costs engine.json [--rows 1-6] [--seconds 20]

FOLDER holds Azure's traces, conv.csv and code.csv; without it the first 1,000 requests of each are played again and
again. Rows on an `engine` serve the bundled model in a replica's own thread, without HTTP. Rows on a `service` are the
whole live service with simulated replicas (`model.simulated`: steps that sleep), so that the model does not take the
cores from the rest. Step times are measured first, where the files of --costs do not have them. What an idle engine or
service adds to a first token is measured before each row, one request at a time, and added to the prediction.

Loads are shares of what the planner says that the replicas can do. Limits of error: 5% of throughput, 10% of p50, 20%
of p99. Beside it the mean latency by queueing theory (Sakasegawa's approximation of M/G/k: k slots, each held as long
as in a full batch). Prints a table and one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from app.build import assemble, build_sync_engine
from app.config import EngineConfig, SchedulerConfig
from app.engine.async_engine import AsyncEngine
from app.engine.model_runner import ModelRunner
from app.engine.request import Request, SamplingParams, TokenDelta
from app.errors import Overloaded
from benchmarks.harness.command import command_parser, run_command, tell
from benchmarks.harness.figures import table
from benchmarks.harness.service import Service, service
from benchmarks.service.open_loop import LEAD_S, completion_request, play
from deployments.plan.planner import full_rate, limits_to_measure
from deployments.plan.simulation import SimulatedRun, simulate
from deployments.plan.step_cost import MeasuredReplica, measure
from deployments.plan.traces import Trace, read_trace
from deployments.threads import keep_waits_for_the_interpreter_short

_LENGTHS = 0.1  # of the traces' prompts and outputs: the bundled model takes 2,048 tokens
_MODEL = "models/demo"
_COSTS = {"step_ms": 10.0, "per_token_ms": 0.1}  # of a simulated replica
_FIRST_TOKEN = 5  # of the vocabulary after the special ones
_LIMITS = {"tokens_per_s": 0.05, "ttft_p50": 0.10, "ttft_p99": 0.20, "itl_p50": 0.10, "itl_p99": 0.20}
_TIMEOUT_S = 120.0
_NUM_ALONE, _ALONE_S = 30, 0.2  # requests by which the service's own time is measured, and the time between them


@dataclass(frozen=True, slots=True)
class Row:
    """One setting that is predicted and served."""

    where: str  # engine or service
    trace: str  # conv or code
    strategy: str
    num_replicas: int
    load: float

    def __str__(self) -> str:
        return f"{self.where} {self.trace} {self.strategy} x{self.num_replicas} {self.load:g}"


ROWS = (
    Row("engine", "conv", "continuous", 1, 0.3),
    Row("engine", "conv", "continuous", 1, 0.7),
    Row("engine", "conv", "continuous", 1, 1.0),
    Row("engine", "conv", "continuous", 1, 1.3),
    Row("engine", "code", "continuous", 1, 0.5),
    Row("engine", "code", "continuous", 1, 0.9),
    Row("engine", "code", "hybrid", 1, 0.7),
    Row("engine", "conv", "static", 1, 0.5),
    Row("engine", "conv", "dynamic", 1, 0.7),
    Row("engine", "code", "bucketed", 1, 0.5),
    Row("service", "conv", "continuous", 1, 0.5),
    Row("service", "conv", "continuous", 1, 1.0),
    Row("service", "conv", "continuous", 2, 0.3),
    Row("service", "conv", "continuous", 2, 0.7),
    Row("service", "conv", "continuous", 2, 1.3),
    Row("service", "code", "continuous", 2, 0.5),
    Row("service", "code", "continuous", 2, 0.9),
    Row("service", "conv", "static", 2, 0.5),
    Row("service", "code", "hybrid", 2, 0.7),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("service.plan_error", __doc__)
    parser.add_argument("--data", metavar="FOLDER", help="of Azure's traces, conv.csv and code.csv")
    parser.add_argument("--costs", required=True, metavar="FILE", help="step times are kept here; .service too")
    parser.add_argument("--rows", default=f"1-{len(ROWS)}", metavar="A-B", help="some of the rows")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="in which a row's requests arrive")
    return run_command(parser, measured, arguments)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """All chosen rows; those on the same service one after the other."""
    first, _, last = given.rows.partition("-")
    numbers = range(int(first), int(last or first) + 1)
    rows = [(number, ROWS[number - 1]) for number in numbers]
    found: list[dict[str, Any]] = []
    on_engine = [(number, row) for number, row in rows if row.where == "engine"]
    if on_engine:
        found += _engine_rows(given, on_engine)
    for number, row in rows:
        if row.where == "service":
            found.append(_service_row(given, number, row))
    print(in_words(found))
    return {"seconds": given.seconds, "rows": found}


def in_words(rows: Sequence[dict[str, Any]]) -> str:
    """Measured by predicted, with the error; a miss of its limit has an asterisk."""
    heads = ["row", "requests", *(f"{name}" for name in _LIMITS), "latency mean", "by M/G/k"]
    return table(heads, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [f"{row['number']} {row['name']}", f"{row['num_requests']:,}"]
    for name in _LIMITS:
        form = "{:,.0f}" if name == "tokens_per_s" else "{:.4f}"
        error = row["errors"][name]
        mark = "*" if abs(error) > _LIMITS[name] else ""
        cells.append(f"{form.format(row['predicted'][name])} / {form.format(row['measured'][name])} {error:+.0%}{mark}")
    return [*cells, f"{row['measured']['latency_mean']:.4f}", f"{row['by_theory_s']:.4f}"]


# ---------------------------------------------------------------------- prediction


def _config(row: Row | None = None, *, simulated: bool) -> EngineConfig:
    strategy: dict[str, Any] = {"name": row.strategy if row else "continuous"}
    scheduler = SchedulerConfig.model_validate({"strategy": strategy})
    if "batch_size" in type(scheduler.strategy).model_fields:
        strategy["batch_size"] = scheduler.max_running
    return EngineConfig.model_validate(
        {
            "model": {"path": _MODEL, "num_threads": 1} | ({"simulated": _COSTS} if simulated else {}),
            "scheduler": {"strategy": strategy},
        }
    )


def _measured_replica(given: argparse.Namespace, where: str) -> MeasuredReplica:
    path = Path(given.costs)
    path = path if where == "engine" else path.with_suffix(".service.json")
    if path.is_file():
        return MeasuredReplica.read(path)
    tell(f"measuring steps of the {where}")
    config = _config(simulated=where == "service")
    seconds = 25.0 if where == "engine" else 40.0
    both = Trace("both", tuple(each for name in ("conv", "code") for each in _trace(given, name).first(1000).requests))
    replica = measure(config, both, limits_to_measure(config.scheduler), seconds=seconds)
    replica.write(path)
    return replica


def _trace(given: argparse.Namespace, name: str) -> Trace:
    place = f"azure-{name}" if given.data is None else str(Path(given.data) / f"{name}.csv")
    return read_trace(place).with_lengths(_LENGTHS)


def _requests(given: argparse.Namespace, row: Row, replica: MeasuredReplica, config: EngineConfig) -> Trace:
    """As many as arrive in the row's seconds, with prompts of their own and outputs that end at their limit."""
    trace = _trace(given, row.trace)
    rate = row.load * row.num_replicas * full_rate(trace, replica, config.scheduler, config.cache)
    trace = trace.repeated(max(20, round(rate * given.seconds))).at_rate(rate)
    return trace_with_prompts(trace, vocab_size=replica.facts.vocab_size)


def trace_with_prompts(trace: Trace, *, vocab_size: int) -> Trace:
    """The same requests with prompts of random tokens that share no prefix."""
    rng = random.Random(1)
    tokens = rng.choices(range(_FIRST_TOKEN, vocab_size), k=110_000)
    requests = []
    for traced in trace.requests:
        start = rng.randrange(100_000)
        prompt = tuple(tokens[start : start + traced.num_prompt_tokens])
        requests.append(replace(traced, prompt_token_ids=prompt))
    return Trace(trace.name, tuple(requests))


def _predicted(row: Row, trace: Trace, replica: MeasuredReplica, config: EngineConfig) -> SimulatedRun:
    return simulate(trace, replica, config.scheduler, config.cache, num_replicas=row.num_replicas)


def _figures(run: SimulatedRun) -> dict[str, float]:
    return {
        "tokens_per_s": run.num_output_tokens / run.seconds,
        **{f"{metric}_p{p}": run.percentile_s(metric, p) for metric in ("ttft", "itl") for p in (50, 99)},
        "latency_mean": float(run.per_request_s("latency").mean()),
    }


def _compared(
    number: int, row: Row, trace: Trace, run: SimulatedRun, found: dict[str, float], *, full: float, extra_s: float
) -> dict[str, Any]:
    predicted = _figures(run)
    for name in ("ttft_p50", "ttft_p99", "latency_mean"):
        predicted[name] += extra_s
    errors = {name: _error(predicted[name], found[name]) for name in _LIMITS}
    tell(f"{number} {row}: " + ", ".join(f"{name} {error:+.1%}" for name, error in errors.items()))
    return {
        "number": number, "name": str(row), "num_requests": len(trace.requests), "rate": trace.rate,
        "predicted": predicted, "measured": found, "errors": errors, "extra_s": extra_s,
        "by_theory_s": latency_by_theory(trace, num_slots=row.num_replicas * 32, full_rate=full * row.num_replicas),
    }  # fmt: skip


def _error(predicted: float, found: float) -> float:
    """Relative; 0 where both are infinite, because requests were refused."""
    return 0.0 if predicted == found else predicted / found - 1


def latency_by_theory(trace: Trace, *, num_slots: int, full_rate: float) -> float:
    """Mean time in an M/G/k system in seconds, infinite at a load of 1 or more.

    A request holds one of k slots for a time in proportion to its output: by Little's law k / `full_rate` on average
    when all are full. The wait is Sakasegawa's (1977) for M/M/k, times half of one more than the squared variation of
    service.
    """
    load = trace.rate / full_rate
    service_s = num_slots / full_rate
    if load > 0.999:
        return math.inf
    lengths = [each.num_output_tokens for each in trace.requests]
    variation = statistics.pvariance(lengths) / statistics.fmean(lengths) ** 2
    wait_s: float = service_s * load ** (math.sqrt(2 * (num_slots + 1)) - 1) / (num_slots * (1 - load))
    return service_s + wait_s * (1 + variation) / 2


# ---------------------------------------------------------------------- one engine in real time


def _engine_rows(given: argparse.Namespace, rows: Sequence[tuple[int, Row]]) -> Iterator[dict[str, Any]]:
    keep_waits_for_the_interpreter_short()
    replica = _measured_replica(given, "engine")
    loaded = build_sync_engine(_config(simulated=False))
    for number, row in rows:
        config = _config(row, simulated=False)
        trace = _requests(given, row, replica, config)
        run = _predicted(row, trace, replica, config)
        serve = partial(_served_by_engine, loaded.runner, replica, config)
        extra_s = _own_time_s(serve, trace, replica, config)
        served = serve(trace)
        full = full_rate(_trace(given, row.trace), replica, config.scheduler, config.cache)
        yield _compared(number, row, trace, run, _figures(served), full=full, extra_s=extra_s)


def _served_by_engine(
    runner: ModelRunner, replica: MeasuredReplica, config: EngineConfig, trace: Trace
) -> SimulatedRun:
    """The requests at their times, in a new engine around a loaded model."""
    return asyncio.run(_play(runner, replica, config, trace))


async def _play(runner: ModelRunner, replica: MeasuredReplica, config: EngineConfig, trace: Trace) -> SimulatedRun:
    engine = AsyncEngine(
        assemble(
            config.scheduler, config.cache, num_blocks=replica.num_blocks, runner=runner, facts=replica.facts
        ),
        max_requests=config.scheduler.max_requests,
    )  # fmt: skip
    client = OpenLoop(engine, trace)
    try:
        await client.play()
    finally:
        engine.shutdown()
    return client.run


class OpenLoop:
    """Sends requests when their time has come, and notes when their tokens do."""

    def __init__(self, engine: AsyncEngine, trace: Trace) -> None:
        self.run = SimulatedRun()
        self._engine = engine
        self._trace = trace
        self._start = 0.0
        self._num_open = 0
        self._all_sent = False
        self._ended = asyncio.Event()

    async def play(self) -> None:
        self._start = time.perf_counter()
        for number, traced in enumerate(self._trace.requests):
            late_s = time.perf_counter() - self._start - traced.arrival_s
            if late_s < 0:
                await asyncio.sleep(-late_s)
            self._send(request_of(number, traced.prompt_token_ids, traced.num_output_tokens))
        self._all_sent = True
        if self._num_open:
            await self._ended.wait()
        self.run.seconds = max(self.run.last_tokens_s)

    def _send(self, request: Request) -> None:
        self.run.arrive(time.perf_counter() - self._start)  # a late timer is no wait for the engine
        try:
            self._engine.submit(request, self)
            self._num_open += 1
        except Overloaded:
            self.run.num_refused += 1

    def put_all(self, deltas: Sequence[TokenDelta]) -> None:
        now = time.perf_counter() - self._start
        for delta in deltas:
            self.run.note(int(delta.request_id), len(delta.token_ids), at_s=now)
            self._num_open -= delta.finish_reason is not None
        if self._all_sent and not self._num_open:
            self._ended.set()


def request_of(number: int, prompt: tuple[int, ...] | None, num_output: int) -> Request:
    """A request that generates exactly so many tokens."""
    assert prompt is not None, "a real engine needs real prompts"
    sampling = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
    return Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling)


# ---------------------------------------------------------------------- the live service


def _service_row(given: argparse.Namespace, number: int, row: Row) -> dict[str, Any]:
    replica = _measured_replica(given, "service")
    config = _config(row, simulated=True)
    trace = _requests(given, row, replica, config)
    run = _predicted(row, trace, replica, config)
    with _live(row, config) as live:
        extra_s = _own_time_s(lambda alone: asyncio.run(_served_over_http(live, alone)), trace, replica, config)
        figures = _figures(asyncio.run(_served_over_http(live, trace)))
    full = full_rate(_trace(given, row.trace), replica, config.scheduler, config.cache)
    return _compared(number, row, trace, run, figures, full=full, extra_s=extra_s)


@contextmanager
def _live(row: Row, config: EngineConfig) -> Iterator[Service]:
    application = {
        "models": [
            {
                "name": "demo",
                "engine": config.model_dump(mode="json", exclude_unset=True),
                "replicas": {"num_replicas": row.num_replicas, "num_cpus": 0.1, "drain_timeout_s": 1},
            }
        ]
    }
    with service(application) as live:
        yield live


def _own_time_s(
    serve: Callable[[Trace], SimulatedRun], trace: Trace, replica: MeasuredReplica, config: EngineConfig
) -> float:
    """What the way of a request adds to a first token when there is no other: sockets, threads that wake up.

    Each request has one output token, so that it has ended before the next comes, on any number of replicas.
    """
    alone = Trace(
        trace.name,
        tuple(
            replace(each.at(_ALONE_S * number), num_output_tokens=1, max_tokens=1)
            for number, each in enumerate(trace.requests[:_NUM_ALONE])
        ),
    )
    found = serve(alone)
    run = simulate(alone, replica, config.scheduler, config.cache)
    return max(0.0, found.percentile_s("ttft", 50) - run.percentile_s("ttft", 50))


async def _served_over_http(live: Service, trace: Trace) -> SimulatedRun:
    """The requests at their times, over HTTP."""
    requests = [
        completion_request(
            live.target, "demo", request_of(number, traced.prompt_token_ids, traced.num_output_tokens)
        )
        for number, traced in enumerate(trace.requests)
    ]  # fmt: skip
    start_s = time.perf_counter() + LEAD_S
    arrivals_s = [traced.arrival_s for traced in trace.requests]
    sent = await play(live.target, requests, arrivals_s, start_s=start_s, timeout_s=_TIMEOUT_S)
    run = SimulatedRun()
    for number, one in enumerate(sent):
        run.arrive(one.answer.begun_s - start_s)
        run.num_refused += not one.answer.has_succeeded
        for at_s in one.answer.delivered_s if one.answer.has_succeeded else ():
            run.note(number, 1, at_s=at_s - start_s)
        if one.answer.has_succeeded:
            run.num_tokens[number] = one.answer.num_tokens
    run.seconds = max(run.last_tokens_s)
    return run


if __name__ == "__main__":
    sys.exit(main())
