"""Rows R1 to R5: replicas that are killed or stopped while streams run."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from typing import Any

from benchmarks.chaos.mix import mixed
from benchmarks.chaos.stage import Stage, application, stage
from benchmarks.chaos.traffic import Traffic, with_reference
from benchmarks.chaos.verdict import in_flight, judged, pauses_ms, spread
from benchmarks.progress import tell

LENGTHS = (30, 120)  # tokens of an answer
STEP_MS = 30.0
_QUIET_S = (0.5, 2.5)  # between the moment when all are there again and the next fault
_AFTERMATH_S = 10.0


async def kill_one_of_three(runs: int, streams: int) -> list[dict[str, Any]]:
    """R1: kill -9 one of 3 replicas at random moments, each time when all three are there again."""
    with stage(application(step_ms=STEP_MS), step_s=STEP_MS / 1000) as running:
        traffic = await with_reference(running.target, mixed(streams, max_tokens=LENGTHS))
        return [await _killing(running, traffic, runs, "R1", "kill -9 one of 3 replicas", num_victims=1)]


async def _killing(
    running: Stage, traffic: Traffic, runs: int, row: str, fault: str, *, num_victims: int
) -> dict[str, Any]:
    source = random.Random(row)
    struck_s, recoveries_s = [], []
    async with traffic.flowing():
        for run in range(runs):
            await asyncio.sleep(source.uniform(*_QUIET_S))
            victims = source.sample(running.replicas(), num_victims)
            struck_s.append(time.perf_counter())
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            recoveries_s.append(await running.is_whole() - struck_s[-1])
            tell(f"{row}: run {run + 1} of {runs}: all there again after {recoveries_s[-1]:.1f} s")
    hit = [in_flight(traffic.answers, at_s) for at_s in struck_s]
    pauses = [
        pause
        for at_s, streams in zip(struck_s, hit, strict=True)
        for pause in pauses_ms(streams, at_s, step_s=running.step_s, within_s=_AFTERMATH_S)
    ]
    return (
        {"row": row, "fault": fault, "runs": runs, "in_flight_at_faults": sum(map(len, hit))}
        | judged(traffic.answers, traffic.reference)
        | spread("added_pause_ms", pauses)
        | spread("recovery_s", recoveries_s)
        | {"left_over": await running.left_over()}
    )
