"""KV memory for a workload: enough that the benchmark measures the engine and not a shortage nobody asked for."""

from __future__ import annotations

from collections.abc import Iterable

from app.config import EngineConfig
from app.engine.engine import Engine
from app.errors import InvalidRequest
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.settings import Assignment
from benchmarks.harness.workload import Workload

_MEMORY_SETTINGS = frozenset({"cache.num_blocks", "cache.memory_gib", "cache.gpu_memory_fraction"})


def num_blocks_for(workload: Workload, *, block_size: int, max_running: int) -> int:
    """Blocks for the longest requests that may run at once, each with a slot more than it can fill."""
    longest = sorted((timed.max_total_tokens for timed in workload.requests), reverse=True)[:max_running]
    return sum(num_tokens // block_size + 1 for num_tokens in longest)


def with_room(config: EngineConfig, workload: Workload, assignments: Iterable[Assignment], device: str) -> EngineConfig:
    """The settings with as many blocks as the workload can fill, where nobody chose.

    On a GPU the default stays: it is whatever the weights leave.
    """
    if device == "cuda" or any(assignment.path in _MEMORY_SETTINGS for assignment in assignments):
        return config
    num_blocks = num_blocks_for(workload, block_size=config.cache.block_size, max_running=config.scheduler.max_running)
    return config.model_copy(update={"cache": config.cache.model_copy(update={"num_blocks": num_blocks})})


def check_fit(engine: Engine, config: EngineConfig, workload: Workload) -> str | None:
    """A remark when memory is short of what may run at once; None when it is not.

    Raises:
        BenchmarkError: a request is longer than the model or the pool allows, or has tokens that the model has not.
    """
    num_blocks, size = engine.stats().num_blocks, config.cache.block_size
    longest = max(workload.requests, key=lambda timed: timed.max_total_tokens)
    if longest.max_total_tokens > engine.facts.max_model_len:
        raise BenchmarkError(
            f"the workload does not fit: request {longest.request.request_id!r} has {longest.num_prompt_tokens:,} "
            f"prompt tokens and asks for {longest.max_tokens:,}; this engine takes {engine.facts.max_model_len:,} "
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
