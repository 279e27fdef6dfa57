"""The ranks of one model and what they exchange: gloo on CPUs; on GPUs NCCL, and torch's symmetric memory for sums.

All ranks call the same functions in the same order. Where one does not, the others wait until the group's timeout and
raise ExchangeFailed; where one ends, they raise it at once. The group is of no use then.
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
from app.model.parallel.sums import SumWay, SymmetricSums, in_order, way_of_sum

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
        self._sizes = SizesOfRank(size)
        self._number = torch.zeros(1, dtype=torch.long, device=device)
        timeout = timedelta(seconds=timeout_s)
        # A file needs no port, on which another user of this machine could be the first to answer.
        files = FileStore(str(store), size)
        files.set_timeout(timeout)
        if device.type == "cuda":
            # Captured exchanges have a communicator of their own: sharing one with eager ones has hung other engines.
            self._all = tuple(_nccl(PrefixStore(name, files), rank, size, timeout) for name in ("eager", "captured"))
        else:
            self._all = (_gloo(files, rank, size, timeout),)
        self._processes: Any = self._all[0]
        with self.capturing():
            self.minimum(0)  # NCCL connects with the first exchange
        self._symmetric: SymmetricSums | None = None
        if device.type == "cuda":
            linked = PrefixStore("symmetric", files)
            try:
                self._symmetric = self.together(lambda: SymmetricSums(linked, rank, size, device))
            except (RuntimeError, ImportError, AttributeError) as error:  # another torch may have other names for it
                logger.info("sums go through NCCL and not through symmetric memory: %s", error)

    def capturing(self) -> AbstractContextManager[None]:
        """Around exchanges that go into a CUDA graph, and what warms them up."""
        return self._with(self._all[-1])

    def alone(self) -> AbstractContextManager[None]:
        """Around work that may fail on some of the ranks: exchanges take their memory, and no rank waits."""
        return self._with(None)

    @contextmanager
    def _with(self, processes: Any) -> Iterator[None]:
        self._processes = processes
        try:
            yield
        finally:
            self._processes = self._all[0]

    def together(self, work: Callable[[], T]) -> T:
        """Do what exchanges nothing that is waited for. Where it fails on one rank it fails on all.

        Raises an error, of which `is_out_of_memory` says on all ranks whether memory has ended.
        """
        done, no_room, failed = 2, 1, 0
        outcome, error = done, None
        try:
            found = work()
        except Exception as raised:  # of a compiler, too
            outcome, error = (no_room if is_out_of_memory(raised) else failed), raised
        worst = self.minimum(outcome)
        if worst == done:
            return found
        if error is None or worst < outcome:
            error = ExchangeFailed(("failed", "out of memory")[worst] + " on another rank")
        raise error

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace each number by its sum over all ranks: the same bits on every rank, whatever else is in the tensor.

        The tensor is contiguous and of one shape and type on all ranks.
        """
        if self._processes is None:
            self._sizes.all_reduce(tensor)
            return
        self._counts.add(self.rank)
        if self._symmetric is not None:
            self._symmetric.add(tensor)
            return
        way, flat, size = way_of_sum(tensor, self.size), tensor.view(-1), self.size
        if way is SumWay.ANY_ORDER:
            _exchange(lambda: self._processes.allreduce([tensor]))
        elif way is SumWay.WHOLE:
            parts = flat.new_empty(size, len(flat))
            _exchange(lambda: self._processes._allgather_base(parts.view(-1), flat))
            flat.copy_(in_order(parts))
        else:
            parts = flat.new_empty(size, len(flat) // size)
            _exchange(lambda: self._processes.alltoall_base(parts.view(-1), flat, [], []))
            _exchange(lambda: self._processes._allgather_base(flat, in_order(parts).to(flat.dtype)))

    def gather_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """Join the ranks' columns: [..., num_columns] of each, of one shape → [..., size * num_columns] on all."""
        if self._processes is None:
            return self._sizes.gather_columns(tensor)
        self._counts.add(self.rank)
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        _exchange(lambda: self._processes.allgather([parts], [tensor.contiguous()]))
        return torch.cat(parts, dim=-1)

    def gather_at_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same on rank 0 alone; the others have their own columns."""
        if self._processes is None:
            return self._sizes.gather_columns(tensor) if self.rank == 0 else tensor
        self._counts.add(self.rank)
        tensor, options = tensor.contiguous(), GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else []
        _exchange(lambda: self._processes.gather([parts] if parts else [], [tensor], options))
        return torch.cat(parts, dim=-1) if parts else tensor

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace the tensor of every rank by that of rank 0. Contiguous, of one shape and type on all ranks."""
        self._counts.add(self.rank)
        _exchange(lambda: self._processes.broadcast(tensor, 0))

    def minimum(self, number: int) -> int:
        """The least of the ranks' numbers."""
        self._counts.add(self.rank)
        self._number.fill_(number)  # it has its memory also where there is none left
        _exchange(lambda: self._processes.allreduce([self._number], ReduceOp.MIN))
        return int(self._number.item())

    def set_timeout(self, timeout_s: float) -> None:
        """How long an exchange waits for the other ranks from now on."""
        for processes in self._all:
            processes.set_timeout(timedelta(seconds=timeout_s))

    def abort(self) -> None:
        """End what this rank waits for in another thread, with an error there. Any thread may call it."""
        for processes in self._all:
            processes.abort()


def _exchange(begin: Callable[[], Any]) -> None:
    """Raises ExchangeFailed if another rank has ended, or does not come."""
    try:
        begin().wait()
    except RuntimeError as error:
        raise ExchangeFailed(f"{error}") from error


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
