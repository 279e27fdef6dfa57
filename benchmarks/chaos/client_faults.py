"""Rows C1, C2, C4 and C5: clients that go away, read slowly or have no time."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from benchmarks.chaos.stage import Size, Stage, application, stage, under_traffic
from benchmarks.chaos.stream import Stream, follow, moment
from benchmarks.chaos.traffic import Asked, Traffic, alike
from benchmarks.chaos.verdict import judged, spread
from benchmarks.harness.command import tell
from benchmarks.harness.figures import percentile

_TIMEOUT_S = 30.0
_ABANDONED_AFTER_S = 0.5

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


def _has_tokens(number: int) -> Callable[[Stream], bool]:
    return lambda stream: len(stream.arrivals_s) >= number


def _has_sent_for(seconds: float) -> Callable[[Stream], bool]:
    return lambda stream: time.perf_counter() - stream.begun_s >= seconds


async def _leaving(running: Stage, runs: int, phase: str, is_now: Callable[[Stream], bool]) -> Row:
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


def _client(running: Stage, asked: Asked) -> tuple[asyncio.Task[None], Stream]:
    stream = Stream(asked.name, begun_s=time.perf_counter())
    return asyncio.create_task(follow(stream, running.target, asked.body, timeout_s=_TIMEOUT_S)), stream


async def _held(running: Stage) -> tuple[int, int]:
    holdings = await asyncio.to_thread(running.holdings)
    return holdings.num_running + holdings.num_waiting, holdings.num_waiting


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


async def cancel_a_fifth(size: Size) -> list[Row]:
    """C2: every fifth client gives up after half a second; what the others get, against a run in which none does."""
    async with under_traffic(size) as (running, traffic):
        seconds = 2.0 * size.runs
        staying = [asked for place, asked in enumerate(traffic.requests) if place % 5]
        leaving = [asked for place, asked in enumerate(traffic.requests) if not place % 5]
        goodputs = []
        for is_cancelled in (False, True):
            others = replace(traffic, requests=staying, answers=[])
            fifth = replace(traffic, requests=leaving, answers=[])
            if is_cancelled:
                fifth.timeout_s = _ABANDONED_AFTER_S
            async with others.flowing(), fifth.flowing():
                await asyncio.sleep(seconds)
                tokens = sum(each.num_tokens or 0 for each in others.answers)
            goodputs.append(tokens / seconds)
        return [
            {"row": "C2", "fault": "every fifth client gives up after 0.5 s", "seconds": seconds}
            | judged(others.answers, others.reference)
            | {"given_up": sum(each.failure is not None for each in fifth.answers)}
            | {"tokens_per_s_of_others": round(goodputs[1], 1), "without": round(goodputs[0], 1)}
            | {"ratio": round(goodputs[1] / goodputs[0], 3), "left_over": await running.left_over()}
        ]


async def read_slowly(size: Size) -> list[Row]:
    """C4: one client reads a byte a second; times between tokens of the others, against a run in which none does."""
    async with under_traffic(replace(size, streams=size.streams - 1)) as (running, traffic):
        [asked] = alike(1, num_tokens=400)
        gaps_ms = []
        for is_slow in (False, True):
            others = replace(traffic, answers=[])
            reader = asyncio.create_task(_read_a_byte_a_second(running, asked)) if is_slow else None
            async with others.flowing():
                await asyncio.sleep(2.0 * size.runs)
            if reader is not None:
                reader.cancel()
            gaps_ms.append(percentile([gap * 1000 for each in others.answers for gap in _gaps_s(each)], 99) or 0.0)
        return [
            {"row": "C4", "fault": "one client reads a byte a second", "seconds": 2.0 * size.runs}
            | judged(others.answers, others.reference)
            | {"itl_p99_ms_of_others": round(gaps_ms[1], 1), "without": round(gaps_ms[0], 1)}
            | {"left_over": await running.left_over()}
        ]


def _gaps_s(stream: Stream) -> list[float]:
    return [after - before for before, after in pairwise(stream.arrivals_s)]


async def _read_a_byte_a_second(running: Stage, asked: Asked) -> None:
    target = running.target
    reader, writer = await asyncio.open_connection(target.host, target.port, limit=1)
    try:
        writer.write(target.request("completions", json.dumps(dict(asked.body)).encode()))
        while await reader.read(1):  # noqa: ASYNC110
            await asyncio.sleep(1.0)
    finally:
        writer.close()


async def miss_deadlines(size: Size) -> list[Row]:
    """C5: deadlines that pass while requests run or wait: no answer comes late, no expired request takes a step."""
    config = application(num_replicas=1, end_probability=0, max_running=max(1, size.streams // 4))
    source = size.source("C5")
    with stage(config) as running:
        requests = [
            replace(asked, body={**asked.body, "deadline_s": round(source.uniform(0.3, 6.0), 2)})
            for asked in alike(size.streams, num_tokens=100)
        ]
        traffic = Traffic(running.target, requests, {})
        for _ in range(size.runs):
            await traffic.once()
        deadlines = {asked.name: asked.body["deadline_s"] for asked in requests}
        late = [
            ((each.ended_s or 0.0) - each.begun_s - deadlines[each.name], each.is_complete) for each in traffic.answers
        ]  # seconds after the deadline
        return [
            {"row": "C5", "fault": "deadlines of 0.3 to 6 s, four requests for each slot", "runs": size.runs}
            | {"asked": len(late), "completed": sum(is_complete for _, is_complete in late)}
            | {"ends": dict(Counter(each.outcome for each in traffic.answers))}
            | {"late_answers": sum(by_s > 0.0 and is_complete for by_s, is_complete in late)}
            | {"malformed": sum(not each.is_well_formed for each in traffic.answers)}
            | spread("told_after_deadline_ms", [by_s * 1000 for by_s, is_complete in late if not is_complete])
            | {"left_over": await running.left_over()}
        ]
