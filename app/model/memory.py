"""Divides a GPU's memory between KV memory and everything else that a replica needs.

The same functions size a replica at startup and predict its memory from a model's configuration (`deployments/plan`).
They need only numbers, so they run on any machine. This project has not yet measured any of the constants on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from app.config import GIB
from app.errors import TooLittleMemory, first_line
from app.model.attention import StateShape
from app.progress import report_step

# The CUDA context with the code of all kernels, which torch's allocator does not count: 0.5 GiB on an A100 (the
# baseline in https://github.com/JBjoernskov/Twin4Build/issues/134) and a reserve for kernels that are compiled later.
CONTEXT_BYTES = GIB * 6 // 10
# torch allocates this workspace for cuBLAS on each stream: 32 MiB on Hopper and newer cards, 8 MiB on older ones.
WORKSPACE_BYTES = 32 * 1024**2

# A CPU replica's process without its model: 0.44 GiB for Python with torch, transformers and Ray; the rest is reserved
# for thread buffers and requests.
PROCESS_BYTES = GIB * 6 // 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """The bytes that a replica needs in addition to its KV memory, on a GPU or on a CPU."""

    weights: int
    step: int  # the largest step: activations, partial results of attention, logits, sampling
    graphs: int  # the scratch memory of captured steps, and the graphs themselves
    workspaces: int  # scratch memory of libraries such as cuBLAS
    context: int = CONTEXT_BYTES  # the CUDA context; on a CPU, the process without its model
    adapters: int = 0  # loaded LoRA adapters; on a GPU, as many as may be loaded

    @property
    def total(self) -> int:
        return self.weights + self.step + self.graphs + self.workspaces + self.context + self.adapters

    def __str__(self) -> str:
        parts = ("weights", "step", "graphs", "workspaces", "context", *(["adapters"] if self.adapters else []))
        return ", ".join(f"{name} {getattr(self, name) / GIB:.2f}" for name in parts) + " GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """A GPU's memory in bytes, and the part that one replica may use."""

    total: int
    fraction: float = 0.9  # `cache.gpu_memory_fraction`
    share: float = 1.0  # this replica's share of the card, `replicas.num_gpus`
    used_by_others: int = 0  # everything outside this process's torch allocator, including the process's own context

    @property
    def granted(self) -> int:
        """The bytes that this replica may use in total."""
        return int(self.total * self.share * self.fraction)

    def left_for_kv(self, needs: MemoryNeeds) -> int:
        """Return the bytes left for KV memory, which are negative if the needs alone do not fit.

        Other replicas on the card may use their own shares; only their use beyond that is subtracted.
        """
        of_others = max(0, self.used_by_others - needs.context)
        beyond_their_share = max(0, of_others - int(self.total * (1 - self.share)))
        return self.granted - needs.total - beyond_their_share

    def check(self, needs: MemoryNeeds, *, block_bytes: int) -> None:
        """Raise TooLittleMemory if the needs leave no memory for even one block. The message lists all numbers."""
        left = self.left_for_kv(needs)
        if left >= block_bytes:
            return
        of = f"{self.total / GIB:.2f} GiB" if self.share == 1 else f"{self.share:g} of {self.total / GIB:.2f} GiB"
        others = max(0, self.granted - needs.total - left)
        raise TooLittleMemory(
            f"cache.gpu_memory_fraction={self.fraction:g} of this GPU ({of}) is {self.granted / GIB:.2f} GiB"
            + (f", of which other programs use {others / GIB:.2f} GiB" if others else "")
            + f"; besides KV memory, the model needs {needs.total / GIB:.2f} GiB ({needs}), and one KV block "
            f"{block_bytes / GIB:.6f} GiB: {(block_bytes - left) / GIB:.2f} GiB are missing. Lower "
            f"scheduler.max_step_tokens or scheduler.max_running, raise "
            + ("" if self.share == 1 else "replicas.num_gpus or ")
            + "gpu_memory_fraction, or serve a smaller model"
        )


def gpu_memory(device: torch.device, *, fraction: float, share: float) -> GpuMemory:
    """Free the memory that torch caches, and return the current use of a CUDA device."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used_by_others = total - free - torch.cuda.memory_reserved(device)
    return GpuMemory(total=total, fraction=fraction, share=share, used_by_others=used_by_others)


def graph_bytes(*, step: int, num_kernels: int, num_graphs: int) -> int:
    """Return the bytes of captured steps and their graphs.

    step: bytes of the largest step, including its logits; smaller steps reuse this memory.
    num_kernels: launches in one step.
    """
    # Bytes of one kernel in a replayable graph (https://github.com/NVIDIA/cccl/pull/3768).
    graph_node_bytes = 10 * 1024
    return step + num_graphs * num_kernels * graph_node_bytes


def state_bytes(states: Iterable[StateShape]) -> int:
    """Return the bytes of one state slot, which stores the states of all recurrent layers for one sequence."""
    return sum(shape.num_bytes for shape in states)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device ran out of memory. Errors of the CUDA driver are only recognisable by their message."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


@contextmanager
def loading_weights() -> Iterator[None]:
    """Wrap the loading of a model's weights, and report progress. Raises TooLittleMemory."""
    report_step("loading the weights")
    with explaining_out_of_memory("the weights", "Serve a smaller model, or set model.dtype: bfloat16"):
        yield


@contextmanager
def explaining_out_of_memory(doing: str, fix: str) -> Iterator[None]:
    """Wrap work at a replica's startup to explain a lack of memory.

    Raises TooLittleMemory, with the allocator's message and the fix, if the device runs out of memory.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise TooLittleMemory(f"the GPU has too little memory for {doing}: {first_line(error)}. {fix}") from error
