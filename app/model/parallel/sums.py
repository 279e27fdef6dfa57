"""How ranks add up the numbers that each has a part of: the same bits for a number wherever it stands in a tensor.

So each number is added in the order of the ranks. A ring adds those of each part of a tensor in another order.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

import torch
from torch._C._distributed_c10d import Store

# Where a rank would read more of all ranks together, each adds a part. vLLM's limits are 2 MiB of 4 ranks, 1 MiB of 8.
_MOST_READ_BYTES = 8 * 2**20
_SYMMETRIC_BYTES = 64 * 2**20  # larger tensors are added in pieces


class SumWay(Enum):
    """What the ranks exchange for a sum."""

    ANY_ORDER = auto()  # of two ranks: a + b is b + a
    WHOLE = auto()  # each rank reads the numbers of all, and adds all
    IN_PARTS = auto()  # each adds a part of the numbers, then reads what the others have added


def way_of_sum(tensor: torch.Tensor, size: int) -> SumWay:
    if size <= 2:
        return SumWay.ANY_ORDER
    is_small = size * tensor.nbytes <= _MOST_READ_BYTES
    return SumWay.WHOLE if is_small or tensor.numel() % size else SumWay.IN_PARTS


def in_order(parts: torch.Tensor) -> torch.Tensor:
    """The sum over [size, ...], which may be overwritten; of floating point numbers in float32."""
    total = parts[0].float() if parts.is_floating_point() else parts[0]
    for part in parts[1:]:
        total += part
    return total


class SymmetricSums:
    """Sums by torch's symmetric memory, which all cards map over NVLink: a launch reads what the others have written.

    Its kernels add in the order of the ranks, too, and round after each addition. No GPU has run it yet.
    """

    def __init__(self, files: Store, rank: int, size: int, device: torch.device) -> None:
        """All ranks call it together. Raises RuntimeError where NVLink does not connect each card with all others."""
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
