"""What a model needs of memory beside its KV: on a GPU found by computing the largest step once.

There its memory is that of torch's allocator. On any other device it is counted operator by operator, also on the
meta device, where it is a prediction from the model's configuration alone. Of native code on a CPU, where no operator
is seen, it follows from sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from app.config import EngineConfig
from app.engine.batch import StepBatch
from app.model.allocated_bytes import AllocatedBytes, num_bytes_of
from app.model.cpu.decoder import buffer_bytes
from app.model.cuda.attention import TritonAttention
from app.model.cuda.captured_inputs import StepSize, decode_size, graph_sizes, mixed_sizes
from app.model.cuda.decoder import num_kernels_of
from app.model.cuda.graph_runner import GraphModelRunner
from app.model.cuda.sampler import TritonLogprobs, TritonSampler
from app.model.kv_cache import stored_dtype
from app.model.loader import LoadedModel
from app.model.memory import PROCESS_BYTES, WORKSPACE_BYTES, MemoryNeeds, graph_bytes


def needs_of(config: EngineConfig, model: LoadedModel, largest: StepBatch) -> MemoryNeeds:
    """Measured on a GPU; elsewhere counted. largest: the batch that takes most.

    The KV memory is a single block here: sizes of steps do not depend on what it holds.
    """
    is_cuda = model.device.type == "cuda"
    of_slots = 0 if model.adapters is None else num_bytes_of(model.adapters.tensors())
    runner = with_one_block(config, model)
    step = _peak_of(lambda: runner.launch(largest), model.device)
    # cuBLAS has a workspace for each thread and stream: those of the thread that builds the engine, of the engine's own
    # thread, and of the stream on which graphs are captured. On a GPU the first is part of the step that was computed.
    num_workspaces = 3
    return MemoryNeeds(
        weights=num_bytes_of(model.tensors()) - of_slots,
        step=step,
        graphs=_of_graphs(config, model) if config.model.backend != "torch" else 0,
        workspaces=(num_workspaces - is_cuda) * WORKSPACE_BYTES,
        # The largest step has none: what it would take for them is counted here.
        adapters=0 if model.adapters is None else of_slots + model.adapters.step_bytes(largest.num_tokens),
    )


def needs_of_native(model: LoadedModel, largest: StepBatch) -> MemoryNeeds:
    """Of a CPU's memory, by the weights' sizes: they may be on the meta device. largest: the batch that takes most."""
    assert model.native is not None, "transformers' code is not counted on a CPU"
    num_sampled, vocab_size = len(largest.sampled), model.facts.vocab_size
    num_rows = num_sampled + sum(len(item.targets) for item in largest.scheduled)
    # Logits of all rows; beside scored prompts a copy of those that are sampled; these with penalties and grammars.
    logits = (num_rows + 2 * num_sampled) * vocab_size * torch.float32.itemsize
    kept = buffer_bytes(model.native, num_tokens=largest.num_scheduled_tokens, num_positions=model.facts.max_model_len)
    return MemoryNeeds(
        weights=num_bytes_of(model.tensors()), step=kept + logits, graphs=0, workspaces=0, context=PROCESS_BYTES
    )


def _of_graphs(config: EngineConfig, model: LoadedModel) -> int:
    limits = config.scheduler
    decode = [decode_size(num_rows) for num_rows in graph_sizes(limits.max_running)]
    mixed = mixed_sizes(max_rows=limits.max_running, max_tokens=limits.max_step_tokens)
    has_adapters = model.adapters is not None
    largest = [replace(sizes[-1], has_adapters=has_adapters) for sizes in (decode, mixed) if sizes]
    peaks = [_of_captured(config, model, size) for size in largest]
    with AllocatedBytes(model.device) as counted:
        with_one_block(config, model).compute_padding(decode[0])
    kernels_of_attention = 4  # of ours in a layer of a mixed step; they are no operators of torch
    of_ours = kernels_of_attention * len(model.layers) if model.joined is None else num_kernels_of(model.joined)
    num_kernels, num_graphs = counted.num_kernels + of_ours, len(decode) + len(mixed)
    num_bytes = graph_bytes(step=max(peaks), num_kernels=num_kernels, num_graphs=num_graphs)
    if model.adapters is None:
        return num_bytes
    num_kernels += model.adapters.num_kernels
    return num_bytes + graph_bytes(step=0, num_kernels=num_kernels, num_graphs=num_graphs)


def _of_captured(config: EngineConfig, model: LoadedModel, size: StepSize) -> int:
    runner = with_one_block(config, model)
    return _peak_of(lambda: runner.compute_padding(size), model.device)


def _peak_of(compute: Callable[[], object], device: torch.device) -> int:
    """The most bytes that some work had allocated at once, what it leaves behind included."""
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
    """A runner with KV memory of a single block, in which all sequences may be at once."""
    block_size, max_rows = config.cache.block_size, config.scheduler.max_running
    attention = TritonAttention(
        model.layers,
        num_blocks=1,
        block_size=block_size,
        max_rows=max_rows,
        max_blocks=-(-model.facts.max_model_len // block_size),
        dtype=stored_dtype(config.cache, model.dtype),
        device=model.device,
        # On the meta device no kernel runs; those that keep the order of sums take no other memory.
        batch_invariant=config.model.batch_invariant and model.device.type != "meta",
    )
    return GraphModelRunner(
        model, attention, max_rows=max_rows, capture=None, sample=TritonSampler(model.device),
        compute_logprobs=TritonLogprobs(model.device),
    )  # fmt: skip
