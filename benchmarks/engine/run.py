"""Serve a workload with an engine: the time of each token, repeats from the same state, the figures of all repeats."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from benchmarks.harness import machine
from benchmarks.harness.command import BenchmarkError, tell
from benchmarks.harness.figures import rounded
from benchmarks.harness.machine import seconds_since_start
from benchmarks.harness.timeline import Deliveries, times_of
from benchmarks.harness.workload import Workload


@dataclass(slots=True)
class Timeline(Deliveries):
    """One request and its tokens. Times are in seconds after the start."""

    token_ids: list[int] = field(default_factory=list)
    has_failed: bool = False  # refused, expired or ended by an error

    def deliver(self, token_ids: tuple[int, ...] | list[int], *, at_s: float) -> None:
        if token_ids:
            self.token_ids.extend(token_ids)
            self.delivered_s.append(at_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A workload served to its end. Counters are None if the engine does not report them."""

    seconds: float
    timelines: Mapping[str, Timeline]  # by request id
    streams: bool = True  # tokens are delivered when they are drawn, not only at the end
    num_steps: int | None = None
    num_preemptions: int | None = None
    num_cached_prompt_tokens: int | None = None

    @property
    def num_output_tokens(self) -> int:
        return sum(len(timeline.token_ids) for timeline in self.timelines.values())

    @property
    def token_ids(self) -> dict[str, list[int]]:
        """The token ids, by request id."""
        return {name: timeline.token_ids for name, timeline in self.timelines.items()}

    @property
    def answered(self) -> list[Timeline]:
        return [timeline for timeline in self.timelines.values() if not timeline.has_failed]

    @property
    def all_begun_s(self) -> float:
        """The time at which the last request had its first token."""
        return max(timeline.delivered_s[0] for timeline in self.timelines.values() if timeline.delivered_s)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Output tokens per second after `all_begun_s`; None if tokens are not streamed or no tokens remain."""
        begun_s = self.all_begun_s
        num_after = sum(at_s > begun_s for timeline in self.timelines.values() for at_s in timeline.delivered_s)
        return num_after / (self.seconds - begun_s) if self.streams and num_after else None

    def __str__(self) -> str:
        tokens = self.num_output_tokens
        return f"{tokens:,} output tokens in {self.seconds:.2f} s, {tokens / self.seconds:,.0f} tokens/s"


class Clock(Protocol):
    """Seconds since the clock was made."""

    def now(self) -> float: ...

    def wait_until(self, at_s: float) -> None: ...


class MonotonicClock:
    """The real clock."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def wait_until(self, at_s: float) -> None:
        """Sleep once until that time; return at once if the time has passed."""
        time.sleep(max(0.0, at_s - self.now()))


class Contender(Protocol):
    """An engine that serves whole workloads, one after the other."""

    def serve(self, workload: Workload) -> Run: ...

    def forget(self) -> None:
        """Drop all state that would make the next run of these requests cheaper."""
        ...


def warmed_up(contender: Contender, workload: Workload) -> float:
    """Serve the first part of a workload; return the seconds from the start of that run to the first token."""
    run = contender.serve(workload.warm_up())
    tell(f"warm-up: {run}")
    return min(timeline.delivered_s[0] for timeline in run.timelines.values() if timeline.delivered_s)


def measured_runs(contender: Contender, workload: Workload, *, repeat: int) -> list[Run]:
    """Serve the workload `repeat` times from the same state; print a line of progress for each repeat on stderr.

    Raises:
        BenchmarkError: a request ended without a token.
    """
    runs: list[Run] = []
    for number in range(1, repeat + 1):
        contender.forget()
        run = contender.serve(workload)
        silent = next((name for name, timeline in run.timelines.items() if not timeline.token_ids), None)
        if silent is not None:
            raise BenchmarkError(f"request {silent!r} ended without a token")
        tell(f"repeat {number} of {repeat}: {run}")
        runs.append(run)
    return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The engine, model, workload and device of a run."""

    engine: str
    model: str
    workload: str
    dtype: str
    threads: int
    device: str
    settings: list[str]
    kv_blocks: int | None = None
    kv_block_size: int | None = None


def summed_up(
    setup: Setup, workload: Workload, runs: Sequence[Run], *, start_to_first_token_s: float | None = None
) -> dict[str, Any]:
    """Return the figures of one contender, with equal keys for ours and its peers. Counters are of the middle run.

    `start_to_first_token_s` counts from the start of the process and includes loading.
    """
    seconds = statistics.median(run.seconds for run in runs)
    middle = sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]
    answered = [timeline for run in runs for timeline in run.answered]
    return asdict(setup) | {
        "seconds": round(seconds, 4),
        "all_seconds": [round(run.seconds, 4) for run in runs],
        "output_tokens_per_s": round(middle.num_output_tokens / seconds, 2),
        "total_tokens_per_s": round((workload.num_prompt_tokens + middle.num_output_tokens) / seconds, 2),
        "prompt_tokens_per_s": round(
            workload.num_prompt_tokens / statistics.median(run.all_begun_s for run in runs), 2
        ),
        "decode_tokens_per_s": rounded(middle.decode_tokens_per_s, 2),
        **times_of(answered, (50, 99), streams=all(run.streams for run in runs)),
        "start_to_first_token_s": rounded(start_to_first_token_s),
        "peak_rss_mb": machine.peak_rss_mb(),
        "peak_device_mb": machine.peak_device_mb(setup.device),
        "num_steps": middle.num_steps,
        "preemptions": middle.num_preemptions,
        "cached_prompt_tokens": middle.num_cached_prompt_tokens,
        "num_requests": len(workload.requests),
        "num_failed": len(workload.requests) - len(middle.answered),
        "num_prompt_tokens": workload.num_prompt_tokens,
        "num_output_tokens": middle.num_output_tokens,
        "gpu": machine.gpu_name(setup.device),
    }


def measured(
    contender: Contender,
    setup: Setup,
    workload: Workload,
    *,
    also: Mapping[str, Workload],
    repeat: int,
    outputs: str | None = None,
) -> dict[str, Any]:
    """Warm up, repeat and sum up, for the workload and then for each of `also`. Figures of `also` are listed by name.

    outputs: a file for the token ids of the first workload's last run.
    """
    ready_s = seconds_since_start()
    tell(f"{setup.engine} is ready after {ready_s} s")
    first_token_s = warmed_up(contender, workload)
    runs = measured_runs(contender, workload, repeat=repeat)
    if outputs is not None:
        write_outputs(outputs, workload, runs[-1])
    start_s = None if ready_s is None else ready_s + first_token_s
    figures = summed_up(setup, workload, runs, start_to_first_token_s=start_s)
    others = {}
    for name, other in also.items():
        tell(f"workload {name}")
        warmed_up(contender, other)
        others[name] = summed_up(replace(setup, workload=name), other, measured_runs(contender, other, repeat=repeat))
    return figures | {"start_to_ready_s": rounded(ready_s, 3), "also": others}


def write_outputs(path: str, workload: Workload, run: Run) -> None:
    """Write each request's token ids, one JSON line for each request, in order of arrival."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            for timed in workload.requests:
                name = timed.request.request_id
                file.write(json.dumps({"id": name, "token_ids": run.timelines[name].token_ids}) + "\n")
    except OSError as error:
        raise BenchmarkError(f"--outputs {path} cannot be written: {error}") from error
