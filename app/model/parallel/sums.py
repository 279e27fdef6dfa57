"""Sums over ranks. The bits of a sum do not depend on the place of the number in a tensor.

Each number is therefore added up in the order of the ranks. A ring would add each part of a tensor in another order.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

import torch
from torch._C._distributed_c10d import Store

# The most bytes that a rank reads from all ranks. If a sum needs more, each rank adds a part. vLLM has the same limits:
# a tensor of 2 MiB with 4 ranks, and of 1 MiB with 8 ranks.
_MOST_READ_BYTES = 8 * 2**20
_SYMMETRIC_BYTES = 64 * 2**20  # larger tensors are added in pieces


class SumMethod(Enum):
    """The exchange that ranks use for a sum."""

    ANY_ORDER = auto()  # with two ranks the order does not matter, because a + b is b + a
    WHOLE = auto()  # each rank reads the numbers of all ranks, and adds all of them
    IN_PARTS = auto()  # each rank adds a part of the numbers, and then reads the sums of the other ranks


def sum_method(tensor: torch.Tensor, size: int) -> SumMethod:
    if size <= 2:
        return SumMethod.ANY_ORDER
    is_small = size * tensor.nbytes <= _MOST_READ_BYTES
    return SumMethod.WHOLE if is_small or tensor.numel() % size else SumMethod.IN_PARTS


def in_order(parts: torch.Tensor) -> torch.Tensor:
    """Return the sum over the first dimension, in float32 for floating point numbers. `parts` may be overwritten."""
    total = parts[0].float() if parts.is_floating_point() else parts[0]
    for part in parts[1:]:
        total += part
    return total


class SymmetricSums:
    """Sums by torch's symmetric memory. All cards map this memory over NVLink, and a launch reads other ranks' numbers.

    torch's kernels also add in the order of the ranks, and round after each addition. Not yet run on a GPU.
    """

    def __init__(self, files: Store, rank: int, size: int, device: torch.device) -> None:
        """Allocate the memory, on all ranks together. Raises RuntimeError if NVLink does not connect all cards."""
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
        """Replace each number of a contiguous tensor, in bfloat16 or float32, by its sum over all ranks."""
        operators, flat = torch.ops.symm_mem, tensor.view(-1)
        for piece in torch.split(flat, _SYMMETRIC_BYTES // tensor.itemsize):
            shared = self._memory[: piece.nbytes].view(piece.dtype)
            if self._size * piece.nbytes <= _MOST_READ_BYTES:
                operators.one_shot_all_reduce_copy_out(shared, piece, "sum", self._name, piece)
            else:
                shared.copy_(piece)
                operators.two_shot_all_reduce_(shared, "sum", self._name)
                piece.copy_(shared)
