"""The ranks of one model and what they exchange: gloo on CPUs, NCCL on GPUs.

All ranks call the same functions in the same order. Where one does not, the others wait until the group's timeout and
raise RuntimeError; where one ends, they raise it at once. The group is of no use then.
"""

from __future__ import annotations

import mmap
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import ProcessGroupGloo


class RankGroup:
    """This process's place among the ranks of a model. Rank 0 has the engine."""

    def __init__(self, rank: int, size: int, *, store: Path, device: torch.device, timeout_s: float) -> None:
        """Returns when all ranks have come.

        store: a file that is the same for all ranks and does not exist before, in a folder of this user alone.
        device: of all tensors that are exchanged, this rank's own.
        timeout_s: how long an exchange waits for the other ranks.

        Raises RuntimeError if one does not come in time; `ExchangeCounts` say which.
        """
        assert 0 <= rank < size, f"rank {rank} of {size}"
        self._counts = ExchangeCounts(store, size)
        self._counts.add(rank)
        self.rank = rank
        self.size = size
        self.device = device
        timeout = timedelta(seconds=timeout_s)
        # A file needs no port, on which another user of this machine could be the first to answer.
        files = FileStore(str(store), size)
        files.set_timeout(timeout)
        self._processes = (
            _nccl(files, rank, size, timeout) if device.type == "cuda" else _gloo(files, rank, size, timeout)
        )
        self.minimum(0)  # NCCL connects with the first exchange

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace each number by its sum over all ranks: the same bits on every rank, whatever else is in the tensor.

        The tensor is contiguous and of one shape and type on all ranks.
        """
        self._counts.add(self.rank)
        if self.size <= 2:  # a + b is b + a
            self._processes.allreduce([tensor]).wait()
            return
        # A ring adds the numbers of each part of a tensor in another order, so that a number's sum depends on its
        # place. This order is that of the ranks.
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._processes.allgather([parts], [tensor]).wait()
        total = parts[0].float() if tensor.is_floating_point() else parts[0]
        for part in parts[1:]:
            total = total + part
        tensor.copy_(total)

    def gather_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """Join the ranks' columns: [..., num_columns] of each, of one shape → [..., size * num_columns] on all."""
        self._counts.add(self.rank)
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._processes.allgather([parts], [tensor.contiguous()]).wait()
        return torch.cat(parts, dim=-1)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace the tensor of every rank by that of rank 0. Contiguous, of one shape and type on all ranks."""
        self._counts.add(self.rank)
        self._processes.broadcast(tensor, 0).wait()

    def minimum(self, number: int) -> int:
        """The least of the ranks' numbers."""
        self._counts.add(self.rank)
        least = torch.tensor([number], device=self.device)
        self._processes.allreduce([least], ReduceOp.MIN).wait()
        return int(least.item())

    def maximum(self, number: int) -> int:
        """The greatest of the ranks' numbers."""
        return -self.minimum(-number)

    def set_timeout(self, timeout_s: float) -> None:
        """How long an exchange waits for the other ranks from now on."""
        self._processes.set_timeout(timedelta(seconds=timeout_s))

    def abort(self) -> None:
        """End what this rank waits for in another thread, with an error there. Any thread may call it."""
        self._processes.abort()


class ExchangeCounts:
    """How many exchanges each rank has begun, in a file that all ranks share. Where they hang, it says for which.

    What a device exchanges from a captured graph is not counted.
    """

    def __init__(self, store: Path, size: int) -> None:
        """store: that of the group, beside which the file lies. The first rank that comes makes it."""
        count_bytes = 8
        with open(store.with_name(f"{store.name}-counts"), "a+b", buffering=0) as file:
            os.ftruncate(file.fileno(), size * count_bytes)  # zeros, or what it holds already
            self._counts = memoryview(mmap.mmap(file.fileno(), size * count_bytes)).cast("Q")

    def add(self, rank: int) -> None:
        """Only the rank itself calls it."""
        self._counts[rank] += 1

    def missing(self) -> list[int]:
        """The ranks that have not begun the exchange that others have begun."""
        counts = self._counts.tolist()
        return [rank for rank, count in enumerate(counts) if count < max(counts)]


def _gloo(files: FileStore, rank: int, size: int, timeout: timedelta) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._threads = 1  # one exchange at a time
    return ProcessGroupGloo(files, rank, size, options)


def _nccl(files: FileStore, rank: int, size: int, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(files, rank, size, options)
