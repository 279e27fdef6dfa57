"""Builds verified runners for models on a GPU, and measures the memory of their steps.

The largest step is run once to measure its memory. On a GPU, torch's allocator reports the peak. On any other device,
the allocations of each operator are counted; on the meta device, this needs only the model's configuration.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch

from app.config import GIB, EngineConfig, SchedulerConfig
from app.engine.batch import ScheduledSequence, StepBatch
from app.engine.largest_batch import largest_batch
from app.engine.request import FILTERS, SamplingParams
from app.model.allocated_bytes import AllocatedBytes, num_bytes_of
from app.model.attention import PagedAttention, TorchAttention, plain_attention_bytes
from app.model.cuda.attention import TritonAttention
from app.model.cuda.batch_invariant import BatchInvariantMode
from app.model.cuda.captured_inputs import StepSize, decode_size, graph_sizes, mixed_sizes
from app.model.cuda.graph_capture import CudaCapture
from app.model.cuda.graph_runner import GraphModelRunner
from app.model.cuda.library_attention import LibraryAttention
from app.model.cuda.recurrence import TritonRecurrence
from app.model.cuda.sampler import TritonSampler
from app.model.forward import Prediction
from app.model.gpu_backends import GRAPHS, LIBRARY, TORCH, WITHOUT_TRITON, BackendFailed, cause_of, is_lost
from app.model.implementations.loaded_model import LoadedModel
from app.model.kv_cache import block_bytes, stored_dtype
from app.model.memory import WORKSPACE_BYTES, MemoryNeeds, explaining_out_of_memory, gpu_memory, graph_bytes
from app.model.recurrence import TorchRecurrence
from app.model.recurrent_layers import StatefulAttention
from app.model.runner import draw_tokens
from app.model.sampler import Sampler
from app.model.verification import TrialBlocks

logger = logging.getLogger(__name__)

# cuBLAS allocates a workspace for each pair of a thread and a stream: for the thread that builds the engine, for the
# engine's own thread, and for the stream that captures graphs. On a GPU, the measured step includes the first one.
_NUM_WORKSPACES = 3
# The trial of our sampling kernels draws with these options as well as with the options of the largest step.
_DRAWS = (
    SamplingParams(max_tokens=1, logprobs=2, temperature=0.0),
    SamplingParams(max_tokens=1, logprobs=2, seed=3, temperature=0.7),
    *(SamplingParams(max_tokens=1, logprobs=2, seed=1, **{name: value}) for name, value in FILTERS.items()),
)
_is_close = partial(math.isclose, abs_tol=1e-3)


def verified_graph_runner(config: EngineConfig, model: LoadedModel, num_blocks: int) -> GraphModelRunner:
    """Return a runner with its full KV memory. Raises BackendFailed if its steps differ from the reference."""
    max_blocks = min(num_blocks, -(-model.model_info.max_model_len // config.cache.block_size))
    attention = _attention(config, model, num_blocks=num_blocks, max_blocks=max_blocks)
    num_groups = model.groups.num_groups
    blocks = TrialBlocks(
        block_size=config.cache.block_size, num_blocks=num_blocks // num_groups, num_groups=num_groups,
        max_blocks=max_blocks, max_rows=config.scheduler.max_running,
    )  # fmt: skip
    # The trial uses the runner's own attention, so it also compiles the kernels that the first request will need.
    quantization = "fp8" if config.cache.dtype == "fp8" else config.model.quantization
    with BatchInvariantMode() if config.model.batch_invariant else nullcontext():  # type: ignore[no-untyped-call]
        tried = _with_states(config, model, attention, blocks.num_state_slots) or attention
        difference = model.difference_in_steps(tried, blocks, quantization)
    if difference is not None:
        raise BackendFailed(f"in steps with {type(attention).__name__} {difference}")
    del tried  # free the trial's state slots before the runner's slots are allocated
    sampler = _sampler(config, model)
    stateful = _with_states(config, model, attention, model.model_info.num_state_slots)
    if stateful is not None:
        logger.info(
            "%s has recurrent layers: steps run without CUDA graphs, each after the end of the previous step",
            config.model.path,
        )
    return GraphModelRunner(
        replace(model, reference=None),  # frees the reference's memory
        attention,
        max_rows=config.scheduler.max_running,
        stateful=stateful,
        max_tokens=config.scheduler.max_step_tokens,
        capture=CudaCapture(model.device) if _is_captured(config, model) else None,
        synchronize=partial(torch.cuda.synchronize, model.device),
        sampler=sampler,
        may_adapt=config.model.max_loaded_adapters is not None,
    )


def _sampler(config: EngineConfig, model: LoadedModel) -> Sampler:
    is_plain = config.model.backend == TORCH or model.why_plain_draws is not None
    return Sampler() if is_plain else TritonSampler(model.device)


@torch.inference_mode()
def why_plain_draws(model: LoadedModel) -> str | None:
    """Return the reason why plain torch must draw the tokens, or None if our sampling kernels draw the same tokens.

    The trial also compiles the kernels, so that no request waits for them. Raises RuntimeError if the device is lost.
    """
    number = len(_DRAWS) + 1
    limits = SchedulerConfig(max_running=number, max_step_tokens=number)
    largest = largest_batch(limits, model.model_info, block_size=1)
    first, *others = largest.scheduled
    varied = [
        ScheduledSequence(item.request_id, item.token_ids, item.start, item.block_ids, True, sampling)
        for item, sampling in zip(others, _DRAWS, strict=True)
    ]
    batch = replace(largest, scheduled=(first, *varied))
    random = torch.Generator().manual_seed(0)
    logits = (20 * torch.rand(number, model.model_info.vocab_size, generator=random)).to(model.device, model.dtype)
    expected = draw_tokens(batch, Prediction(logits), Sampler()).result()
    try:
        found = draw_tokens(batch, Prediction(logits), TritonSampler(model.device)).result()
    except Exception as error:
        if is_lost(model.device):
            raise
        reason = cause_of(error)
    else:
        ours, plain = ([each.logprob for [each] in result.logprobs.values()] for result in (found, expected))
        if found.token_ids == expected.token_ids and all(map(_is_close, ours, plain)):
            return None
        reason = (
            f"the tokens are {found.token_ids}, with log-probabilities {ours}, instead of {expected.token_ids}, {plain}"
        )
    logger.warning("tokens are drawn by plain torch, which is slower: with our kernels, %s", reason)
    return reason


def bytes_for_kv(config: EngineConfig, model: LoadedModel, gpu_share: float) -> int:
    """Return the bytes that the engine's GPU share leaves for KV memory. Raises TooLittleMemory if no block fits."""
    limits, block_size = config.scheduler, config.cache.block_size
    fix = (
        f"Lower scheduler.max_step_tokens ({limits.max_step_tokens:,}) or scheduler.max_running ({limits.max_running})"
    )
    with explaining_out_of_memory("the weights and a step of the largest size", fix):
        needs = model.needs(config, largest_batch(limits, model.model_info, block_size=block_size))
    gpu = gpu_memory(model.device, fraction=config.cache.gpu_memory_fraction, share=gpu_share)
    gpu.check(needs, block_bytes=block_bytes(config.cache, model.in_block, dtype=model.dtype))
    left = gpu.left_for_kv(needs)
    logger.info("GPU memory: %.2f of %.2f GiB may be used; %s; KV memory %.2f GiB",
                gpu.granted / GIB, gpu.total / GIB, needs, left / GIB)  # fmt: skip
    return left


def needs_on_gpu(config: EngineConfig, model: LoadedModel, largest: StepBatch) -> MemoryNeeds:
    """See `LoadedModel.needs`. Measures with one KV block, because a step's memory does not depend on the blocks."""
    is_cuda = model.device.type == "cuda"
    of_slots = 0 if model.adapters is None else num_bytes_of(model.adapters.tensors())
    runner = with_one_block(config, model)
    step = _peak_of(lambda: runner.launch(largest), model.device) + (
        plain_attention_bytes(model.layers.values(), model.model_info.max_model_len, model.dtype)
        if config.model.backend in WITHOUT_TRITON
        else 0
    )
    return MemoryNeeds(
        weights=num_bytes_of(model.tensors()) - of_slots,
        step=step,
        graphs=_of_graphs(config, model) if _is_captured(config, model) else 0,
        workspaces=(_NUM_WORKSPACES - is_cuda) * WORKSPACE_BYTES,
        adapters=_of_adapters(config, model, runner, largest.num_tokens),
    )


def _of_adapters(config: EngineConfig, model: LoadedModel, runner: GraphModelRunner, num_tokens: int) -> int:
    """Return the bytes of adapters, and those that adapters add to a step. The measured step has no adapters."""
    if model.adapters is not None:
        return num_bytes_of(model.adapters.tensors()) + model.adapters.step_bytes(num_tokens)
    most = config.model.max_loaded_adapters
    return 0 if runner.adapting is None or most is None else runner.adapting.most_bytes(most, num_tokens)


def _is_captured(config: EngineConfig, model: LoadedModel) -> bool:
    return config.model.backend in ("auto", GRAPHS) and model.why_not_on(GRAPHS) is None


def _of_graphs(config: EngineConfig, model: LoadedModel) -> int:
    limits = config.scheduler
    decode = [decode_size(num_rows) for num_rows in graph_sizes(limits.max_running)]
    mixed = mixed_sizes(max_rows=limits.max_running, max_tokens=limits.max_step_tokens)
    has_adapters = model.adapters is not None
    largest = [replace(sizes[-1], has_adapters=has_adapters) for sizes in (decode, mixed) if sizes]
    peaks = [_of_captured(config, model, size) for size in largest]
    with AllocatedBytes(model.device) as counted:
        with_one_block(config, model).compute_padding(decode[0])
    num_kernels, num_graphs = counted.num_kernels + model.num_own_kernels, len(decode) + len(mixed)
    num_bytes = graph_bytes(step=max(peaks), num_kernels=num_kernels, num_graphs=num_graphs)
    if model.adapters is None:
        return num_bytes
    num_kernels += model.adapters.num_kernels
    return num_bytes + graph_bytes(step=0, num_kernels=num_kernels, num_graphs=num_graphs)


def _of_captured(config: EngineConfig, model: LoadedModel, size: StepSize) -> int:
    runner = with_one_block(config, model)
    return _peak_of(lambda: runner.compute_padding(size), model.device)


def _peak_of(compute: Callable[[], object], device: torch.device) -> int:
    """Return the peak of the bytes that `compute` allocates, including any that stay allocated after it returns."""
    if device.type != "cuda":
        counted = AllocatedBytes(device)
        with torch.inference_mode(), counted:
            compute()
        return counted.peak
    before: int = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    compute()
    torch.cuda.synchronize(device)
    peak: int = torch.cuda.max_memory_allocated(device)
    return peak - before


def with_one_block(config: EngineConfig, model: LoadedModel) -> GraphModelRunner:
    """Return a runner that can only be used to measure: all sequences share its one KV block and its one state slot."""
    max_blocks = -(-model.model_info.max_model_len // config.cache.block_size)
    attention = _attention(config, model, num_blocks=1, max_blocks=max_blocks)
    return GraphModelRunner(
        model, attention, stateful=_with_states(config, model, attention, 1), max_rows=config.scheduler.max_running,
        capture=None, sampler=_sampler(config, model), may_adapt=config.model.max_loaded_adapters is not None,
    )  # fmt: skip


def _with_states(
    config: EngineConfig, model: LoadedModel, attention: PagedAttention, num_slots: int
) -> StatefulAttention | None:
    """Return the attention together with slots for recurrent states, or None if the model has no recurrent layers."""
    if not model.states:
        return None
    is_plain = config.model.backend in WITHOUT_TRITON
    recurrence = TorchRecurrence() if is_plain else TritonRecurrence(model.device)
    return StatefulAttention(attention, model.states, recurrence, num_slots=num_slots, device=model.device)


def _attention(config: EngineConfig, model: LoadedModel, *, num_blocks: int, max_blocks: int) -> PagedAttention:
    if config.model.backend in WITHOUT_TRITON:
        kind = LibraryAttention if config.model.backend == LIBRARY else TorchAttention
        return model.plain_attention(num_blocks, config.cache.block_size, kind)
    return TritonAttention(
        model.in_block,
        groups=model.groups,
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        max_rows=config.scheduler.max_running,
        max_blocks=max_blocks,
        dtype=stored_dtype(config.cache, model.dtype),
        device=model.device,
        # The meta device runs no kernels, and batch-invariant kernels need the same memory as other kernels.
        batch_invariant=config.model.batch_invariant and model.device.type != "meta",
    )
