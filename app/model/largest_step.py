"""What a model needs of a GPU's memory beside its KV: found by computing the largest step once.

On a GPU its memory is that of torch's allocator. On any other device it is counted operator by operator, also on the
meta device, where it is a prediction from the model's configuration alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from app.config import EngineConfig
from app.engine.batch import Batch
from app.model.allocated_bytes import AllocatedBytes, num_bytes_of
from app.model.cuda.attention import TritonAttention
from app.model.cuda.captured_inputs import StepSize, decode_size, graph_sizes, mixed_sizes
from app.model.cuda.decoder import num_kernels_of
from app.model.cuda.graph_runner import GraphModelRunner
from app.model.cuda.sampler import TritonLogprobs, TritonSampler
from app.model.loader import LoadedModel
from app.model.memory import WORKSPACE_BYTES, MemoryNeeds, graph_bytes

# cuBLAS has a workspace for each thread and stream: those of the thread that builds the engine, of the engine's own
# thread, and of the stream on which graphs are captured. On a GPU the first is part of the step that was computed.
_NUM_WORKSPACES = 3
_KERNELS_OF_ATTENTION = 4  # of ours in a layer of a mixed step; they are no operators of torch


def needs_of(config: EngineConfig, model: LoadedModel, largest: Batch) -> MemoryNeeds:
    """Measured on a GPU; elsewhere counted. largest: the batch that takes most.

    The KV memory is a single block here: sizes of steps do not depend on what it holds.
    """
    is_cuda = model.device.type == "cuda"
    weights = num_bytes_of(model.tensors())
    runner = with_one_block(config, model)
    step = _peak_of(lambda: runner.launch(largest), model.device)
    return MemoryNeeds(
        weights=weights,
        step=step,
        graphs=_of_graphs(config, model) if config.model.backend != "torch" else 0,
        workspaces=(_NUM_WORKSPACES - is_cuda) * WORKSPACE_BYTES,
    )


def _of_graphs(config: EngineConfig, model: LoadedModel) -> int:
    limits = config.scheduler
    decode = [decode_size(num_rows) for num_rows in graph_sizes(limits.max_running)]
    mixed = mixed_sizes(max_rows=limits.max_running, max_tokens=limits.max_step_tokens)
    peaks = [_of_captured(config, model, sizes[-1]) for sizes in (decode, mixed) if sizes]
    with AllocatedBytes(model.device) as counted:
        with_one_block(config, model).compute_padding(decode[0])
    of_ours = _KERNELS_OF_ATTENTION * len(model.layers) if model.joined is None else num_kernels_of(model.joined)
    num_kernels = counted.num_kernels + of_ours
    return graph_bytes(step=max(peaks), num_kernels=num_kernels, num_graphs=len(decode) + len(mixed))


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
        dtype=model.dtype,
        device=model.device,
        # On the meta device no kernel runs; those that keep the order of sums take no other memory.
        batch_invariant=config.model.batch_invariant and model.device.type != "meta",
    )
    return GraphModelRunner(
        model, attention, max_rows=max_rows, capture=None, sample=TritonSampler(model.device),
        compute_logprobs=TritonLogprobs(model.device),
    )  # fmt: skip
