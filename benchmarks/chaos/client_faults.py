"""Row C1: clients that go away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from benchmarks.chaos.stage import Size, Stage, application, stage
from benchmarks.chaos.traffic import Asked, alike, moment
from benchmarks.chaos.verdict import spread
from benchmarks.harness.answer import Answer, follow
from benchmarks.harness.command import tell

_TIMEOUT_S = 30.0

Row = dict[str, Any]


async def disconnect_at_each_phase(size: Size) -> list[Row]:
    """C1: one client closes its connection; how long until the replica holds nothing of it.

    Seen through /metrics, asked again and again: what a question takes is in the figures.
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
        while (await _held(running))[1] < 1:  # the second waits
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
