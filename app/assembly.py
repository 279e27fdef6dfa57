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
from app.engine.engine import Engine, LaunchingRunner, ModelRunner
from app.engine.facts import ModelFacts
from app.engine.overlapped_engine import OverlappedEngine
from app.engine.policy import FirstComeFirstServed
from app.engine.scheduler import Scheduler
from app.engine.strategy import Continuous
from app.errors import InvalidSetup

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
    return AsyncEngine(build_sync_engine(config), max_requests=config.scheduler.max_requests)


def build_sync_engine(config: EngineConfig) -> Engine:
    """The same engine without its thread, for those who step it themselves."""
    import torch

    from app.model.kv_cache import num_blocks_that_fit
    from app.model.loader import load_model, run_full_step

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
        runner=_build_runner(config, model, attention),
        facts=model.facts,
    )


def _build_attention(config: EngineConfig, model: LoadedModel, num_blocks: int) -> PagedAttention:
    """The fastest way of attending that this machine and this model allow."""
    from app.model.attention import TorchAttention
    from app.model.kv_cache import KVCache
    from app.model.native_attention import NativeAttention
    from app.model.triton_attention import TritonAttention

    block_size = config.cache.block_size
    if config.model.batch_invariant and not TritonAttention.fits(model.device):
        raise InvalidSetup("model.batch_invariant needs a CUDA device and triton; set it to false")
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
    if TritonAttention.fits(model.device):
        return TritonAttention(
            model.layers,
            num_blocks=num_blocks,
            block_size=block_size,
            max_rows=config.scheduler.max_running,
            max_blocks=min(num_blocks, -(-model.facts.max_model_len // block_size)),
            dtype=model.dtype,
            device=model.device,
            batch_invariant=config.model.batch_invariant,
        )
    if model.device.type == "cuda":
        logger.warning("triton is not installed: attention runs on plain torch, which is several times slower")
    cache = KVCache(model.layers, num_blocks=num_blocks, block_size=block_size, dtype=model.dtype, device=model.device)
    return TorchAttention(cache, model.device)


def _build_runner(config: EngineConfig, model: LoadedModel, attention: PagedAttention) -> ModelRunner:
    from app.model.runner import TorchModelRunner
    from app.model.triton_attention import TritonAttention

    if model.device.type != "cuda" or not isinstance(attention, TritonAttention):
        return TorchModelRunner(model, attention)
    from app.model.cuda_graph import CudaCapture
    from app.model.graph_runner import GraphModelRunner

    capture = CudaCapture(model.device) if config.model.cuda_graphs else None
    return GraphModelRunner(model, attention, max_rows=config.scheduler.max_running, capture=capture)


def assemble(
    scheduler: SchedulerConfig, cache: CacheConfig, *, num_blocks: int, runner: ModelRunner, facts: ModelFacts
) -> Engine:
    """An engine around any model runner. Requests are limited to what fits into the pool alone.

    Where the runner can launch steps, the engine prepares each while the one before it is computed.
    """
    pool = BlockPool(num_blocks=num_blocks, block_size=cache.block_size, prefix_caching=cache.prefix_caching)
    facts = replace(facts, max_model_len=min(facts.max_model_len, num_blocks * cache.block_size))
    deciding = Scheduler(
        config=scheduler,
        pool=pool,
        strategy=Continuous(max_running=scheduler.max_running),
        policy=FirstComeFirstServed(),
        eos_token_ids=facts.eos_token_ids,
    )
    if isinstance(runner, LaunchingRunner):
        return OverlappedEngine(scheduler=deciding, runner=runner, facts=facts)
    return Engine(scheduler=deciding, runner=runner, facts=facts)


def resolve_model_path(path: str) -> str:
    """Where a model lies: a folder seen from the working directory or from the project; else `path`, a hub id."""
    for folder in (Path(path).expanduser(), _PROJECT / path):
        if folder.is_dir():
            return str(folder.resolve())
    return path
