"""How the memory of a GPU is divided: what a replica needs beside its KV memory, and what is left for that.

The same functions size a replica when it starts and predict it from a model's configuration (`deployments/plan`).
They work on numbers alone and run on any machine. None of the constants has been measured by this project on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from app.config import GIB
from app.errors import TooLittleMemory, first_line
from app.model.attention import StateShape
from app.progress import tell

# The CUDA context with the code of all kernels, outside of torch's allocator: 0.5 GiB on an A100 (the baseline in
# https://github.com/JBjoernskov/Twin4Build/issues/134), and some for kernels that are compiled later.
CONTEXT_BYTES = GIB * 6 // 10
# What torch gives cuBLAS on each stream: 32 MiB on Hopper and newer, 8 MiB on older cards.
WORKSPACE_BYTES = 32 * 1024**2

# A replica's process on a CPU without its model: 0.44 GiB for Python with torch, transformers and Ray, the rest for
# buffers of threads and what requests hold.
PROCESS_BYTES = GIB * 6 // 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """Bytes on a GPU, or on a machine with CPUs, that a replica needs beside its KV memory."""

    weights: int
    step: int  # the largest step: activations, attention's partial results, logits, sampling
    graphs: int  # memory of the captured steps, and the graphs themselves
    workspaces: int  # of libraries
    context: int = CONTEXT_BYTES  # on a CPU the process
    adapters: int = 0  # LoRA adapters that are loaded; on a GPU those that may be

    @property
    def total(self) -> int:
        return self.weights + self.step + self.graphs + self.workspaces + self.context + self.adapters

    def __str__(self) -> str:
        parts = ("weights", "step", "graphs", "workspaces", "context", *(["adapters"] if self.adapters else []))
        return ", ".join(f"{name} {getattr(self, name) / GIB:.2f}" for name in parts) + " GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """A GPU's memory, and the part of it that one replica may take."""

    total: int
    fraction: float = 0.9  # `cache.gpu_memory_fraction`
    share: float = 1.0  # `replicas.num_gpus`: the part of the card that is this replica's; others have the rest
    used_by_others: int = 0  # beside torch's allocator in this process; the own context counts here too

    @property
    def granted(self) -> int:
        """Bytes for everything that this replica has."""
        return int(self.total * self.share * self.fraction)

    def left_for_kv(self, needs: MemoryNeeds) -> int:
        """Bytes for KV memory; negative where as much is missing.

        The replicas with which it shares the card may use theirs: only what is used beyond that is subtracted.
        """
        of_others = max(0, self.used_by_others - needs.context)
        beyond_their_share = max(0, of_others - int(self.total * (1 - self.share)))
        return self.granted - needs.total - beyond_their_share

    def check(self, needs: MemoryNeeds, *, block_bytes: int) -> None:
        """Raises TooLittleMemory, with the numbers, if not even one block fits beside the needs."""
        left = self.left_for_kv(needs)
        if left >= block_bytes:
            return
        of = f"{self.total / GIB:.2f} GiB" if self.share == 1 else f"{self.share:g} of {self.total / GIB:.2f} GiB"
        others = max(0, self.granted - needs.total - left)
        raise TooLittleMemory(
            f"cache.gpu_memory_fraction={self.fraction:g} of this GPU ({of}) is {self.granted / GIB:.2f} GiB"
            + (f", of which other programs use {others / GIB:.2f} GiB" if others else "")
            + f"; beside KV memory the model needs {needs.total / GIB:.2f} GiB ({needs}), and one KV block "
            f"{block_bytes / GIB:.6f} GiB: {(block_bytes - left) / GIB:.2f} GiB are missing. Lower "
            f"scheduler.max_step_tokens or scheduler.max_running, raise "
            + ("" if self.share == 1 else "replicas.num_gpus or ")
            + "gpu_memory_fraction, or serve a smaller model"
        )


def gpu_memory(device: torch.device, *, fraction: float, share: float) -> GpuMemory:
    """The memory of a CUDA device as it is now. What torch keeps without using it is given back first."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used_by_others = total - free - torch.cuda.memory_reserved(device)
    return GpuMemory(total=total, fraction=fraction, share=share, used_by_others=used_by_others)


def graph_bytes(*, step: int, num_kernels: int, num_graphs: int) -> int:
    """Memory of captured steps.

    step: bytes that the largest of them takes, its logits included; the others fit into its memory.
    num_kernels: launches in one step.
    """
    # One kernel in a graph that can be replayed (https://github.com/NVIDIA/cccl/pull/3768).
    graph_node_bytes = 10 * 1024
    return step + num_graphs * num_kernels * graph_node_bytes


def state_bytes(states: Iterable[StateShape]) -> int:
    """What a slot takes, which holds the states of all recurrent layers for one sequence; 0 without such layers."""
    return sum(shape.num_bytes for shape in states)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had too little memory; the CUDA driver's own error has no class of its own."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


@contextmanager
def loading_weights() -> Iterator[None]:
    """Around the load of a model's weights. Raises TooLittleMemory as `refusing_to_run_short`."""
    tell("loading the weights")
    with refusing_to_run_short("the weights", "Serve a smaller model, or set model.dtype: bfloat16"):
        yield


@contextmanager
def refusing_to_run_short(doing: str, fix: str) -> Iterator[None]:
    """Around work at the start of a replica.

    Raises TooLittleMemory, with how much is free and what to set, if the device has too little memory for it.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise TooLittleMemory(f"the GPU's memory does not hold {doing}: {first_line(error)}. {fix}") from error
