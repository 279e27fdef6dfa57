"""Rows R6 and R7: what is around the replicas dies: an ingress, Serve's controller, Ray's head."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from benchmarks.chaos.replica_kills import LENGTHS, STEP_MS, pauses_after
from benchmarks.chaos.stage import Size, Stage, application, stage
from benchmarks.chaos.stream import moment
from benchmarks.chaos.traffic import mixed, with_reference
from benchmarks.chaos.verdict import in_flight, judged, spread
from benchmarks.harness.command import tell

_AFTER_S = 8.0  # of traffic once the process is there again
_WITHOUT_HEAD_S = 120.0  # that the service is watched for: Ray's processes give up after one minute


async def kill_ingress(size: Size) -> list[dict[str, Any]]:
    """R6: the only ingress is killed: its clients lose their connections, and later ones wait for a new one."""
    return [await _killing_what("R6", "kill -9 the only ingress", size, Stage.ingresses)]


async def kill_controller(size: Size) -> list[dict[str, Any]]:
    """R7: Serve's controller is killed, which requests need only when replicas come and go; then Ray's head (GCS)."""
    return [await _killing_what("R7", "kill -9 Serve's controller", size, Stage.controllers), await _kill_head(size)]


async def _killing_what(row: str, fault: str, size: Size, processes: Callable[[Stage], list[int]]) -> dict[str, Any]:
    struck_s, recoveries_s = [], []
    with stage(application(step_ms=STEP_MS), step_s=STEP_MS / 1000) as running:
        traffic = await with_reference(running.target, mixed(size.streams, max_tokens=LENGTHS))
        async with traffic.flowing():
            for run in range(size.runs):
                await asyncio.sleep(1.0)
                [victim] = processes(running)
                struck_s.append(time.perf_counter())
                os.kill(victim, signal.SIGKILL)
                recoveries_s.append(await _until_another(running, processes, victim) - struck_s[-1])
                await asyncio.sleep(_AFTER_S)
                tell(f"{row}: run {run + 1} of {size.runs}: there again after {recoveries_s[-1]:.1f} s")
        return (
            {"row": row, "fault": fault, "runs": size.runs}
            | judged(traffic.answers, traffic.reference)
            | pauses_after(running, traffic, struck_s)
            | spread("recovery_s", recoveries_s)
            | {"left_over": await running.left_over()}
        )


async def _kill_head(size: Size) -> dict[str, Any]:
    """Once: a head that has kept its state in memory only cannot come back."""
    with stage(application(step_ms=STEP_MS), step_s=STEP_MS / 1000) as running:
        traffic = await with_reference(running.target, mixed(size.streams, max_tokens=LENGTHS))
        async with traffic.flowing():
            await asyncio.sleep(1.0)
            [head] = running.named("gcs_server")
            struck_s = time.perf_counter()
            os.kill(head, signal.SIGKILL)
            ended_s = await _end_of(running, struck_s + _WITHOUT_HEAD_S)
        under_way = in_flight(traffic.answers, struck_s)
        served = [each.ended_s for each in traffic.answers if each.is_complete and each.ended_s is not None]
        return (
            {"row": "R7", "fault": "kill -9 Ray's GCS, which has no Redis behind it", "runs": 1}
            | {"in_flight_at_fault": len(under_way), "of_them_completed": sum(each.is_complete for each in under_way)}
            | judged([each for each in traffic.answers if each.begun_s < max(served)], traffic.reference)
            | {"last_answer_after_s": round(max(served) - struck_s, 1)}
            | {"service_ended_after_s": None if ended_s is None else round(ended_s - struck_s, 1)}
        )


async def _end_of(running: Stage, deadline: float) -> float | None:
    """When the service had ended by itself; None when it has not at the deadline."""
    while time.perf_counter() < deadline:
        if set(running.running.processes()) <= {running.running.pid}:
            return time.perf_counter()
        await asyncio.sleep(0.2)  # no event announces it
    return None


async def _until_another(running: Stage, processes: Callable[[Stage], list[int]], victim: int) -> float:
    """Until there is another process in the victim's place and clients are answered."""
    await moment(lambda: bool(set(processes(running)) - {victim}), look_s=0.05)
    return await running.is_whole()
