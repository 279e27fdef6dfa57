"""Joins an engine and a model; the only place that knows both.

The model room is imported when an engine is built, so that a process that only wants to know where a model lies does
not load torch.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.config import CacheConfig, EngineConfig, SchedulerConfig
from app.engine.async_engine import AsyncEngine
from app.engine.blocks import BlockPool
from app.engine.engine import Engine, ModelRunner
from app.engine.facts import ModelFacts
from app.engine.policy import FirstComeFirstServed
from app.engine.scheduler import Scheduler
from app.engine.strategy import Continuous
from app.errors import InvalidSetup

if TYPE_CHECKING:
    from app.model.loader import LoadedModel

logger = logging.getLogger(__name__)

_PROJECT = Path(__file__).resolve().parent.parent


def build_engine(config: EngineConfig) -> AsyncEngine:
    """Load the model, size its KV memory and start the engine's thread. Takes seconds to minutes.

    Raises:
        InvalidSetup: the configuration cannot be carried out on this machine.
        UnsupportedModel: the model cannot be served; the message says why.
    """
    return AsyncEngine(build_sync_engine(config), max_requests=config.scheduler.max_requests)


def build_sync_engine(config: EngineConfig) -> Engine:
    """The same engine without its thread, for those who step it themselves."""
    import torch

    from app.model.kv_cache import num_blocks_that_fit
    from app.model.loader import load_model, run_full_step

    torch.set_num_threads(config.model.num_threads)
    model = load_model(config.model, resolve_model_path(config.model.path), block_size=config.cache.block_size)
    if model.device.type == "cuda" and config.cache.num_blocks is None:
        limits = config.scheduler
        run_full_step(model, num_tokens=limits.max_step_tokens, num_sampled=limits.max_running)
    num_blocks = num_blocks_that_fit(config.cache, model.layers, dtype=model.dtype, device=model.device)
    logger.info(
        "%s on %s in %s: %d KV blocks of %d tokens",
        config.model.path, model.device, model.dtype, num_blocks, config.cache.block_size,
    )  # fmt: skip
    runner = _build_runner(config, model, num_blocks)
    return assemble(config.scheduler, config.cache, num_blocks=num_blocks, runner=runner, facts=model.facts)


def _build_runner(config: EngineConfig, model: LoadedModel, num_blocks: int) -> ModelRunner:
    """The fastest way of computing a step that this machine and this model allow."""
    import torch

    from app.model.attention import TorchAttention
    from app.model.forward import TransformersForward
    from app.model.kv_cache import KVCache
    from app.model.native.attention import NativeAttention
    from app.model.native.decoder import NativeDecoder
    from app.model.native.library import Team
    from app.model.native.memory import NativePages
    from app.model.native.sampling import NativeDraw
    from app.model.runner import TorchModelRunner

    block_size = config.cache.block_size
    if config.model.batch_invariant and model.native is None:
        raise InvalidSetup(
            f"model.batch_invariant is set, but {config.model.path} on {model.device} runs on transformers' code, whose "
            f"matrix products depend on the size of a step. It needs the native decoder (model.native_decoder on a CPU, "
            f"a Llama-like model, cache.block_size a multiple of 16); the log says what was in its way"
        )
    wants_native = config.model.native_attention or model.native is not None
    if wants_native and NativePages.fits(model.layers, block_size=block_size, dtype=model.dtype, device=model.device):
        pages = NativePages(model.layers, num_blocks=num_blocks, block_size=block_size, dtype=model.dtype)
        team = Team(config.model.num_threads)
        if model.native is None:
            forward = TransformersForward(model.module, NativeAttention(pages, team))
            return TorchModelRunner(forward, model.device, draw=NativeDraw(team))
        torch.set_num_threads(1)  # nearly nothing is left to torch, whose threads would wait in the way of ours
        return TorchModelRunner(NativeDecoder(model.native, pages, team), model.device, draw=NativeDraw(team))
    cache = KVCache(model.layers, num_blocks=num_blocks, block_size=block_size, dtype=model.dtype, device=model.device)
    return TorchModelRunner(TransformersForward(model.module, TorchAttention(cache, model.device)), model.device)


def assemble(
    scheduler: SchedulerConfig, cache: CacheConfig, *, num_blocks: int, runner: ModelRunner, facts: ModelFacts
) -> Engine:
    """An engine around any model runner. Requests are limited to what fits into the pool alone."""
    pool = BlockPool(num_blocks=num_blocks, block_size=cache.block_size, prefix_caching=cache.prefix_caching)
    facts = replace(facts, max_model_len=min(facts.max_model_len, num_blocks * cache.block_size))
    return Engine(
        scheduler=Scheduler(
            config=scheduler,
            pool=pool,
            strategy=Continuous(max_running=scheduler.max_running),
            policy=FirstComeFirstServed(),
            eos_token_ids=facts.eos_token_ids,
        ),
        runner=runner,
        facts=facts,
    )


def resolve_model_path(path: str) -> str:
    """Where a model lies: a folder seen from the working directory or from the project; else `path`, a hub id."""
    for folder in (Path(path).expanduser(), _PROJECT / path):
        if folder.is_dir():
            return str(folder.resolve())
    return path
