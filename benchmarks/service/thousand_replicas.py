"""A process with many replicas for `benchmarks.service.thousand`: simulated engines behind real sockets.

    python -m benchmarks.service.thousand_replicas --number 100 --step-ms 500 --running 32

The process prints the addresses of its replicas as one line of JSON, and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from functools import partial

import uvloop

from app.build import build_engine
from app.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from app.engine.async_engine import AsyncEngine
from app.engine.histogram import SECONDS, Distribution
from app.fleet import FrameServer, report_of_engine
from app.metrics import EngineReport, LoopSnapshot, encoded, replica_metrics
from benchmarks.harness.command import command_parser, positive
from deployments.open_files import allow_many_files
from deployments.serve.process import freeze_loaded


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("service.thousand_replicas", __doc__)
    parser.add_argument("--number", type=positive, default=100, metavar="N", help="number of replicas")
    parser.add_argument("--step-ms", type=float, default=500.0, metavar="MS", help="duration of a simulated step")
    parser.add_argument("--running", type=positive, default=32, metavar="N", help="concurrent requests a replica")
    parser.add_argument("--model", default="models/demo", metavar="DIR", help="model with the tokenizer to draw from")
    given = parser.parse_args(arguments)
    allow_many_files()
    config = EngineConfig(
        model=ModelConfig(path=given.model, simulated={"step_ms": given.step_ms}),
        cache=CacheConfig(num_blocks=given.running * 16),
        scheduler=SchedulerConfig(max_running=given.running, max_waiting=given.running),
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, given.number))
    os._exit(0)  # the threads of the engines may be in a step


async def serve(config: EngineConfig, number: int) -> None:
    """Serve `number` replicas until standard input ends."""
    engines = [build_engine(config) for _ in range(number)]
    servers = [
        FrameServer(
            "127.0.0.1", engine, partial(report_of_engine, engine), partial(metrics, engine, f"{os.getpid()}-{at}")
        )
        for at, engine in enumerate(engines)
    ]
    freeze_loaded()
    print(json.dumps([await server.open() for server in servers]), flush=True)
    await asyncio.to_thread(sys.stdin.read)


def metrics(engine: AsyncEngine, replica_id: str) -> bytes:
    """Return the metrics of an engine, encoded as a replica sends them."""
    report = EngineReport(replica_id=replica_id, stats=engine.stats(), measurements=engine.measurements(), loop=_LOOP)
    return encoded(replica_metrics("demo", report, {}))


# Replicas of this process share one event loop; constant figures give their reports the size of real reports.
_LOOP = LoopSnapshot(
    delay_s=Distribution.empty(SECONDS), num_stalls=0, stalled_s=0.0, num_tasks=9, queued={"default": 0}
)


if __name__ == "__main__":
    sys.exit(main())
