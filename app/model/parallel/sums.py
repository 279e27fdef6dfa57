"""Sums over ranks whose bits do not depend on a number's position in the tensor.

Each sum is computed in the order of the ranks. A ring, as used by other libraries, would add each part of a tensor in a
different order, so a sequence's output would depend on the other sequences in its step.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

import torch
from torch._C._distributed_c10d import Store

# The most bytes that a rank reads from all ranks to add a whole tensor; larger ones are added in parts. As in vLLM, the
# limit is a tensor of 2 MiB with 4 ranks, and of 1 MiB with 8.
_MOST_READ_BYTES = 8 * 2**20
_SYMMETRIC_BYTES = 64 * 2**20  # larger tensors are added piece by piece


class SumMethod(Enum):
    """How ranks exchange the numbers of a sum."""

    ANY_ORDER = auto()  # for two ranks, because a + b equals b + a
    WHOLE = auto()  # each rank reads all ranks' numbers and adds all of them
    IN_PARTS = auto()  # each rank adds a part of the numbers, then reads the other ranks' sums


def sum_method(tensor: torch.Tensor, size: int) -> SumMethod:
    if size <= 2:
        return SumMethod.ANY_ORDER
    is_small = size * tensor.nbytes <= _MOST_READ_BYTES
    return SumMethod.WHOLE if is_small or tensor.numel() % size else SumMethod.IN_PARTS


def in_order(parts: torch.Tensor) -> torch.Tensor:
    """Return the sum over the first dimension, computed in float32 for floating point numbers. May modify `parts`."""
    total = parts[0].float() if parts.is_floating_point() else parts[0]
    for part in parts[1:]:
        total += part
    return total


class SymmetricSums:
    """Sums with torch's symmetric memory, which all cards map over NVLink, so that one launch reads all ranks' numbers.

    torch's kernels also add in the order of the ranks, but round after each addition. Not yet run on a GPU.
    """

    def __init__(self, files: Store, rank: int, size: int, device: torch.device) -> None:
        """Allocate the memory; all ranks must call this. Raises RuntimeError if NVLink does not connect all cards."""
        from torch._C import _distributed_c10d as c10d
        from torch.distributed._symmetric_memory import empty, rendezvous
        from torch.distributed.distributed_c10d import GroupName

        detect: Any = c10d._detect_dma_connectivity  # type: ignore[attr-defined]
        links: list[list[int]] = detect(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix
        if not all(links[one][other] for one in range(size) for other in range(size) if one != other):
            raise RuntimeError("NVLink does not connect all cards")
        self._size = size
        self._name = GroupName("carousel-ranks")
        group = c10d.ProcessGroup(files, rank, size)
        group._set_group_name(self._name)
        c10d._register_process_group(self._name, group)
        self._memory = empty(_SYMMETRIC_BYTES, dtype=torch.uint8, device=device)
        rendezvous(self._memory, self._name)

    def add(self, tensor: torch.Tensor) -> None:
        """Replace each number with its sum over all ranks. tensor: contiguous, in bfloat16 or float32."""
        operators, flat = torch.ops.symm_mem, tensor.view(-1)
        for piece in torch.split(flat, _SYMMETRIC_BYTES // tensor.itemsize):
            shared = self._memory[: piece.nbytes].view(piece.dtype)
            if self._size * piece.nbytes <= _MOST_READ_BYTES:
                operators.one_shot_all_reduce_copy_out(shared, piece, "sum", self._name, piece)
            else:
                shared.copy_(piece)
                operators.two_shot_all_reduce_(shared, "sum", self._name)
                piece.copy_(shared)
