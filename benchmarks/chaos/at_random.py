"""Row R14: kills processes of every kind, or stops them for some seconds, at random for several minutes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.chaos.stage import Size, Stage, under_traffic
from benchmarks.chaos.verdict import judged, outcomes
from benchmarks.harness.command import BenchmarkError, tell
from benchmarks.harness.service import got

# Ray's own processes (GCS, raylet), the driver and the launcher are left out: when one of them ends, the whole service
# ends and restarts (row R7). The launcher itself needs a supervisor that restarts it.
KINDS: dict[str, Callable[[Stage], list[int]]] = {
    "replica": Stage.replicas,
    "ingress": Stage.ingresses,
    "batches": lambda running: running.named("ray::ServeReplica:carousel:batches"),
    "controller": Stage.controllers,
    "HAProxy": lambda running: running.named("haproxy"),
    "actor of HAProxy": lambda running: running.named("ray::HAProxyManager"),
    "fallback proxy": lambda running: running.named("ray::ProxyActor"),
}
_QUIET_S = (2.0, 8.0)  # seconds between two strikes, even if the service has not recovered
_STOPPED_S = (1.0, 10.0)
_COMES_BACK_S = 180.0


@dataclass(frozen=True, slots=True)
class Strike:
    """A planned fault: one process of a kind is killed, or stopped for some seconds."""

    after_s: float  # seconds after the previous strike
    kind: str
    stopped_s: float | None  # None: the process is killed

    @property
    def how(self) -> str:
        return "kill -9" if self.stopped_s is None else f"SIGSTOP for {self.stopped_s:.1f} s"


def strikes(source: random.Random) -> Iterator[Strike]:
    """Yield random strikes without end."""
    while True:
        stopped_s = source.uniform(*_STOPPED_S) if source.random() < 0.5 else None
        yield Strike(source.uniform(*_QUIET_S), source.choice(list(KINDS)), stopped_s)


@dataclass(slots=True)
class _Havoc:
    """Makes strikes one after another. A process may still be stopped when the next strike begins."""

    running: Stage
    source: random.Random
    made: list[str] = field(default_factory=list)
    num_made: Counter[str] = field(default_factory=Counter)

    async def go_on(self, seconds: float) -> None:
        """Make strikes for `seconds`; return once all stopped processes have been resumed."""
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for strike in strikes(self.source):
                await asyncio.sleep(min(strike.after_s, max(0.0, began_s + seconds - time.perf_counter())))
                at_s = time.perf_counter() - began_s
                if at_s >= seconds:
                    return
                pids = await asyncio.to_thread(KINDS[strike.kind], self.running)
                if pids:
                    tasks.create_task(self._make(strike, self.source.choice(pids), at_s))

    async def _make(self, strike: Strike, pid: int, at_s: float) -> None:
        with suppress(ProcessLookupError):  # the process has ended by itself or by a later strike
            os.kill(pid, signal.SIGKILL if strike.stopped_s is None else signal.SIGSTOP)
            self.made.append(f"{at_s:.1f} s: {strike.how}: {strike.kind} {pid}")
            self.num_made[f"{strike.how.split()[0]} {strike.kind}"] += 1
            tell(f"R14: {self.made[-1]}")
            if strike.stopped_s is not None:
                try:
                    await asyncio.sleep(strike.stopped_s)
                finally:
                    os.kill(pid, signal.SIGCONT)


async def strike_at_random(size: Size) -> list[dict[str, Any]]:
    """R14: kill -9 and SIGSTOP of every kind of process at random for `size.minutes`."""
    with TemporaryDirectory() as folder:
        async with under_traffic(size, batches={"path": folder}) as (running, traffic):
            havoc = _Havoc(running, size.source("R14"))
            before = numbers(running)
            async with traffic.flowing():
                await havoc.go_on(60 * size.minutes)
                ended_s = time.perf_counter()
                missing = await _missing_at_last(running, before)
                whole_after_s = time.perf_counter() - ended_s
            answers = traffic.answers
            traffic.answers = []
            again = [] if missing else await traffic.once()
            found = {"row": "R14", "fault": f"any process killed or stopped at random for {size.minutes:g} minutes"}
            return [
                {**found, "runs": len(havoc.made), **judged(answers, traffic.reference)}
                | {"outcomes": outcomes(answers, traffic.reference), "after": outcomes(again, traffic.reference)}
                | {"strikes": havoc.made, "struck": dict(sorted(havoc.num_made.items()))}
                | {"missing": missing, "whole_after_s": None if missing else round(whole_after_s, 1)}
                | {"processes": {"before": before, "after": numbers(running)}}
                | {"left_over": {} if missing else await running.left_over()}
            ]


def numbers(running: Stage) -> dict[str, int]:
    """Return the number of processes of each kind."""
    return {kind: len(found(running)) for kind, found in KINDS.items()}


async def _missing_at_last(running: Stage, before: Mapping[str, int]) -> list[str]:
    """Wait for the service to recover; return the parts that do not. Returns early when nothing is missing."""
    deadline = time.perf_counter() + _COMES_BACK_S
    while time.perf_counter() < deadline:
        missing = await _missing(running, before)
        if not missing:
            break
        await asyncio.sleep(0.5)  # no event announces the recovery
    return missing


async def _missing(running: Stage, before: Mapping[str, int]) -> list[str]:
    now = await asyncio.to_thread(numbers, running)
    fewer = [kind for kind, number in before.items() if now[kind] < number]
    try:
        await running.is_whole()
        await asyncio.to_thread(got, running.target, "/v1/batches")
    except (BenchmarkError, OSError, HTTPException) as error:
        return [*fewer, str(error)]
    return fewer
