"""Rows R1, R2, R3, R5 and R9: replicas that are killed while streams run."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.chaos.stage import Size, Stage, application, stage
from benchmarks.chaos.stream import Stream, moment
from benchmarks.chaos.traffic import Asked, Traffic, alike, mixed, with_reference
from benchmarks.chaos.verdict import by_kind, in_flight, judged, pauses_ms, spread
from benchmarks.harness.command import tell

LENGTHS = (30, 120)  # tokens of an answer
STEP_MS = 30.0
_QUIET_S = (0.5, 2.5)  # between the moment when all are there again and the next fault
_AFTERMATH_S = 10.0  # in which a pause counts as the fault's
_CRASH_TOKEN = 0  # a special token: no replica draws it, no other prompt has it

Row = dict[str, Any]


async def kill_one_of_three(size: Size) -> list[Row]:
    """R1: kill -9 one of 3 replicas at random moments, each time when all three are there again."""
    with stage(application(step_ms=STEP_MS), step_s=STEP_MS / 1000) as running:
        traffic = await with_reference(running.target, mixed(size.streams, max_tokens=LENGTHS))
        return [await killing(running, traffic, size, "R1", "kill -9 one of 3 replicas")]


async def kill_with_weights(size: Size) -> list[Row]:
    """R2: the same with the bundled model's weights: here penalties change tokens, which simulated replicas ignore."""
    with stage(application(weights=True), step_s=0.0) as running:
        traffic = await with_reference(running.target, mixed(size.streams, max_tokens=(100, 400)))
        found = await killing(running, traffic, size, "R2", "kill -9 one of 3 replicas with real weights")
        return [found | {"by_kind": by_kind(traffic.answers, traffic.reference)}]


async def kill_at_each_phase(size: Size) -> list[Row]:
    """R3: all streams begin at once and are equally long; one replica of three is killed at one point of that."""
    phases: dict[str, Callable[[Sequence[Stream]], bool]] = {
        "prefill": lambda answers: time.perf_counter() - answers[0].begun_s > 0.25,
        "first token": lambda answers: any(each.arrivals_s for each in answers),
        "last token": lambda answers: any(len(each.arrivals_s) >= _NUM_ALIKE - 1 for each in answers),
        "before [DONE]": lambda answers: any(each.finish_reasons for each in answers),
    }
    with stage(application(step_ms=60, per_token_ms=0.25, end_probability=0), step_s=0.06) as running:
        requests = alike(size.streams, num_tokens=_NUM_ALIKE, num_prompt_tokens=200)
        traffic = await with_reference(running.target, requests)
        return [await _killing_at(running, traffic, size, name, is_now) for name, is_now in phases.items()]


async def kill_several(size: Size) -> list[Row]:
    """R5: two of three at once; then all, with time to wait for new ones and without."""
    rows = []
    with stage(application(step_ms=STEP_MS), step_s=STEP_MS / 1000) as running:
        traffic = await with_reference(running.target, mixed(size.streams, max_tokens=LENGTHS))
        rows.append(await killing(running, traffic, size, "R5", "kill -9 two of 3 replicas", num_victims=2))
        fresh = replace(traffic, answers=[])
        fault = "kill -9 all 3 replicas, place_timeout_s 30"
        rows.append(await killing(running, fresh, size, "R5", fault, num_victims=3))
    with stage(application(step_ms=STEP_MS, place_timeout_s=1.0), step_s=STEP_MS / 1000) as running:
        fresh = replace(traffic, target=running.target, answers=[])
        fault = "kill -9 all 3 replicas, place_timeout_s 1"
        rows.append(await killing(running, fresh, size, "R5", fault, num_victims=3))
    return rows


async def crash_on_request(size: Size) -> list[Row]:
    """R9: a request that kills every replica which computes it, among others that do not."""
    with stage(application(step_ms=STEP_MS, crash_token_id=_CRASH_TOKEN), step_s=STEP_MS / 1000) as running:
        traffic = await with_reference(running.target, mixed(size.streams, max_tokens=LENGTHS))
        body = alike(1, num_tokens=20)[0].body
        deadly = Asked("deadly", "seeded", {**body, "prompt": [*body["prompt"], _CRASH_TOKEN]})
        culprits = replace(traffic, answers=[])
        async with traffic.flowing():
            for run in range(size.runs):
                await asyncio.sleep(1.0)
                ended = await culprits.ask(deadly)
                tell(f"R9: run {run + 1} of {size.runs}: the deadly request: {ended.outcome}")
                await running.is_whole()
        seconds = [(each.ended_s or 0.0) - each.begun_s for each in culprits.answers]
        return [
            {"row": "R9", "fault": "a request that kills each replica that computes it", "runs": size.runs}
            | {"culprits": [each.outcome for each in culprits.answers]}
            | spread("culprit_ended_after_s", seconds, 2)
            | judged(traffic.answers, traffic.reference)
            | {"left_over": await running.left_over()}
        ]


_NUM_ALIKE = 12  # tokens


async def killing(running: Stage, traffic: Traffic, size: Size, row: str, fault: str, *, num_victims: int = 1) -> Row:
    """Kill so many replicas at once, so many times, under traffic; the figures of one row."""
    source = size.source(f"{row} {fault}")
    struck_s: list[float] = []
    recoveries_s: list[float] = []
    async with traffic.flowing():
        for run in range(size.runs):
            await asyncio.sleep(source.uniform(*_QUIET_S))
            struck_s.append(_kill(source.sample(running.replicas(), num_victims)))
            recoveries_s.append(await running.is_whole() - struck_s[-1])
            tell(f"{row}: run {run + 1} of {size.runs}: all there again after {recoveries_s[-1]:.1f} s")
    return (
        {"row": row, "fault": fault, "runs": size.runs}
        | judged(traffic.answers, traffic.reference)
        | pauses_after(running, traffic, struck_s)
        | spread("recovery_s", recoveries_s)
        | {"left_over": await running.left_over()}
    )


def pauses_after(running: Stage, traffic: Traffic, struck_s: Sequence[float]) -> Row:
    """How many streams ran when the faults were made, and how long each of them then stood still."""
    hit = [in_flight(traffic.answers, at_s) for at_s in struck_s]
    pauses = [
        pause
        for at_s, streams in zip(struck_s, hit, strict=True)
        for pause in pauses_ms(streams, at_s, step_s=running.step_s, within_s=_AFTERMATH_S)
    ]
    return {"in_flight_at_faults": len(pauses)} | spread("added_pause_ms", pauses)


async def _killing_at(
    running: Stage, traffic: Traffic, size: Size, phase: str, is_now: Callable[[Sequence[Stream]], bool]
) -> Row:
    source = size.source(phase)
    fresh = replace(traffic, answers=[])
    struck_s = []
    for run in range(size.runs):
        first = len(fresh.answers)
        answering = asyncio.ensure_future(fresh.once())
        await moment(partial(_is_now, fresh.answers, first, is_now))
        struck_s.append(_kill([source.choice(running.replicas())]))
        await answering
        await running.is_whole()
        tell(f"R3: {phase}: run {run + 1} of {size.runs}")
    return (
        {"row": "R3", "fault": f"kill -9 one of 3 replicas: {phase}", "runs": size.runs}
        | judged(fresh.answers, fresh.reference)
        | pauses_after(running, fresh, struck_s)
        | {"left_over": await running.left_over()}
    )


def _is_now(answers: Sequence[Stream], first: int, is_now: Callable[[Sequence[Stream]], bool]) -> bool:
    """Whether a condition holds for the answers from `first` on, once there are any."""
    return len(answers) > first and is_now(answers[first:])


def _kill(pids: Sequence[int]) -> float:
    """Kill these processes; returns when, by `time.perf_counter`."""
    now = time.perf_counter()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return now


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
