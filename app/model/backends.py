"""Chooses an engine's backend: the fastest model runner that its machine, model and settings allow."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch

from app.config import EngineConfig
from app.errors import InvalidSetup
from app.model.attention import TorchAttention
from app.model.cpu.attention import NativeAttention
from app.model.cpu.decoder import NativeDecoder
from app.model.cpu.kv_cache import NativeKVCache
from app.model.cpu.library import ThreadPool
from app.model.cpu.sampling import NativeAdjust, NativeDraw, NativeLogprobs
from app.model.cuda.attention import TritonAttention
from app.model.cuda.batch_invariant import BatchInvariantMode
from app.model.cuda.fp8 import why_no_fp8
from app.model.cuda.graph_runner import CudaCapture, GraphModelRunner
from app.model.cuda.sampler import TritonLogprobs, TritonSampler
from app.model.forward import ForwardPass, TransformersForward
from app.model.kv_cache import KVCache, stored_dtype
from app.model.loader import LoadedModel, check_attention
from app.model.runner import TorchModelRunner

logger = logging.getLogger(__name__)


def build_runner(
    config: EngineConfig, model: LoadedModel, *, num_blocks: int, num_threads: int
) -> TorchModelRunner | GraphModelRunner:
    """A runner with KV memory of `num_blocks` blocks. `num_threads`: of native code.

    Raises:
        InvalidSetup: no backend here keeps `model.batch_invariant`, or has the KV memory of `cache.dtype`.
    """
    _check_kv_dtype(config, model)
    if TritonAttention.fits(model.device):
        return _on_cuda(config, model, num_blocks)
    if config.model.batch_invariant and model.native is None:
        raise InvalidSetup(
            f"model.batch_invariant is set, but {config.model.path} on {model.device} runs on transformers' code, "
            f"where matrix products depend on the size of a step. It needs a CUDA device with triton or, on a CPU, the "
            f"native decoder (model.backend auto, a Llama-like model, cache.block_size a multiple of 16); the log "
            f"says why it was not chosen"
        )
    block_size = config.cache.block_size
    wants_native = config.model.backend != "torch"
    if wants_native and NativeKVCache.fits(model.layers, block_size=block_size, dtype=model.dtype, device=model.device):
        return _in_native_code(config, model, num_blocks, num_threads)
    assert model.module is not None, "weights are native only where NativeKVCache fits"
    cache = KVCache(model.layers, num_blocks=num_blocks, block_size=block_size, dtype=model.dtype, device=model.device)
    return TorchModelRunner(TransformersForward(model.module, TorchAttention(cache, model.device)), model.device)


def check_kv_device(config: EngineConfig, device: torch.device) -> None:
    """Raises InvalidSetup if no attention on a device has the KV memory of `cache.dtype`. Needs no weights."""
    if config.cache.dtype == "fp8":
        _refuse_kv_dtype(config, why_no_fp8(device, on_a_cpu="cache.dtype: int8"))
    if config.cache.dtype == "int8" and device.type != "cpu":
        _refuse_kv_dtype(config, f"it runs on {device.type}")


def _check_kv_dtype(config: EngineConfig, model: LoadedModel) -> None:
    check_kv_device(config, model.device)
    if config.cache.dtype != "int8":
        return
    reason = NativeKVCache.why_not(
        model.layers, block_size=config.cache.block_size, dtype=model.dtype, device=model.device
    )
    _refuse_kv_dtype(config, "model.backend is torch" if config.model.backend == "torch" else reason)


def _refuse_kv_dtype(config: EngineConfig, reason: str | None) -> None:
    if reason is None:
        return
    only = "native attention on a CPU" if config.cache.dtype == "int8" else "Triton's attention on a GPU"
    raise InvalidSetup(
        f"cache.dtype is {config.cache.dtype}, which only {only} has; {config.model.path} does not use that here: "
        f"{reason}. Change that, or set cache.dtype to auto"
    )


def _in_native_code(config: EngineConfig, model: LoadedModel, num_blocks: int, num_threads: int) -> TorchModelRunner:
    cache = config.cache
    pages = NativeKVCache(
        model.layers,
        num_blocks=num_blocks,
        block_size=cache.block_size,
        dtype=model.dtype,
        in_int8=cache.dtype == "int8",
    )
    threads = ThreadPool(num_threads)
    pages.provide(threads)
    if model.native is None:
        assert model.module is not None, "a model has its weights in one of both"
        forward = TransformersForward(model.module, NativeAttention(pages, threads))
        return _native_runner(forward, model.device, threads)
    torch.set_num_threads(1)  # torch has almost nothing to compute, and its waiting threads would slow the pool's
    decoder = NativeDecoder(model.native, pages, threads)
    return _native_runner(decoder, model.device, threads)


def _native_runner(forward: ForwardPass, device: torch.device, threads: ThreadPool) -> TorchModelRunner:
    return TorchModelRunner(
        forward,
        device,
        draw=NativeDraw(threads),
        adjust=NativeAdjust(threads),
        compute_logprobs=NativeLogprobs(threads),
    )


def _on_cuda(config: EngineConfig, model: LoadedModel, num_blocks: int) -> TorchModelRunner | GraphModelRunner:
    block_size, max_rows = config.cache.block_size, config.scheduler.max_running
    attention = TritonAttention(
        model.layers,
        num_blocks=num_blocks,
        block_size=block_size,
        max_rows=max_rows,
        max_blocks=min(num_blocks, -(-model.facts.max_model_len // block_size)),
        dtype=stored_dtype(config.cache, model.dtype),
        device=model.device,
        batch_invariant=config.model.batch_invariant,
    )
    with BatchInvariantMode() if attention.batch_invariant else nullcontext():  # type: ignore[no-untyped-call]
        check_attention(config.model, model, attention, max_blocks=attention.tables.tensor.shape[1])
    model = replace(model, probe=None)
    capture = CudaCapture(model.device) if config.model.backend != "torch" else None
    synchronize = partial(torch.cuda.synchronize, model.device)
    return GraphModelRunner(
        model,
        attention,
        max_rows=max_rows,
        max_tokens=config.scheduler.max_step_tokens,
        capture=capture,
        synchronize=synchronize,
        sample=TritonSampler(model.device),
        compute_logprobs=TritonLogprobs(model.device),
    )
