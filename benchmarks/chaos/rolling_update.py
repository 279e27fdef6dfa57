"""Row R13: the service is changed by its operator while streams run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.chaos.replica_kills import LENGTHS, STEP_MS, pauses_after
from benchmarks.chaos.stage import RECOVERY_TIMEOUT_S, Size, Stage, application, stage
from benchmarks.chaos.traffic import MODEL_NAME, Traffic, mixed, with_reference
from benchmarks.chaos.verdict import judged
from benchmarks.harness.command import BenchmarkError, tell

_BEFORE_S = 2.0
_AFTER_S = 3.0
_LOOK_S = 0.2


async def change_under_load(size: Size) -> list[dict[str, Any]]:
    """R13: `serve deploy` of fewer replicas, then of other settings, which restarts all processes."""
    before = application(step_ms=STEP_MS)
    after = application(step_ms=STEP_MS, place_timeout_s=31)
    with stage(before, step_s=STEP_MS / 1000, with_dashboard=True) as running:
        traffic = await with_reference(running.target, mixed(size.streams, max_tokens=LENGTHS))

        def scale_down() -> None:
            running.running.deploy(before, num_replicas={f"replica-{MODEL_NAME}": 2})

        def has_scaled(old: set[int], now: set[int]) -> bool:
            return len(now) == 3  # two replicas and the ingress

        def has_rolled(old: set[int], now: set[int]) -> bool:
            return len(now) == 4 and not old & now

        return [
            await _changing(running, traffic, "scale-down from 3 replicas to 2", scale_down, has_scaled),
            await _changing(
                running, traffic, "rolling update of replicas and ingress to other settings, 2 replicas to 3",
                lambda: running.running.deploy(after), has_rolled,
            ),
        ]  # fmt: skip


async def _changing(
    running: Stage,
    traffic: Traffic,
    fault: str,
    change: Callable[[], None],
    is_done: Callable[[set[int], set[int]], bool],
) -> dict[str, Any]:
    fresh = replace(traffic, answers=[])
    async with fresh.flowing():
        await asyncio.sleep(_BEFORE_S)
        old = _processes(running)
        began_s = time.perf_counter()
        await asyncio.to_thread(change)
        while not is_done(old, _processes(running)):
            if time.perf_counter() - began_s > RECOVERY_TIMEOUT_S:
                raise BenchmarkError(f"{fault}: not done within {RECOVERY_TIMEOUT_S:.0f} s")
            await asyncio.sleep(_LOOK_S)
        seconds = time.perf_counter() - began_s
        tell(f"R13: {fault}: {seconds:.1f} s")
        await asyncio.sleep(_AFTER_S)
    return (
        {"row": "R13", "fault": fault, "took_s": round(seconds, 1)}
        | judged(fresh.answers, fresh.reference)
        | {"failed_requests": sum(not each.is_complete for each in fresh.answers)}
        | pauses_after(running, fresh, [began_s])
        | {"left_over": await running.left_over()}
    )


def _processes(running: Stage) -> set[int]:
    return {*running.replicas(), *running.ingresses()}
