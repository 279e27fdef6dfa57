"""One ingress with connections to many replicas: what it costs idle, and what a loss of many does to its streams."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from app.child_process import child_command, child_environment
from app.config import ReplicasConfig
from app.engine.request import Address, Request, SamplingParams
from app.fleet import FailoverLimits, Fleet, FrameReader, ReplicaRegistry, connect
from app.fleet.dispatch import GroupChooser, make_policy
from app.metrics import ModelMetrics
from benchmarks.harness import machine
from benchmarks.harness.command import BenchmarkError, tell
from benchmarks.harness.processes import resident_mib
from deployments.open_files import allow_many_files
from deployments.serve.process import freeze_loaded

NUM_PROCESSES = 10  # with a tenth of the replicas each; one of them is killed
IDLE_S = 10.0
STEP_MS = 2000.0
TOKENS = 25  # of each stream
BEGIN_S, KILL_S = 20.0, 35.0  # the streams begin within so long; when a process is killed
TOLD_AFTER_S = 2.0  # when Serve says that killed replicas are gone
_PROMPTS = 50  # different ones
_LOOK_S = 0.005


@dataclass(slots=True)
class Stream:
    """One request as its client sees it."""

    prompt: int
    tokens: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    error: str = ""


class LocalTransport:
    """`ReplicaTransport` to known addresses; it counts the bytes that come."""

    def __init__(self, addresses: dict[str, Address]) -> None:
        self.addresses = addresses
        self.num_bytes = 0

    async def wake(self) -> None:
        """All replicas are there."""

    async def connect(self, replica_id: str, reader: FrameReader, *, heartbeat_s: float) -> asyncio.Transport:
        received = reader.data_received

        def counted(data: bytes) -> None:
            self.num_bytes += len(data)
            received(data)

        setattr(reader, "data_received", counted)  # noqa: B010
        return await connect(self.addresses[replica_id], "the ingress", reader, heartbeat_s=heartbeat_s)


def sockets_figures(num_replicas: int, num_streams: int, seed: int) -> dict[str, Any]:
    """Start the replicas, and be their ingress."""
    allow_many_files()
    with replica_processes(num_replicas, num_streams) as (processes, addresses):
        return asyncio.run(_measured(processes, addresses, num_streams, seed))


@contextmanager
def replica_processes(
    num_replicas: int, num_streams: int
) -> Iterator[tuple[list[subprocess.Popen[str]], list[list[Address]]]]:
    """Processes with replicas, and the addresses of the replicas of each."""
    share, running = -(-num_replicas // NUM_PROCESSES), max(8, 2 * num_streams // num_replicas)
    command = child_command("benchmarks.service.thousand_replicas", "--number", str(share), "--step-ms", str(STEP_MS),
                            "--running", str(running))  # fmt: skip
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen(command, env=child_environment(), text=True, **pipes) for _ in range(NUM_PROCESSES)]
    try:
        lines = [each.stdout.readline() for each in processes if each.stdout is not None]
        if not all(lines):
            raise BenchmarkError("a process with replicas did not start")
        yield processes, [[Address._make(address) for address in json.loads(line)] for line in lines]
    finally:
        for each in processes:
            each.kill()
            each.communicate()


async def _measured(
    processes: Sequence[subprocess.Popen[str]], addresses: Sequence[Sequence[Address]], num_streams: int, seed: int
) -> dict[str, Any]:
    by_id = {f"replica-{at:02d}-{n:04d}": each for at, group in enumerate(addresses) for n, each in enumerate(group)}
    replicas = ReplicasConfig(num_replicas=1)
    limits = FailoverLimits(
        place_timeout_s=replicas.place_timeout_s, silence_s=replicas.silence_timeout_s, step_s=replicas.step_timeout_s
    )
    registry = ReplicaRegistry(
        make_policy("least_loaded", random.Random(seed)), GroupChooser([]), block_size=16, clock=time.monotonic
    )
    transport, memory_mib = LocalTransport(by_id), resident_mib(os.getpid())
    fleet = Fleet(transport, registry, limits, ModelMetrics(time.monotonic))
    began = time.perf_counter()
    registry.set_replicas(list(by_id))
    while any(each["state"] != "serving" for each in fleet.describe()):  # noqa: ASYNC110 - a fleet tells nobody
        await asyncio.sleep(0.05)
    figures: dict[str, Any] = {
        "connected_after_s": round(time.perf_counter() - began, 2),
        "kb_per_replica": round((resident_mib(os.getpid()) - memory_mib) * 2**20 / len(by_id) / 1e3, 1),
    }
    num_bytes, cpu_s = transport.num_bytes, machine.own_cpu_s()
    await asyncio.sleep(IDLE_S)
    freeze_loaded()  # as an ingress does
    figures["idle_cpu_of_a_core"] = round((machine.own_cpu_s() - cpu_s) / IDLE_S, 4)
    figures["idle_bytes_per_replica_s"] = round((transport.num_bytes - num_bytes) / len(by_id) / IDLE_S, 1)
    tell(f"{len(by_id)} replicas: {figures}")
    usual = await _streamed(fleet, num_streams)
    figures["all_stay"] = _figures_of(usual)
    tell(f"{num_streams} streams: {figures['all_stay']}")

    async def kill() -> None:
        await asyncio.sleep(KILL_S)
        processes[0].kill()
        await asyncio.sleep(TOLD_AFTER_S)
        registry.set_replicas([each for each in by_id if not each.startswith("replica-00-")])

    killing = asyncio.create_task(kill())
    lossy = await _streamed(fleet, num_streams)
    await killing
    figures["a_tenth_is_killed"] = _figures_of(lossy) | {"different": _num_different(usual.streams + lossy.streams)}
    tell(f"{num_streams} streams, a tenth is killed: {figures['a_tenth_is_killed']}")
    fleet.close()
    return figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Streams that have ended, and how the event loop did meanwhile."""

    streams: list[Stream]
    longest_stall_s: float
    cpu_s: float


async def _streamed(fleet: Fleet, num_streams: int) -> Played:
    """All streams to their ends."""
    longest, loop = 0.0, asyncio.get_running_loop()

    async def watch() -> None:
        nonlocal longest
        while True:
            before = loop.time()
            await asyncio.sleep(_LOOK_S)
            longest = max(longest, loop.time() - before - _LOOK_S)

    watching, cpu_s = asyncio.create_task(watch()), machine.own_cpu_s()
    streams = await asyncio.gather(*(_stream(fleet, number, num_streams) for number in range(num_streams)))
    watching.cancel()
    return Played(streams=streams, longest_stall_s=longest, cpu_s=machine.own_cpu_s() - cpu_s)


async def _stream(fleet: Fleet, number: int, num_streams: int) -> Stream:
    await asyncio.sleep(BEGIN_S * number / num_streams)
    stream = Stream(number % _PROMPTS)
    request = Request(
        request_id=f"{number}-{time.monotonic_ns()}",
        prompt_token_ids=tuple(range(5 + stream.prompt, 25 + stream.prompt)),
        sampling=SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True),
    )
    try:
        async for delta in fleet.generate(request):
            if delta.token_ids:
                stream.tokens.extend(delta.token_ids)
                stream.at.append(time.perf_counter())
    except Exception as error:
        stream.error = f"{type(error).__name__}: {error}"
    return stream


def _figures_of(played: Played) -> dict[str, Any]:
    streams = played.streams
    whole = [each for each in streams if len(each.tokens) == TOKENS and not each.error]
    pauses = np.array([max(np.diff(each.at)) for each in whole]) - STEP_MS / 1000
    num_tokens = sum(len(each.tokens) for each in streams)
    return {
        "whole": len(whole),
        "not_whole": len(streams) - len(whole),
        "errors": dict(Counter(each.error for each in streams if each.error).most_common(3)),
        "longest_pause_p50_s": round(float(np.median(pauses)), 3),
        "longest_pause_p99_s": round(float(np.percentile(pauses, 99)), 3),
        "longest_stall_ms": round(played.longest_stall_s * 1e3, 1),
        "cpu_us_per_token": round(played.cpu_s / max(1, num_tokens) * 1e6, 1),
    }


def _num_different(streams: Sequence[Stream]) -> int:
    """Streams whose tokens are others than those of most streams with the same prompt."""
    by_prompt: dict[int, Counter[tuple[int, ...]]] = {}
    for each in streams:
        by_prompt.setdefault(each.prompt, Counter())[tuple(each.tokens)] += not each.error
    return sum(sum(texts.values()) - max(texts.values()) for texts in by_prompt.values())
