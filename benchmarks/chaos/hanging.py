"""Row R4: a replica that stops without dying, and goes on later."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

from benchmarks.chaos.killing import LENGTHS, STEP_MS, pauses_after
from benchmarks.chaos.mix import mixed
from benchmarks.chaos.size import Size
from benchmarks.chaos.stage import Stage, application, stage
from benchmarks.chaos.traffic import Traffic, with_reference
from benchmarks.chaos.verdict import judged, spread
from benchmarks.harness.command import tell

STOPPED_S = 8.0
_QUIET_S = (1.0, 2.0)
_SILENCES_S = (3.0, 0.8)  # the default, and what notices within a second


async def stop_one_of_three(size: Size) -> list[dict[str, Any]]:
    """R4: SIGSTOP one of 3 replicas, SIGCONT after eight seconds; with two settings of the patience."""
    rows = []
    for silence_s in _SILENCES_S:
        config = application(step_ms=STEP_MS, silence_timeout_s=silence_s)
        with stage(config, step_s=STEP_MS / 1000) as running:
            traffic = await with_reference(running.target, mixed(size.streams, max_tokens=LENGTHS))
            rows.append(await _stopping(running, traffic, size, silence_s))
    return rows


async def _stopping(running: Stage, traffic: Traffic, size: Size, silence_s: float) -> dict[str, Any]:
    source = size.source("R4")
    struck_s, back_s = [], []
    async with traffic.flowing():
        for run in range(size.runs):
            await asyncio.sleep(source.uniform(*_QUIET_S))
            victim = source.choice(running.replicas())
            struck_s.append(time.perf_counter())
            os.kill(victim, signal.SIGSTOP)
            try:
                await asyncio.sleep(STOPPED_S)
            finally:
                os.kill(victim, signal.SIGCONT)
            continued_s = time.perf_counter()
            back_s.append(await running.is_whole() - continued_s)
            tell(f"R4: silence_timeout_s {silence_s:g}: run {run + 1} of {size.runs}")
    return (
        {"row": "R4", "fault": f"SIGSTOP one of 3 replicas for {STOPPED_S:g} s, silence_timeout_s {silence_s:g}"}
        | {"runs": size.runs}
        | judged(traffic.answers, traffic.reference)
        | pauses_after(running, traffic, struck_s)
        | spread("answers_after_sigcont_s", back_s)
        | {"left_over": await running.left_over()}
    )
