"""Start an 8B model: seconds, graphs, memory predicted against used; then run the step that takes most memory.

In the stage `sleep`, the model then sleeps and wakes instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import torch

import app.model.implementations.gpu
from app.build import build_sync_engine
from app.config import GIB, EngineConfig
from app.engine.engine import Engine
from app.engine.largest_batch import largest_batch
from app.model.memory import MemoryNeeds
from app.model.planned_memory import planned_memory
from benchmarks.gpu.bench import BLOCK_SIZE, Bench
from benchmarks.gpu.card import told_by_driver
from benchmarks.gpu.graphs import Replays
from benchmarks.gpu.models import engine_config, made_model, made_weights
from benchmarks.gpu.steps import blocks_needed, step_of
from benchmarks.harness.command import BenchmarkError


def measure(bench: Bench) -> None:
    config = engine_config(bench, max_model_len=bench.sized(8192, 32))
    of_others = _used_of_card()  # before this process has its own CUDA context
    began_at = time.perf_counter()
    planned = planned_memory(config)
    bench.put(plan_s=_since(began_at))
    began_at = time.perf_counter()
    with Replays().watched() as replays, made_weights(), _noted_needs() as noted:
        engine = build_sync_engine(config)
    bench.synchronize()
    bench.put(load_s=_since(began_at), kv_blocks=engine.stats().num_blocks)
    before = _used(bench)
    began_at = time.perf_counter()
    engine.prepare()
    bench.synchronize()
    bench.put(
        capture_s=_since(began_at), graphs=replays.num_graphs, graphs_used_gib=_gib(_difference(_used(bench), before))
    )
    if bench.stage == "sleep":
        _sleep_and_wake(bench, config, engine, replays)
        return
    measured = noted[0] if noted else _needs(config)
    for part in fields(MemoryNeeds):
        bench.row(
            "memory beside KV, GiB",
            part=part.name,
            from_config=_gib(getattr(planned.needs, part.name)),
            at_start=_gib(getattr(measured, part.name)),
        )
    _worst_step(bench, config, engine)
    kv = engine.stats().num_blocks * planned.block_bytes
    predicted, used = planned.needs.total + kv, _difference(_used(bench), of_others)
    bench.put(kv_gib=_gib(kv), predicted_gib=_gib(predicted), used_gib=_gib(used))
    bench.put(predicted_over_used=None if used is None else round(predicted / used, 4))
    replays.check(config, engine.runner)  # comes last: the figures above explain a failure


def _worst_step(bench: Bench, config: EngineConfig, engine: Engine) -> None:
    """Run the step that memory was sized for: `largest_batch` reaches every limit."""
    batch = largest_batch(config.scheduler, engine.model_info, block_size=BLOCK_SIZE)
    for name in ("first_worst_step_s", "worst_step_s"):
        began_at = time.perf_counter()
        engine.runner.run(batch)
        bench.put(**{name: _since(began_at)})
    if bench.device.type == "cuda":
        bench.put(
            torch_allocated_peak_gib=_gib(torch.cuda.max_memory_allocated()),
            torch_reserved_peak_gib=_gib(torch.cuda.max_memory_reserved()),
        )


def _sleep_and_wake(bench: Bench, config: EngineConfig, engine: Engine, replays: Replays) -> None:
    """Sleep and wake. Raises BenchmarkError if the answers change or graphs are missing."""
    prompts = [(0, bench.sized(128, 3))] * 2
    batch = step_of(prompts, num_blocks=blocks_needed(prompts))
    before = engine.runner.run(batch).token_ids
    for turn in range(1, bench.sized(3, 2)):
        began_at = time.perf_counter()
        engine.sleep()
        slept_at, asleep = time.perf_counter(), _used(bench)
        engine.wake()
        bench.synchronize()
        bench.put(sleep_s=round(slept_at - began_at, 2), wake_s=_since(slept_at), asleep_gib=_gib(asleep))
        replays.check(config, engine.runner, times=turn + 1)
        if engine.runner.run(batch).token_ids != before:
            raise BenchmarkError("the model does not answer as it did before it slept")


@contextmanager
def _noted_needs() -> Iterator[list[MemoryNeeds]]:
    """Record the needs that an engine measures for its model during the build."""
    noted: list[MemoryNeeds] = []
    measure_needs = app.model.implementations.gpu.needs_on_gpu

    def noting(*arguments: Any) -> MemoryNeeds:
        noted.append(measure_needs(*arguments))
        return noted[-1]

    with patch("app.model.implementations.cuda_decoder.needs_on_gpu", noting):
        yield noted


def _needs(config: EngineConfig) -> MemoryNeeds:
    """Return the needs on a CPU, where no engine measures them."""
    model = made_model(config)
    largest = largest_batch(config.scheduler, model.model_info, block_size=BLOCK_SIZE)
    return model.needs(config, largest)


def _used(bench: Bench) -> int | None:
    """Return the bytes in use on the whole card; None on a CPU."""
    if bench.device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def _used_of_card() -> int:
    """Return the bytes in use from the driver, without a context of this process; 0 if the driver does not answer."""
    told = told_by_driver("memory.used", "csv,noheader,nounits") or ""
    first = told.split()[:1]
    return int(first[0]) * 1024**2 if first and first[0].isdecimal() else 0


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before


def _gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else round(num_bytes / GIB, 3)


def _since(began_at: float) -> float:
    return round(time.perf_counter() - began_at, 2)
