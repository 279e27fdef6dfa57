"""Joins an engine and a model; the only place that knows both.

The model room is imported when an engine is built, so that a process that only wants to know where a model lies does
not load torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.config import CacheConfig, EngineConfig, SchedulerConfig
from app.engine.async_engine import AsyncEngine
from app.engine.blocks import BlockPool
from app.engine.engine import Engine, ModelRunner
from app.engine.facts import ModelFacts
from app.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from app.model.attention import PagedAttention
    from app.model.loader import LoadedModel

logger = logging.getLogger(__name__)

_PROJECT = Path(__file__).resolve().parent.parent


def build_engine(config: EngineConfig) -> AsyncEngine:
    """Load the model, size its KV memory and start the engine's thread. Takes seconds to minutes.

    Raises:
        InvalidSetup: the configuration cannot be carried out on this machine.
        UnsupportedModel: the model cannot be served; the message says why.
    """
    limits = config.scheduler
    return AsyncEngine(
        build_sync_engine(config), max_requests=limits.max_requests, max_waiting_tokens=limits.max_waiting_tokens
    )


def build_sync_engine(config: EngineConfig) -> Engine:
    """The same engine without its thread, for those who step it themselves."""
    import torch

    from app.model.kv_cache import num_blocks_that_fit
    from app.model.loader import load_model, run_full_step
    from app.model.runner import TorchModelRunner

    torch.set_num_threads(config.model.num_threads)
    model = load_model(config.model, resolve_model_path(config.model.path))
    if model.device.type == "cuda" and config.cache.num_blocks is None:
        limits = config.scheduler
        run_full_step(model, num_tokens=limits.max_step_tokens, num_sampled=limits.max_running)
    num_blocks = num_blocks_that_fit(config.cache, model.layers, dtype=model.dtype, device=model.device)
    attention = _build_attention(config, model, num_blocks)
    logger.info(
        "%s on %s in %s: %d KV blocks of %d tokens",
        config.model.path, model.device, model.dtype, num_blocks, config.cache.block_size,
    )  # fmt: skip
    return assemble(
        config.scheduler,
        config.cache,
        num_blocks=num_blocks,
        runner=TorchModelRunner(model, attention),
        facts=model.facts,
        # On a GPU the KV memory was sized by what such a step leaves of it.
        largest_step=config.scheduler if model.device.type == "cuda" else None,
    )


def _build_attention(config: EngineConfig, model: LoadedModel, num_blocks: int) -> PagedAttention:
    """The fastest way of attending that this machine and this model allow."""
    from app.model.attention import TorchAttention
    from app.model.kv_cache import KVCache
    from app.model.native_attention import NativeAttention

    block_size = config.cache.block_size
    if config.model.native_attention and NativeAttention.fits(
        model.layers, block_size=block_size, dtype=model.dtype, device=model.device
    ):
        return NativeAttention(
            model.layers,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=model.dtype,
            num_threads=config.model.num_threads,
        )
    cache = KVCache(model.layers, num_blocks=num_blocks, block_size=block_size, dtype=model.dtype, device=model.device)
    return TorchAttention(cache, model.device)


def assemble(
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    *,
    num_blocks: int,
    runner: ModelRunner,
    facts: ModelFacts,
    clock: Callable[[], float] = time.monotonic,
    largest_step: SchedulerConfig | None = None,
) -> Engine:
    """An engine around any model runner. Requests are limited to what fits into the pool alone."""
    pool = BlockPool(num_blocks=num_blocks, block_size=cache.block_size, prefix_caching=cache.prefix_caching)
    facts = replace(facts, max_model_len=min(facts.max_model_len, num_blocks * cache.block_size))
    return Engine(
        scheduler=Scheduler(config=scheduler, pool=pool, eos_token_ids=facts.eos_token_ids),
        runner=runner,
        facts=facts,
        clock=clock,
        largest_step=largest_step,
    )


def resolve_model_path(path: str) -> str:
    """Where a model lies: a folder seen from the working directory or from the project; else `path`, a hub id."""
    for folder in (Path(path).expanduser(), _PROJECT / path):
        if folder.is_dir():
            return str(folder.resolve())
    return path
