"""Measures `/metrics` of one ingress with many replicas: CPU, stalls of the event loop, and memory."""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import time
import tracemalloc
from typing import Any

import uvicorn
from starlette.applications import Starlette

from app.api.endpoints.admin import Answers
from app.api.endpoints.service import MetricsRoutes
from app.config import ReplicasConfig, ServedModelConfig
from app.engine.request import Address
from app.fleet import FailoverLimits, Fleet, ReplicaRegistry
from app.fleet.dispatch import GroupChooser, make_policy
from app.metrics import RequestMetrics
from benchmarks.harness import machine
from benchmarks.harness.command import tell
from benchmarks.service.thousand_ingress import LocalTransport
from benchmarks.service.thousand_sockets import replica_processes
from deployments.open_files import allow_many_files
from deployments.serve.metrics import IngressReport, KnownCounts, LaterCounts, MetricsCollector
from deployments.serve.process import freeze_loaded

NUM_SCRAPES = 5
PAUSE_S = 1.0  # between two scrapes
_LOOK_S = 0.002
_CLIENT = """
import sys, urllib.request
for line in sys.stdin:
    print(len(urllib.request.urlopen(line.strip()).read()), flush=True)
"""


class OneIngress:
    """The `AllSenders` of a service with one ingress, without the call through Serve from this process to itself."""

    itself = ("ingress", "the ingress")

    async def reports(self) -> Answers[IngressReport]:
        """Return no reports: the collector adds the report of its own process."""
        return Answers(reports=[])

    async def later_counts(self, known: KnownCounts) -> Answers[LaterCounts]:
        """Return no counts: there is no other ingress."""
        return Answers(reports=[])


def metrics_figures(num_replicas: int, seed: int) -> dict[str, Any]:
    """Start the replicas, and measure this process as their ingress."""
    allow_many_files()
    with replica_processes(num_replicas, num_replicas) as (_, groups):
        addresses = [each for group in groups for each in group.values()]
        return asyncio.run(_measured(addresses[:num_replicas], seed))


async def _measured(addresses: list[Address], seed: int) -> dict[str, Any]:
    by_id = {f"replica-{number:04d}": each for number, each in enumerate(addresses)}
    limits = FailoverLimits(place_timeout_s=30.0, silence_s=ReplicasConfig().silence_timeout_s, step_s=60.0)
    registry = ReplicaRegistry(
        make_policy("least_loaded", random.Random(seed)), GroupChooser([]), block_size=16, clock=time.monotonic
    )
    requests = RequestMetrics(["demo"])
    fleet = Fleet(LocalTransport(by_id, "the ingress"), registry, limits, requests.model("demo"))
    registry.set_replicas(list(by_id))
    while any(each["state"] != "serving" for each in fleet.describe()):  # noqa: ASYNC110 - a fleet tells nobody
        await asyncio.sleep(0.05)
    collector = MetricsCollector([ServedModelConfig(name="demo")], requests, {"demo": fleet}, OneIngress())
    collector.loop.start(names_causes=False)
    await collector.expose()
    freeze_loaded()  # as an ingress does
    figures: dict[str, Any] = {"bytes": sum(map(len, await collector.expose()))}
    figures["exposition"] = await _scraped(collector.expose)
    figures["with_http"] = await _scraped_over_http(collector)
    figures |= await _memory(lambda: _new_like(collector, requests, fleet))
    tell(f"{len(by_id)} replicas: {figures}")
    collector.loop.stop()
    fleet.close()
    return figures


def _new_like(collector: MetricsCollector, requests: RequestMetrics, fleet: Fleet) -> MetricsCollector:
    new = MetricsCollector([ServedModelConfig(name="demo")], requests, {"demo": fleet}, OneIngress())
    new.loop = collector.loop
    return new


async def _scraped(scrape: Any) -> dict[str, float]:
    """Return the mean CPU, less the idle CPU, and the mean time of one scrape, and the longest stalls."""
    longest_s = longest_cpu_s = 0.0

    async def watch() -> None:
        nonlocal longest_s, longest_cpu_s
        while True:
            at, cpu_s = time.perf_counter(), time.thread_time()
            await asyncio.sleep(_LOOK_S)
            longest_s = max(longest_s, time.perf_counter() - at - _LOOK_S)
            longest_cpu_s = max(longest_cpu_s, time.thread_time() - cpu_s)

    watching = asyncio.create_task(watch())
    cpu_s = machine.own_cpu_s()
    await asyncio.sleep(3 * PAUSE_S)
    idle = (machine.own_cpu_s() - cpu_s) / (3 * PAUSE_S)
    longest_s = longest_cpu_s = total_cpu_s = total_s = 0.0
    for _ in range(NUM_SCRAPES):
        began, cpu_s = time.perf_counter(), machine.own_cpu_s()
        await scrape()
        seconds = time.perf_counter() - began
        total_cpu_s += machine.own_cpu_s() - cpu_s - idle * seconds
        total_s += seconds
        await asyncio.sleep(PAUSE_S)
    watching.cancel()
    return {
        "cpu_ms": round(total_cpu_s / NUM_SCRAPES * 1e3, 1),
        "time_ms": round(total_s / NUM_SCRAPES * 1e3, 1),
        "longest_stall_ms": round(longest_s * 1e3, 1),
        "longest_hold_cpu_ms": round(longest_cpu_s * 1e3, 1),
    }


async def _scraped_over_http(collector: MetricsCollector) -> dict[str, float]:
    """Return the figures of `_scraped` for an answer over HTTP to another process."""

    application = Starlette(routes=MetricsRoutes(collector.expose, {}).routes())
    server = uvicorn.Server(uvicorn.Config(application, port=0, log_level="error"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - a server tells nobody
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    pipe = subprocess.PIPE
    client = await asyncio.create_subprocess_exec(sys.executable, "-c", _CLIENT, stdin=pipe, stdout=pipe)
    assert client.stdin is not None
    assert client.stdout is not None
    stdin, stdout = client.stdin, client.stdout

    async def scrape() -> None:
        stdin.write(f"http://127.0.0.1:{port}/metrics\n".encode())
        assert int(await stdout.readline()) > 0

    try:
        await scrape()
        return await _scraped(scrape)
    finally:
        stdin.close()
        await client.wait()
        server.should_exit = True
        await serving


async def _memory(make: Any) -> dict[str, int]:
    """Return the kilobytes that a new collector holds after two scrapes, and the peak during the second scrape."""
    gc.collect()
    tracemalloc.start()
    collector = make()
    await collector.expose()
    tracemalloc.reset_peak()
    await collector.expose()
    await asyncio.sleep(PAUSE_S)  # the text is freed only in a later iteration of the event loop
    gc.collect()
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"kept_kb": round(kept / 1e3), "peak_kb": round(peak / 1e3)}
