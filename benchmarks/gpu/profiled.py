"""Profile one decode step and one step that admits a prompt with torch's profiler: kernels, launches, gaps, waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from app.engine.batch import StepBatch
from app.engine.model_runner import ModelRunner
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import engine_config, made_model, prepared_runner
from benchmarks.gpu.steps import blocks_needed, step_of

_LAUNCH = "launch of the step"
_NUM_KERNELS = 12  # rows of the table: the longest kernels
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaLaunchCooperativeKernel")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize", "cudaMemcpy")


@torch.inference_mode()
def measure(bench: Bench) -> None:
    rows, context, chunk = bench.sized((64, 1024, 512), (2, 20, 5))
    steps = {
        "decode": [(context - 1, 1)] * rows,
        "mixed": [(context - 1, 1)] * (rows - 1) + [(0, chunk)],
    }
    num_blocks = max(blocks_needed(pieces) for pieces in steps.values())
    config = engine_config(
        bench, max_running=rows, max_step_tokens=bench.sized(2048, 8), max_model_len=2 * context, num_blocks=num_blocks
    )
    runner, _ = prepared_runner(config, made_model(config))
    for name, pieces in steps.items():
        batch = step_of(pieces, num_blocks=num_blocks)
        for _ in range(bench.sized(3, 1)):
            runner.run(batch)
        events = _events_of(bench, runner, batch)
        launched, kernels = _launched(events), _kernels(events)
        device_ms = sum(_duration(each) for each in kernels) / 1e3
        bench.row(
            "steps", step=name, sequences=len(pieces), tokens=batch.num_tokens, kernels=len(kernels),
            launches=sum(each.name in _LAUNCHES or each.name.startswith("cuLaunchKernel") for each in launched),
            waits=sum(each.name in _WAITS for each in launched), host_ms=_host_ms(events),
            device_ms=round(device_ms, 3), idle_ms=round(_idle_us(kernels) / 1e3, 3),
        )  # fmt: skip
        _put_kernels(bench, name, kernels)


def _events_of(bench: Bench, runner: ModelRunner, batch: StepBatch) -> list[Any]:
    is_cuda = bench.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    bench.synchronize()
    with profile(activities=activities) as profiled:
        with record_function(_LAUNCH):
            step = runner.launch(batch)
        step.result()
        bench.synchronize()
    return list(profiled.events() or ())


def _launched(events: Sequence[Any]) -> list[Any]:
    """Return the host's events until the step was queued. The wait for its result is excluded."""
    whole = _of_launch(events)
    return [
        each
        for each in events
        if not _is_on_device(each) and whole.start <= each.time_range.start and each.time_range.end <= whole.end
    ]


def _of_launch(events: Sequence[Any]) -> Any:
    return next(each.time_range for each in events if each.name == _LAUNCH and not _is_on_device(each))


def _host_ms(events: Sequence[Any]) -> float:
    """Return the host's time, which includes the profiler's own cost of several times a launch."""
    whole = _of_launch(events)
    return round(float(whole.end - whole.start) / 1e3, 3)


def _kernels(events: Sequence[Any]) -> list[Any]:
    """Return the device's events in their order. On a CPU, return the operators without child operators."""
    found = [each for each in events if _is_on_device(each) and each.name != _LAUNCH]
    found = found or [each for each in events if not each.cpu_children]
    return sorted(found, key=lambda each: float(each.time_range.start))


def _is_on_device(event: Any) -> bool:
    return str(event.device_type) != "DeviceType.CPU"


def _duration(event: Any) -> float:
    """Return the duration in microseconds."""
    return float(event.time_range.end - event.time_range.start)


def _idle_us(kernels: Sequence[Any]) -> float:
    """Return the microseconds without a running kernel between the first and the last kernel."""
    idle, busy_until = 0.0, float(kernels[0].time_range.end)
    for _, after in pairwise(kernels):
        idle += max(0.0, after.time_range.start - busy_until)
        busy_until = max(busy_until, after.time_range.end)
    return idle


def _put_kernels(bench: Bench, step: str, kernels: Sequence[Any]) -> None:
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for each in kernels:
        by_name[each.name].append(_duration(each))
    whole = sum(map(_duration, kernels))
    for name, took_us in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:_NUM_KERNELS]:
        bench.row(
            "kernels", step=step, kernel=name[:80], calls=len(took_us), us=round(sum(took_us), 1),
            share=round(sum(took_us) / whole, 3) if whole else None,
        )  # fmt: skip
