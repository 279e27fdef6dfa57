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
from collections.abc import Sequence
from typing import Any

from app.config import EngineConfig
from benchmarks.engine.engine_setup import configured, resolve_device, with_room
from benchmarks.harness.command import BenchmarkError, command_parser, run_command, tell
from benchmarks.harness.http_call import Target
from benchmarks.harness.options import Options, add_run_options
from benchmarks.harness.service import service
from benchmarks.harness.workload import Workload, read_workload
from benchmarks.service.open_loop import measured, repeated

MODEL_NAME = "served"
_TIMEOUT_S = 600.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("service.over_http", __doc__)
    add_run_options(parser, repeat=3, settings=True)
    return run_command(parser, lambda given: measure(Options.of(given)), arguments)


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
            tell(f"repeat {number} of {options.repeat}: {figures['output_tokens_per_s']:,.0f} output tokens/s")
            runs.append(figures)
    ordered = sorted(runs, key=lambda run: float(run["output_tokens_per_s"]))
    median = statistics.median(run["output_tokens_per_s"] for run in runs)
    return ordered[(len(runs) - 1) // 2] | {"output_tokens_per_s": median}


def application(config: EngineConfig, *, num_requests: int) -> dict[str, Any]:
    """The application's `args`: one replica of that engine, which refuses none of the workload's requests."""
    scheduler = config.scheduler.model_copy(update={"max_waiting": max(config.scheduler.max_waiting, num_requests)})
    engine = config.model_copy(update={"scheduler": scheduler}).model_dump(mode="json", exclude_defaults=True)
    return {
        "models": [
            {"name": MODEL_NAME, "engine": engine, "replicas": {"num_replicas": 1, "num_cpus": 0.5}},
        ],
    }


async def serve(target: Target, workload: Workload, *, model_name: str = MODEL_NAME) -> dict[str, Any]:
    """The figures of a workload with every request at its time.

    Raises:
        BenchmarkError: one is not answered whole.
    """
    figures = await measured(target, model_name, workload, timeout_s=_TIMEOUT_S)
    if figures["errors"]:
        num_failed = len(workload.requests) - figures["num_answered"]
        raise BenchmarkError(f"{num_failed:,} of {len(workload.requests):,} requests failed: {figures['errors']}")
    return figures


if __name__ == "__main__":
    sys.exit(main())
