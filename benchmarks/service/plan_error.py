"""Measures the error of the planner: the same requests are predicted and served, for strategies, replicas and loads.

    python -m benchmarks.service.plan_error --data FOLDER --costs engine.json [--rows 1-6] [--seconds 20]

FOLDER holds Azure's traces, conv.csv and code.csv; without FOLDER, the first 1,000 requests of each trace are repeated.
Each row starts the whole service. Rows named `weights` serve the bundled model. Rows named `simulated` serve replicas
whose steps sleep (`model.simulated`), so that the model does not take the cores from the rest. Step times are measured
first if the files of --costs do not exist. Before each row, the time that an idle service adds to a first token is
measured, one request at a time, and added to the prediction.

A load is a share of the rate that the replicas can serve according to the planner. Limits of error: 5% of throughput,
10% of p50, 20% of p99. Prints a table and one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.config import EngineConfig
from app.engine.request import Request, SamplingParams
from benchmarks.harness.command import command_parser, run_command, tell
from benchmarks.harness.figures import table
from benchmarks.harness.service import Service, application, service
from benchmarks.service.online import LEAD_S, completion_request, play
from deployments.plan.planner import full_rate, limits_to_measure
from deployments.plan.simulated_run import SimulatedRun
from deployments.plan.simulation import simulate
from deployments.plan.step_cost import MeasuredReplica, measure
from deployments.plan.traces import Trace, read_trace

_LENGTHS = 0.1  # scale of the traces' prompts and outputs: the bundled model accepts 2,048 tokens
_MODEL = "models/demo"
_COSTS = {"step_ms": 10.0, "per_token_ms": 0.1}  # step times of a simulated replica
_FIRST_TOKEN = 5  # the first token id after the special tokens
_LIMITS = {"tokens_per_s": 0.05, "ttft_p50": 0.10, "ttft_p99": 0.20, "itl_p50": 0.10, "itl_p99": 0.20}
_TIMEOUT_S = 120.0
_NUM_ALONE, _ALONE_S = 30, 0.2  # requests that measure the service's own time, and the time between two of them


@dataclass(frozen=True, slots=True)
class Row:
    """One setting to predict and to serve."""

    replicas: str  # weights or simulated
    trace: str  # conv or code
    strategy: str
    num_replicas: int
    load: float

    def __str__(self) -> str:
        return f"{self.replicas} {self.trace} {self.strategy} x{self.num_replicas} {self.load:g}"


ROWS = (
    Row("weights", "conv", "continuous", 1, 0.3),
    Row("weights", "conv", "continuous", 1, 0.7),
    Row("weights", "conv", "continuous", 1, 1.0),
    Row("weights", "conv", "continuous", 1, 1.3),
    Row("weights", "code", "continuous", 1, 0.5),
    Row("weights", "code", "continuous", 1, 0.9),
    Row("weights", "code", "hybrid", 1, 0.7),
    Row("weights", "conv", "static", 1, 0.5),
    Row("weights", "conv", "dynamic", 1, 0.7),
    Row("weights", "code", "bucketed", 1, 0.5),
    Row("simulated", "conv", "continuous", 1, 0.5),
    Row("simulated", "conv", "continuous", 1, 1.0),
    Row("simulated", "conv", "continuous", 2, 0.3),
    Row("simulated", "conv", "continuous", 2, 0.7),
    Row("simulated", "conv", "continuous", 2, 1.3),
    Row("simulated", "code", "continuous", 2, 0.5),
    Row("simulated", "code", "continuous", 2, 0.9),
    Row("simulated", "conv", "static", 2, 0.5),
    Row("simulated", "code", "hybrid", 2, 0.7),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("service.plan_error", __doc__)
    parser.add_argument("--data", metavar="FOLDER", help="folder with Azure's conv.csv and code.csv")
    parser.add_argument("--costs", required=True, metavar="FILE", help="step times; a second file is *.simulated.json")
    parser.add_argument("--rows", default=f"1-{len(ROWS)}", metavar="A-B", help="rows to run")
    parser.add_argument(
        "--seconds", type=float, default=20.0, metavar="S", help="time in which a row's requests arrive"
    )
    return run_command(parser, measured, arguments)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """Run the chosen rows one after the other, print the table and return the figures."""
    first, _, last = given.rows.partition("-")
    found = [_row(given, number, ROWS[number - 1]) for number in range(int(first), int(last or first) + 1)]
    print(in_words(found))
    return {"seconds": given.seconds, "rows": found}


def _row(given: argparse.Namespace, number: int, row: Row) -> dict[str, Any]:
    replica, config = _measured_replica(given, row.replicas), _config(row.replicas, row.strategy)
    trace = _requests(given, row, replica, config)
    predicted = _figures(simulate(trace, replica, config.scheduler, config.cache, num_replicas=row.num_replicas))
    with service(_args(row, config)) as live:
        extra_s = _own_time_s(live, trace, replica, config)
        found = _figures(asyncio.run(_served(live, trace)))
    for name in ("ttft_p50", "ttft_p99", "latency_mean"):
        predicted[name] += extra_s
    errors = {name: _error(predicted[name], found[name]) for name in _LIMITS}
    tell(f"{number} {row}: " + ", ".join(f"{name} {error:+.1%}" for name, error in errors.items()))
    return {
        "number": number, "name": str(row), "num_requests": len(trace.requests), "rate": trace.rate,
        "predicted": predicted, "measured": found, "errors": errors, "extra_s": extra_s,
    }  # fmt: skip


def in_words(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of "predicted / measured error"; an error beyond its limit has an asterisk."""
    heads = ["row", "requests", *_LIMITS, "latency mean"]
    return table(heads, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [f"{row['number']} {row['name']}", f"{row['num_requests']:,}"]
    for name in _LIMITS:
        form = "{:,.0f}" if name == "tokens_per_s" else "{:.4f}"
        error = row["errors"][name]
        mark = "*" if abs(error) > _LIMITS[name] else ""
        cells.append(f"{form.format(row['predicted'][name])} / {form.format(row['measured'][name])} {error:+.0%}{mark}")
    return [*cells, f"{row['measured']['latency_mean']:.4f}"]


# ---------------------------------------------------------------------- prediction


def _config(replicas: str, strategy: str = "continuous") -> EngineConfig:
    model = {"path": _MODEL, "num_threads": 1} | ({"simulated": _COSTS} if replicas == "simulated" else {})
    return EngineConfig.model_validate({"model": model, "scheduler": {"strategy": strategy}})


def _measured_replica(given: argparse.Namespace, replicas: str) -> MeasuredReplica:
    path = Path(given.costs)
    path = path if replicas == "weights" else path.with_suffix(".simulated.json")
    if path.is_file():
        return MeasuredReplica.read(path)
    tell(f"measuring steps of replicas: {replicas}")
    config = _config(replicas)
    both = Trace("both", tuple(each for name in ("conv", "code") for each in _trace(given, name).first(1000).requests))
    replica = measure(config, both, limits_to_measure(config.scheduler), seconds=40.0)
    replica.write(path)
    return replica


def _trace(given: argparse.Namespace, name: str) -> Trace:
    place = f"azure-{name}" if given.data is None else str(Path(given.data) / f"{name}.csv")
    return read_trace(place).with_lengths(_LENGTHS)


def _requests(given: argparse.Namespace, row: Row, replica: MeasuredReplica, config: EngineConfig) -> Trace:
    """Return the requests that arrive in the row's seconds, with random prompts and outputs that end at their limit."""
    trace = _trace(given, row.trace)
    rate = row.load * row.num_replicas * full_rate(trace, replica, config.scheduler, config.cache)
    trace = trace.repeated(max(20, round(rate * given.seconds))).at_rate(rate)
    rng = random.Random(1)  # random prompts share no prefix
    tokens = rng.choices(range(_FIRST_TOKEN, replica.model_info.vocab_size), k=110_000)
    requests = []
    for traced in trace.requests:
        start = rng.randrange(100_000)
        prompt = tuple(tokens[start : start + traced.num_prompt_tokens])
        requests.append(replace(traced, prompt_token_ids=prompt))
    return Trace(trace.name, tuple(requests))


def _figures(run: SimulatedRun) -> dict[str, float]:
    return {
        "tokens_per_s": run.num_output_tokens / run.seconds,
        **{f"{metric}_p{p}": run.percentile_s(metric, p) for metric in ("ttft", "itl") for p in (50, 99)},
        "latency_mean": float(run.per_request_s("latency").mean()),
    }


def _error(predicted: float, found: float) -> float:
    """Return the relative error; 0 if both values are infinite because requests were refused."""
    return 0.0 if predicted == found else predicted / found - 1


# ---------------------------------------------------------------------- service


def _args(row: Row, config: EngineConfig) -> dict[str, Any]:
    engine = config.model_dump(mode="json", exclude_unset=True)
    return application("demo", engine, {"num_replicas": row.num_replicas, "drain_timeout_s": 1})


def _own_time_s(live: Service, trace: Trace, replica: MeasuredReplica, config: EngineConfig) -> float:
    """Return the time that an idle service adds to a first token: sockets, and threads that wake up.

    Each request has one output token, so that it ends before the next request, on any number of replicas.
    """
    alone = Trace(
        trace.name,
        tuple(
            replace(each.at(_ALONE_S * number), num_output_tokens=1, max_tokens=1)
            for number, each in enumerate(trace.requests[:_NUM_ALONE])
        ),
    )
    found = asyncio.run(_served(live, alone))
    run = simulate(alone, replica, config.scheduler, config.cache)
    return max(0.0, found.percentile_s("ttft", 50) - run.percentile_s("ttft", 50))


async def _served(live: Service, trace: Trace) -> SimulatedRun:
    """Send the requests at their times over HTTP and return the measured run."""
    requests = []
    for number, traced in enumerate(trace.requests):
        assert traced.prompt_token_ids is not None, "_requests sets the prompts"
        sampling = SamplingParams(max_tokens=traced.num_output_tokens, temperature=0.0, ignore_eos=True)
        request = Request(request_id=str(number), prompt_token_ids=traced.prompt_token_ids, sampling=sampling)
        requests.append(completion_request(live.target, "demo", request))
    start_s = time.perf_counter() + LEAD_S
    arrivals_s = [traced.arrival_s for traced in trace.requests]
    sent = await play(live.target, requests, arrivals_s, start_s=start_s, timeout_s=_TIMEOUT_S)
    run = SimulatedRun()
    for number, answer in enumerate(sent):
        run.arrive(answer.begun_s - start_s)
        run.num_refused += not answer.has_succeeded
        for at_s in answer.delivered_s if answer.has_succeeded else ():
            run.note(number, 1, at_s=at_s - start_s)
        if answer.has_succeeded:
            run.num_tokens[number] = answer.num_tokens
    run.seconds = max(run.last_tokens_s)
    return run


if __name__ == "__main__":
    sys.exit(main())
