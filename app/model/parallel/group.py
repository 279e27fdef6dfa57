"""The exchanges between the ranks of one model: gloo on CPUs; NCCL and torch's symmetric memory for sums on GPUs.

All ranks must call the same functions in the same order. If one rank does not, the other ranks raise ExchangeFailed
after the timeout of the group. If one rank ends, they raise it at once. The group cannot be used afterwards.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import FileStore, GatherOptions, PrefixStore, Store
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import ProcessGroupGloo

from app.errors import ExchangeFailed
from app.model.memory import is_out_of_memory
from app.model.parallel.split_plan import SizesOfRank
from app.model.parallel.sums import SumMethod, SymmetricSums, in_order, sum_method

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RankGroup:
    """The connection of this process to the other ranks of a model. Rank 0 has the engine."""

    def __init__(self, rank: int, size: int, *, store: Path, device: torch.device, timeout_s: float) -> None:
        """Connect to the other ranks. Returns when all ranks have connected.

        store: a file that all ranks share and that does not exist yet, in a folder that only this user can open.
        device: this rank's device, which holds all tensors that are exchanged.
        timeout_s: the longest wait of an exchange for the other ranks, in seconds.

        Raises RuntimeError if a rank does not connect in time. `ExchangeCounts` reports the missing ranks.
        """
        assert 0 <= rank < size, f"rank {rank} of {size}"
        self._counts = ExchangeCounts(store, size)
        self._counts.add(rank)
        self.rank = rank
        self.size = size
        self.device = device
        self._sizes = SizesOfRank(size)
        self._number = torch.zeros(1, dtype=torch.long, device=device)
        timeout = timedelta(seconds=timeout_s)
        # A file needs no port. Another user of this machine could answer on a port first.
        files = FileStore(str(store), size)
        files.set_timeout(timeout)
        if device.type == "cuda":
            # Captured exchanges have their own communicator. Other engines have hung with one for both kinds.
            self._all = tuple(_nccl(PrefixStore(name, files), rank, size, timeout) for name in ("eager", "captured"))
        else:
            self._all = (_gloo(files, rank, size, timeout),)
        self._processes: Any = self._all[0]
        with self.capturing():
            self.minimum(0)  # NCCL connects at the first exchange
        self._symmetric: SymmetricSums | None = None
        if device.type == "cuda":
            linked = PrefixStore("symmetric", files)
            try:
                self._symmetric = self.together(lambda: SymmetricSums(linked, rank, size, device))
            except (RuntimeError, ImportError, AttributeError) as error:  # other versions of torch have other names
                logger.info("sums go through NCCL and not through symmetric memory: %s", error)

    def capturing(self) -> AbstractContextManager[None]:
        """Use the communicator for captured exchanges: around the capture of a CUDA graph and its warm-up."""
        return self._with(self._all[-1])

    def alone(self) -> AbstractContextManager[None]:
        """Only allocate the memory of exchanges: around work that may fail on some ranks, so that no rank waits."""
        return self._with(None)

    @contextmanager
    def _with(self, processes: Any) -> Iterator[None]:
        self._processes = processes
        try:
            yield
        finally:
            self._processes = self._all[0]

    def together(self, work: Callable[[], T]) -> T:
        """Do work on all ranks that waits for no other rank. If the work fails on one rank, every rank raises an error.

        `is_out_of_memory` says on every rank whether the reason is a lack of memory.
        """
        done, no_room, failed = 2, 1, 0
        outcome, error = done, None
        try:
            found = work()
        except Exception as raised:  # a compiler may raise any error
            outcome, error = (no_room if is_out_of_memory(raised) else failed), raised
        worst = self.minimum(outcome)
        if worst == done:
            return found
        if error is None or worst < outcome:
            error = ExchangeFailed(("failed", "out of memory")[worst] + " on another rank")
        raise error

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace each number by its sum over all ranks. The bits depend neither on the rank nor on the other numbers.

        The tensor must be contiguous, and have the same shape and type on all ranks.
        """
        if self._processes is None:
            self._sizes.all_reduce(tensor)
            return
        self._counts.add(self.rank)
        if self._symmetric is not None:
            self._symmetric.add(tensor)
            return
        way, flat, size = sum_method(tensor, self.size), tensor.view(-1), self.size
        if way is SumMethod.ANY_ORDER:
            _exchange(lambda: self._processes.allreduce([tensor]))
        elif way is SumMethod.WHOLE:
            parts = flat.new_empty(size, len(flat))
            _exchange(lambda: self._processes._allgather_base(parts.view(-1), flat))
            flat.copy_(in_order(parts))
        else:
            parts = flat.new_empty(size, len(flat) // size)
            _exchange(lambda: self._processes.alltoall_base(parts.view(-1), flat, [], []))
            _exchange(lambda: self._processes._allgather_base(flat, in_order(parts).to(flat.dtype)))

    def gather_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """Join the columns of all ranks: [..., num_columns] of one shape → [..., size * num_columns] on all ranks."""
        if self._processes is None:
            return self._sizes.gather_columns(tensor)
        self._counts.add(self.rank)
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        _exchange(lambda: self._processes.allgather([parts], [tensor.contiguous()]))
        return torch.cat(parts, dim=-1)

    def gather_at_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Join the columns of all ranks on rank 0. The other ranks get their own columns back."""
        if self._processes is None:
            return self._sizes.gather_columns(tensor) if self.rank == 0 else tensor
        self._counts.add(self.rank)
        tensor, options = tensor.contiguous(), GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else []
        _exchange(lambda: self._processes.gather([parts] if parts else [], [tensor], options))
        return torch.cat(parts, dim=-1) if parts else tensor

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy the tensor of rank 0 to all ranks. It must be contiguous, and have one shape and type on all ranks."""
        self._counts.add(self.rank)
        _exchange(lambda: self._processes.broadcast(tensor, 0))

    def minimum(self, number: int) -> int:
        """Return the least of the numbers of all ranks."""
        self._counts.add(self.rank)
        self._number.fill_(number)  # allocated at the start, so that this works without free memory
        _exchange(lambda: self._processes.allreduce([self._number], ReduceOp.MIN))
        return int(self._number.item())

    def set_timeout(self, timeout_s: float) -> None:
        """Change how many seconds an exchange waits for the other ranks."""
        for processes in self._all:
            processes.set_timeout(timedelta(seconds=timeout_s))

    def abort(self) -> None:
        """Fail the exchanges that other threads of this rank wait for. Any thread may call this method."""
        for processes in self._all:
            processes.abort()


def _exchange(begin: Callable[[], Any]) -> None:
    """Run an exchange. Raises ExchangeFailed if another rank has ended, or does not take part in time."""
    try:
        begin().wait()
    except RuntimeError as error:
        raise ExchangeFailed(f"{error}") from error


class ExchangeCounts:
    """Counts the exchanges that each rank has begun, in a file that all ranks share, to find the rank that hangs.

    Exchanges in a captured graph are not counted.
    """

    def __init__(self, store: Path, size: int) -> None:
        """Open the file of counts beside the `store` of the group. The first rank creates the file."""
        count_bytes = 8
        with open(store.with_name(f"{store.name}-counts"), "a+b", buffering=0) as file:
            os.ftruncate(file.fileno(), size * count_bytes)  # adds zeros to a new file, and keeps existing counts
            self._counts = memoryview(mmap.mmap(file.fileno(), size * count_bytes)).cast("Q")

    def add(self, rank: int) -> None:
        """Count an exchange of a rank. Only the rank itself may call this method."""
        self._counts[rank] += 1

    def missing(self) -> list[int]:
        """Return the ranks that have begun fewer exchanges than another rank."""
        counts = self._counts.tolist()
        return [rank for rank, count in enumerate(counts) if count < max(counts)]


def _gloo(files: Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._threads = 1  # one exchange at a time
    return ProcessGroupGloo(files, rank, size, options)


def _nccl(files: Store, rank: int, size: int, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(files, rank, size, options)
