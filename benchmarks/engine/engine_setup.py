"""Load an engine of ours from options, with room for the workload."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from app.build import build_sync_engine
from app.config import EngineConfig, ModelConfig
from app.cores import num_cores
from app.engine.engine import Engine
from app.errors import InvalidRequest
from app.model.device import dtype_of
from app.model.location import resolve_model_path
from benchmarks.engine.run import Setup
from benchmarks.harness.command import BenchmarkError, tell
from benchmarks.harness.options import DTYPES
from benchmarks.harness.settings import Assignments, engine_config, told
from benchmarks.harness.workload import Workload, read_workload, read_workloads


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine, the settings it was built from, and the workloads it is to serve."""

    engine: Engine
    config: EngineConfig
    workload: Workload
    setup: Setup
    also: Mapping[str, Workload] = field(default_factory=dict)  # to serve after `workload`, by name


def load_engine(given: argparse.Namespace, assignments: Assignments) -> LoadedEngine:
    """Read the workload, then build the engine. Notes go to stderr.

    Raises:
        BenchmarkError: an option or the workload is wrong, or the workload does not fit.
        CarouselError: the engine cannot be built; the message says why.
    """
    workload = read_workload(given.workload)
    also = read_workloads(given.also)
    largest = Workload(tuple(timed for one in (workload, *also.values()) for timed in one.requests))
    config = configured(given, assignments)
    device = resolve_device(config.model.device)
    config = with_room(config, largest, assignments, device)
    tell(f"loading {config.model.path}")
    engine = build_sync_engine(config)
    shortage = check_fit(engine, config, largest)
    if shortage is not None:
        tell(f"note: {shortage}")
    setup = Setup(
        engine="carousel",
        model=config.model.path,
        workload=given.workload,
        dtype=dtype_name(config.model),
        threads=config.model.num_threads or num_cores(),
        device=device,
        settings=told(assignments),
        kv_blocks=engine.stats().num_blocks,
        kv_block_size=config.cache.block_size,
    )
    return LoadedEngine(engine, config, workload, setup, also)


def resolve_device(asked: str | None) -> Literal["cpu", "cuda"]:
    """Return cpu or cuda. The default is cuda if a CUDA device is available."""
    wants_cuda = asked == "cuda" or (asked != "cpu" and torch.cuda.is_available())
    return "cuda" if wants_cuda else "cpu"


def dtype_name(model: ModelConfig) -> str:
    """Return fp32 or bf16, the type of the weights in the engine."""
    chosen = dtype_of(model, resolve_model_path(model.path)).dtype
    return next(short for short, name in DTYPES.items() if getattr(torch, name) is chosen)


def configured(given: argparse.Namespace, assignments: Assignments) -> EngineConfig:
    """Return the requested settings of the engine; `--set` comes last. Raises BenchmarkError if a value is refused."""
    chosen = {
        "model.path": given.model,
        "model.dtype": DTYPES[given.dtype] if given.dtype else None,
        "model.device": given.device,
        "model.num_threads": given.threads,
    }
    return engine_config({path: value for path, value in chosen.items() if value is not None} | dict(assignments))


_MEMORY_SETTINGS = frozenset({"cache.num_blocks", "cache.memory_gib", "cache.gpu_memory_fraction"})


def num_blocks_for(workload: Workload, *, block_size: int, max_running: int) -> int:
    """Return the blocks for the longest requests that may run at once, each with one token more than it can fill."""
    longest = sorted((timed.max_total_tokens for timed in workload.requests), reverse=True)[:max_running]
    return sum(num_tokens // block_size + 1 for num_tokens in longest)


def with_room(config: EngineConfig, workload: Workload, assignments: Assignments, device: str) -> EngineConfig:
    """Return the settings with as many blocks as the workload can fill, unless a setting of memory is given.

    On a GPU the default stays: the memory that the weights leave.
    """
    if device == "cuda" or _MEMORY_SETTINGS & assignments.keys():
        return config
    num_blocks = num_blocks_for(workload, block_size=config.cache.block_size, max_running=config.scheduler.max_running)
    return config.with_setting("cache.num_blocks", num_blocks)


def check_fit(engine: Engine, config: EngineConfig, workload: Workload) -> str | None:
    """Return a remark if the KV memory is too small for the requests that may run at once, else None.

    Raises:
        BenchmarkError: a request is longer than the model or the pool allows, or has tokens that the model lacks.
    """
    num_blocks, size = engine.stats().num_blocks, config.cache.block_size
    longest = max(workload.requests, key=lambda timed: timed.max_total_tokens)
    if longest.max_total_tokens > engine.model_info.max_model_len:
        raise BenchmarkError(
            f"the workload does not fit: request {longest.request.request_id!r} has {longest.num_prompt_tokens:,} "
            f"prompt tokens and asks for {longest.max_tokens:,}; this engine takes {engine.model_info.max_model_len:,} "
            f"together ({num_blocks:,} KV blocks of {size} tokens). Take a model with a longer context, or raise "
            f"cache.memory_gib or cache.num_blocks"
        )
    for timed in workload.requests:
        try:
            engine.check(timed.request)
        except InvalidRequest as error:
            raise BenchmarkError(f"request {timed.request.request_id!r} cannot be served: {error}") from error
    needed = num_blocks_for(workload, block_size=size, max_running=config.scheduler.max_running)
    if needed <= num_blocks:
        return None
    return (
        f"KV memory has {num_blocks:,} blocks; the longest requests together can fill {needed:,}: some may be preempted"
    )
