"""One ingress of `benchmarks.service.thousand`: its fleet, its registry, and the streams of its clients.

    python -m benchmarks.service.thousand_ingress --name 7 --streams 625 --begin-s 20 < addresses.json

The process reads the addresses of the replicas as a line of JSON, connects to them, and prints the seconds that this
took. The line `play` begins its streams, and their figures are printed when all have ended. The line `count` prints the
number of its requests, and the number that the replicas report. The end of standard input ends the process.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvloop

from app.config import ReplicasConfig
from app.engine.request import Address, Request, SamplingParams
from app.fleet import FailoverLimits, Fleet, FrameReader, ReplicaRegistry, connect
from app.fleet.dispatch import GroupChooser, make_policy
from app.metrics import ModelMetrics
from benchmarks.harness import machine
from benchmarks.harness.command import command_parser, positive
from deployments.open_files import allow_many_files
from deployments.serve.process import collect_in_pieces, freeze_loaded

STEP_MS = 2000.0  # step of a replica
TOKENS = 15  # tokens of each stream
DRAIN_S = 8.0  # limit for a leaving replica; its last requests resume on other replicas after three quarters of it
_PROMPTS = 50  # number of different prompts
_LOOK_S = 0.005


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("service.thousand_ingress", __doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--streams", type=positive, required=True, metavar="N")
    parser.add_argument("--begin-s", type=float, default=20.0, metavar="S", help="time in which the streams begin")
    given = parser.parse_args(arguments)
    allow_many_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(given.name, given.streams, given.begin_s))
    return 0


async def _serve(name: str, num_streams: int, begin_s: float) -> None:
    addresses = {each: Address._make(address) for each, address in json.loads(await _line()).items()}
    ingress = Ingress(addresses, name=name, seed=int(name))
    print(json.dumps({"connected_after_s": await ingress.connect()}), flush=True)
    freeze_loaded()
    collect_in_pieces()
    playing: asyncio.Task[Played] | None = None
    while line := await _line():
        if line == "play":
            playing = asyncio.create_task(ingress.play(num_streams, begin_s))
            playing.add_done_callback(lambda played: print(json.dumps(figures_of([played.result()])), flush=True))
        elif line == "count":
            print(json.dumps({"own": ingress.fleet.num_in_flight, "reported": ingress.num_reported}), flush=True)


async def _line() -> str:
    line: str = await asyncio.to_thread(sys.stdin.readline)
    return line.strip()


@dataclass(slots=True)
class Stream:
    """One request as its client sees it."""

    prompt: int
    tokens: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Ended streams, and the longest stall of the event loop and the CPU time during the streams."""

    streams: list[Stream]
    longest_stall_s: float
    cpu_s: float


class LocalTransport:
    """A `ReplicaTransport` to known addresses that counts received bytes."""

    def __init__(self, addresses: Mapping[str, Address], name: str) -> None:
        self.addresses = addresses
        self.num_bytes = 0
        self._name = name

    async def wake(self) -> None:
        """Do nothing: all replicas run already."""

    async def connect(self, replica_id: str, reader: FrameReader, *, heartbeat_s: float) -> asyncio.Transport:
        received = reader.data_received

        def counted(data: bytes) -> None:
            self.num_bytes += len(data)
            received(data)

        setattr(reader, "data_received", counted)  # noqa: B010
        return await connect(self.addresses[replica_id], self._name, reader, heartbeat_s=heartbeat_s)


class Ingress:
    """The fleet of an ingress, over replicas at known addresses."""

    def __init__(self, addresses: Mapping[str, Address], *, name: str, seed: int) -> None:
        replicas = ReplicasConfig(num_replicas=1)
        limits = FailoverLimits(
            place_timeout_s=replicas.place_timeout_s, silence_s=replicas.silence_timeout_s,
            step_s=replicas.step_timeout_s, drain_s=DRAIN_S,
        )  # fmt: skip
        self.registry = ReplicaRegistry(
            make_policy("least_loaded", random.Random(seed)), GroupChooser([]), block_size=16, clock=time.monotonic
        )
        self.transport = LocalTransport(addresses, name)
        self.moved: Counter[str] = Counter()  # requests that resumed on another replica, by reason
        metrics = ModelMetrics(time.monotonic)
        metrics.resumed = self._count_moved  # type: ignore[method-assign]
        self.fleet = Fleet(self.transport, self.registry, limits, metrics)

    def _count_moved(self, reason: str) -> None:
        self.moved[reason] += 1

    async def connect(self, replica_ids: Iterable[str] | None = None) -> float:
        """Connect to these replicas, or to all replicas if None. Return the seconds until all of them serve."""
        began = time.perf_counter()
        self.registry.set_replicas(list(self.transport.addresses if replica_ids is None else replica_ids))
        while any(each["state"] != "serving" for each in self.fleet.describe()):  # noqa: ASYNC110 - a fleet tells nobody
            await asyncio.sleep(0.1)
        return round(time.perf_counter() - began, 2)

    @property
    def num_reported(self) -> int:
        """The requests of all ingresses, according to the last reports of the replicas."""
        return sum(each.num_requests for each in self.registry.reports.values())

    async def play(self, num_streams: int, begin_s: float) -> Played:
        """Run all streams, begun evenly over `begin_s`, to their ends."""
        longest, loop = 0.0, asyncio.get_running_loop()

        async def watch() -> None:
            nonlocal longest
            while True:
                before = loop.time()
                await asyncio.sleep(_LOOK_S)
                longest = max(longest, loop.time() - before - _LOOK_S)

        watching, cpu_s = asyncio.create_task(watch()), machine.own_cpu_s()
        began, streams = loop.time(), []
        for number in range(num_streams):
            early_s = began + begin_s * number / num_streams - loop.time()
            if early_s > 0:
                await asyncio.sleep(early_s)
            streams.append(loop.create_task(self._stream(number)))
        ended = await asyncio.gather(*streams)
        watching.cancel()
        return Played(streams=ended, longest_stall_s=longest, cpu_s=machine.own_cpu_s() - cpu_s)

    async def _stream(self, number: int) -> Stream:
        stream = Stream(number % _PROMPTS)
        request = Request(
            request_id=f"{os.getpid()}-{number}-{time.monotonic_ns()}",
            prompt_token_ids=tuple(range(5 + stream.prompt, 25 + stream.prompt)),
            sampling=SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True),
        )
        try:
            async for delta in self.fleet.generate(request):
                if delta.token_ids:
                    stream.tokens.extend(delta.token_ids)
                    stream.at.append(time.perf_counter())
        except Exception as error:
            stream.error = f"{type(error).__name__}: {error}"
        return stream


def figures_of(played: Sequence[Played]) -> dict[str, Any]:
    """Return the figures of all streams of these ingresses, and the longest stall of any ingress."""
    streams = [stream for each in played for stream in each.streams]
    whole = [each for each in streams if len(each.tokens) == TOKENS and not each.error]
    pauses = np.array([max(np.diff(each.at)) for each in whole]) - STEP_MS / 1000
    num_tokens = sum(len(each.tokens) for each in streams)
    return {
        "whole": len(whole),
        "not_whole": len(streams) - len(whole),
        "different": _num_different(streams),
        "errors": dict(Counter(each.error for each in streams if each.error).most_common(3)),
        "longest_pause_p50_s": round(float(np.median(pauses)), 3),
        "longest_pause_p99_s": round(float(np.percentile(pauses, 99)), 3),
        "longest_stall_ms": round(max(each.longest_stall_s for each in played) * 1e3, 1),
        "cpu_us_per_token": round(sum(each.cpu_s for each in played) / max(1, num_tokens) * 1e6, 1),
    }


def _num_different(streams: Sequence[Stream]) -> int:
    """Return the number of streams whose tokens differ from those of most streams with the same prompt."""
    by_prompt: dict[int, Counter[tuple[int, ...]]] = {}
    for each in streams:
        by_prompt.setdefault(each.prompt, Counter())[tuple(each.tokens)] += not each.error
    return sum(sum(texts.values()) - max(texts.values()) for texts in by_prompt.values())


if __name__ == "__main__":
    sys.exit(main())
