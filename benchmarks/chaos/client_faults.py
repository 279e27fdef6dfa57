"""Rows C1 and C7: clients that disconnect, and clients that are killed."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import takewhile
from typing import Any

from benchmarks.chaos.faults import kill
from benchmarks.chaos.stage import Size, Stage, application, stage
from benchmarks.chaos.traffic import MODEL_NAME, Asked, alike, moment
from benchmarks.chaos.verdict import spread
from benchmarks.harness.answer import Answer, follow
from benchmarks.harness.command import BenchmarkError, tell
from benchmarks.harness.processes import clients_of, cpu_between

_TIMEOUT_S = 30.0
_KILLED_WITHIN_S = 6.0
_PATIENCE_S = 2.0  # seconds until a request that still runs counts as left over
_WATCHED_S = 2.0
_BUSY = 0.1  # share of a core; a proxy without clients that uses more counts as busy

Row = dict[str, Any]


async def disconnect_at_each_phase(size: Size) -> list[Row]:
    """C1: one client closes its connection. Measures the time until the replica holds nothing for this client.

    The time comes from polls of /metrics, so it includes the duration of a poll.
    """
    plain = application(num_replicas=1, step_ms=20, end_probability=0, max_running=1)
    slow = application(num_replicas=1, step_ms=400, end_probability=0)
    rows = []
    with stage(plain) as running:
        for phase, num_tokens in (("token 1", 1), ("token 20", 20)):
            rows.append(await _leaving(running, size.runs, phase, _has_tokens(num_tokens)))
        rows.append(await _leaving_the_queue(running, size.runs))
    with stage(slow) as running:
        rows.append(await _leaving(running, size.runs, "prefill (a step of 400 ms)", _has_sent_for(0.1)))
    return rows


async def kill_clients(size: Size) -> list[Row]:
    """C7: kill -9 clients of every kind at random moments. Measures the time until the service computes nothing for
    these clients, and then the connections and the CPU time of HAProxy.
    """
    plain = application(num_replicas=1, step_ms=20, end_probability=0, max_running=size.streams)
    with stage(plain) as running:
        source = size.source("C7")
        freed_ms: list[float] = []
        found: Counter[str] = Counter()
        for run in range(size.runs):
            freed, after = await asyncio.to_thread(_kill_all, running, size.streams, source)
            freed_ms.append(freed)
            found.update(after)
            tell(f"C7: run {run + 1} of {size.runs}: free after {freed:.0f} ms; {after}")
        row = {"row": "C7", "fault": f"kill -9 {size.streams} clients", "runs": size.runs}
        return [row | spread("freed_after_ms", freed_ms) | {"left_over": dict(found)}]


def _kill_all(running: Stage, number: int, source: random.Random) -> tuple[float, dict[str, int]]:
    """Start clients and kill each one at a random moment. Return the milliseconds until the service was free, and
    counts of the left-over requests, connections and busy proxies.
    """
    with _doomed(running, number) as pids:
        started_s = time.perf_counter()
        for at_s, pid in sorted((source.uniform(0, _KILLED_WITHIN_S), pid) for pid in pids):
            time.sleep(max(0.0, started_s + at_s - time.perf_counter()))
            kill([pid])
    killed_s = time.perf_counter()
    while any((held := running.holdings().held).values()) and time.perf_counter() - killed_s < _PATIENCE_S:
        continue
    freed_ms = (time.perf_counter() - killed_s) * 1000
    before = running.processes()
    time.sleep(_WATCHED_S)
    spent_s = cpu_between(before, running.processes()).get("haproxy", 0.0)
    num_connections, num_half_closed = clients_of(running.named("haproxy"), running.target.port)
    return freed_ms, {
        "requests": held["in_flight"],
        "connections": num_connections,
        "half_closed": num_half_closed,
        "busy_proxies": int(spent_s > _BUSY * _WATCHED_S),
    }


@contextmanager
def _doomed(running: Stage, number: int) -> Iterator[list[int]]:
    """Start `number` clients and yield their pids. See `benchmarks.chaos.doomed`."""
    target = running.target
    command = [sys.executable, "-m", "benchmarks.chaos.doomed", target.host, str(target.port), MODEL_NAME, str(number)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None, "it is a pipe"
        pids = [int(line) for line in takewhile(lambda line: line != "all\n", parent.stdout)]
        try:
            if len(pids) != number:
                raise BenchmarkError(f"{len(pids)} of {number} clients have started")
            yield pids
        finally:
            kill(pids)


def _has_tokens(number: int) -> Callable[[Answer], bool]:
    return lambda answer: len(answer.events_s) >= number


def _has_sent_for(seconds: float) -> Callable[[Answer], bool]:
    return lambda answer: time.perf_counter() - answer.begun_s >= seconds


async def _leaving(running: Stage, runs: int, phase: str, is_now: Callable[[Answer], bool]) -> Row:
    freed_ms = []
    [asked] = alike(1, num_tokens=400)
    for _ in range(runs):
        client, stream = _client(running, asked)
        await moment(partial(is_now, stream))
        freed_ms.append(await _freed_after_ms(running, client, num_left=0))
    return await _c1(running, phase, freed_ms)


async def _leaving_the_queue(running: Stage, runs: int) -> Row:
    freed_ms = []
    first, second = alike(2, num_tokens=400)
    for _ in range(runs):
        (staying, served), (leaving, _) = _client(running, first), _client(running, second)
        await moment(partial(_has_tokens(1), served))
        while (await _held(running))[1] < 1:  # until the second request is queued
            continue
        freed_ms.append(await _freed_after_ms(running, leaving, num_left=1))
        await _freed_after_ms(running, staying, num_left=0)
    return await _c1(running, "queued", freed_ms)


def _client(running: Stage, asked: Asked) -> tuple[asyncio.Task[None], Answer]:
    answer, request = Answer(time.perf_counter(), name=asked.name), running.target.request("completions", asked.body)
    return asyncio.create_task(follow(answer, running.target, request, timeout_s=_TIMEOUT_S)), answer


async def _held(running: Stage) -> tuple[int, int]:
    held = (await asyncio.to_thread(running.holdings)).held
    return held["running"] + held["waiting"], held["waiting"]


async def _freed_after_ms(running: Stage, client: asyncio.Task[None], *, num_left: int) -> float:
    client.cancel()
    with suppress(asyncio.CancelledError):
        await client
    closed_s = time.perf_counter()
    while (await _held(running))[0] > num_left:
        if time.perf_counter() - closed_s > _TIMEOUT_S:
            break
    return (time.perf_counter() - closed_s) * 1000


async def _c1(running: Stage, phase: str, freed_ms: Sequence[float]) -> Row:
    tell(f"C1: {phase}: {len(freed_ms)} runs")
    return (
        {"row": "C1", "fault": f"the client closes its connection: {phase}", "runs": len(freed_ms)}
        | spread("freed_after_ms", freed_ms)
        | {"left_over": await running.left_over()}
    )
