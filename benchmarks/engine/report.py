"""The figures of one engine on one workload: one flat record, with the same keys for ours and for its peers."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.engine.run import Run
from benchmarks.harness import machine
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.figures import percentile
from benchmarks.harness.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What was run, and on what."""

    engine: str
    model: str
    workload: str
    dtype: str
    threads: int
    device: str
    settings: list[str]
    kv_blocks: int | None = None
    kv_block_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Setup):
    """What was run, and its figures.

    Percentiles are over the requests (and gaps) of all repeats; counters are those of the middle repeat.

    Seconds of a request count from its arrival, so waiting is part of them.
    """

    seconds: float  # median of the repeats
    all_seconds: list[float]
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompt and output
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    latency_p50_s: float | None
    latency_p99_s: float | None
    start_to_first_token_s: float | None  # from the start of the process, loading included
    peak_rss_mb: int | None
    peak_device_mb: int | None
    num_steps: int | None
    preemptions: int | None
    cached_prompt_tokens: int | None
    num_requests: int
    num_failed: int  # refused, expired or ended by an error; the times are those of the others
    num_prompt_tokens: int
    num_output_tokens: int
    gpu: str | None


def summed_up(setup: Setup, workload: Workload, runs: Sequence[Run], *, start_to_first_token_s: float | None) -> Report:
    """Sum up the runs of one contender, all of them with the same number of output tokens or close to it."""
    seconds = statistics.median(run.seconds for run in runs)
    middle = sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]
    timelines = [timeline for run in runs for timeline in run.timelines.values() if not timeline.has_failed]
    streams = all(run.streams for run in runs)
    first = [timeline.time_to_first_token_s for timeline in timelines] if streams else []
    gaps = [gap for timeline in timelines for gap in timeline.gaps_s] if streams else []
    latencies = [timeline.latency_s for timeline in timelines]
    return Report(
        **asdict(setup),
        seconds=round(seconds, 4),
        all_seconds=[round(run.seconds, 4) for run in runs],
        output_tokens_per_s=round(middle.num_output_tokens / seconds, 2),
        total_tokens_per_s=round((workload.num_prompt_tokens + middle.num_output_tokens) / seconds, 2),
        ttft_p50_s=_rounded(percentile(first, 50)),
        ttft_p99_s=_rounded(percentile(first, 99)),
        itl_p50_s=_rounded(percentile(gaps, 50)),
        itl_p99_s=_rounded(percentile(gaps, 99)),
        latency_p50_s=_rounded(percentile(latencies, 50)),
        latency_p99_s=_rounded(percentile(latencies, 99)),
        start_to_first_token_s=_rounded(start_to_first_token_s),
        peak_rss_mb=machine.peak_rss_mb(),
        peak_device_mb=machine.peak_device_mb(setup.device),
        num_steps=middle.num_steps,
        preemptions=middle.num_preemptions,
        cached_prompt_tokens=middle.num_cached_prompt_tokens,
        num_requests=len(workload.requests),
        num_failed=sum(timeline.has_failed for timeline in middle.timelines.values()),
        num_prompt_tokens=workload.num_prompt_tokens,
        num_output_tokens=middle.num_output_tokens,
        gpu=machine.gpu_name(setup.device),
    )


def write_outputs(path: str, workload: Workload, run: Run) -> None:
    """Each request's token ids, one JSON line each, in order of arrival."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            for timed in workload.requests:
                name = timed.request.request_id
                file.write(json.dumps({"id": name, "token_ids": run.timelines[name].token_ids}) + "\n")
    except OSError as error:
        raise BenchmarkError(f"--outputs {path} cannot be written: {error}") from error


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
