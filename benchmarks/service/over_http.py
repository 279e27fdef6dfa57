"""A workload through the whole service, to be compared with the engine alone on the same cores.

    python -m benchmarks.peers.compare --model DIR --workload FILE carousel http --set scheduler.max_running=64

Starts the service as `make serve` does, with one replica and the same settings as `benchmarks.engine.throughput`. All
requests of the workload are sent at their times over real HTTP, streamed, until the last token. The client takes its
part of the same cores. The last line of stdout is one JSON object, with the keys of `benchmarks.service.online`.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from app.config import EngineConfig
from benchmarks.engine.engine_setup import configured, resolve_device, with_room
from benchmarks.harness import machine
from benchmarks.harness.command import BenchmarkError, command_parser, report, tell
from benchmarks.harness.http_call import Target
from benchmarks.harness.options import Options, add_repeat_option, add_run_options, add_settings_option
from benchmarks.harness.service import service
from benchmarks.harness.workload import Workload, read_workload
from benchmarks.service.online_figures import OnlineFigures, Slo
from benchmarks.service.open_loop import LEAD_S, completion_request, play, repeated

MODEL_NAME = "served"
_TIMEOUT_S = 600.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("service.over_http", __doc__)
    add_run_options(parser)
    add_repeat_option(parser)
    add_settings_option(parser)
    given = parser.parse_args(arguments)
    return report(lambda: measure(Options.of(given)), given)


def measure(options: Options) -> dict[str, Any]:
    """Start, warm up, serve the workload `repeat` times, each time with prefixes that were not seen before.

    Raises:
        BenchmarkError: an option or the workload is wrong, the service does not start, or a request is not answered.
    """
    workload = read_workload(options.workload)
    config = configured(options)
    config = with_room(config, workload, options.assignments, resolve_device(config.model.device))
    size = len(workload.requests)
    with service(application(config, num_requests=size)) as running:
        asyncio.run(serve(running.target, workload.warm_up()))
        repeats = repeated(workload, (options.repeat + 1) * size).requests
        runs = []
        for number in range(1, options.repeat + 1):  # the warm-up had the first salt
            figures = asyncio.run(serve(running.target, Workload(repeats[number * size : (number + 1) * size])))
            tell(f"repeat {number} of {options.repeat}: {figures.output_tokens_per_s:,.0f} output tokens/s")
            runs.append(figures)
    middle = sorted(runs, key=lambda run: run.output_tokens_per_s)[(len(runs) - 1) // 2]
    return asdict(middle) | {
        "output_tokens_per_s": statistics.median(run.output_tokens_per_s for run in runs),
    }


def application(config: EngineConfig, *, num_requests: int) -> dict[str, Any]:
    """The application's `args`: one replica of that engine, which refuses none of the workload's requests."""
    scheduler = config.scheduler.model_copy(update={"max_waiting": max(config.scheduler.max_waiting, num_requests)})
    engine = config.model_copy(update={"scheduler": scheduler}).model_dump(mode="json", exclude_defaults=True)
    return {
        "models": [
            {"name": MODEL_NAME, "engine": engine, "replicas": {"num_replicas": 1, "num_cpus": 0.5}},
        ],
    }


async def serve(target: Target, workload: Workload, *, model_name: str = MODEL_NAME) -> OnlineFigures:
    """Every request of a workload at its time.

    Raises:
        BenchmarkError: one is not answered whole.
    """
    requests = [completion_request(target, model_name, timed.request) for timed in workload.requests]
    arrivals_s = [timed.arrival_s for timed in workload.requests]
    cpu_began = machine.own_cpu_s()
    sent = await play(target, requests, arrivals_s, start_s=time.perf_counter() + LEAD_S, timeout_s=_TIMEOUT_S)
    figures = OnlineFigures.of(sent, Slo(), client_cpu_s=machine.own_cpu_s() - cpu_began)
    if figures.errors:
        raise BenchmarkError(f"{len(sent) - figures.num_answered:,} of {len(sent):,} requests failed: {figures.errors}")
    return figures


if __name__ == "__main__":
    sys.exit(main())
