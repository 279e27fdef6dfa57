"""Exchanges tensors between the ranks of a model: with gloo on CPUs, with NCCL and torch's symmetric memory on GPUs.

All ranks must call the same functions in the same order. If one does not, the others raise ExchangeFailed after the
group's timeout; if one ends, they raise it immediately. Afterwards, the group can no longer be used.
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
    """This process's connection to the other ranks of a model. Rank 0 runs the engine."""

    def __init__(self, rank: int, size: int, *, store: Path, device: torch.device, timeout_s: float) -> None:
        """Connect to the other ranks. Blocks until all ranks have connected.

        store: a file that all ranks share. It must not exist yet, and only this user may have access to its folder.
        device: this rank's device. All exchanged tensors must be on it.
        timeout_s: how long an exchange waits for the other ranks, in seconds.

        Raises RuntimeError if a rank does not connect in time. `ExchangeCounts.missing` tells which ranks are missing.
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
        # A file is safer than a port, on which another user of this machine could answer first.
        files = FileStore(str(store), size)
        files.set_timeout(timeout)
        if device.type == "cuda":
            # Captured exchanges use a separate communicator, because other engines have hung with one for both kinds.
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
            except (RuntimeError, ImportError, AttributeError) as error:  # other versions of torch use other names
                logger.info("ranks add up their results with NCCL instead of symmetric memory: %s", error)

    def capturing(self) -> AbstractContextManager[None]:
        """Use the communicator for captured exchanges in a `with` block. Wrap a graph's warm-up and capture in it."""
        return self._with(self._all[-1])

    def alone(self) -> AbstractContextManager[None]:
        """Make exchanges in a `with` block only allocate memory, without other ranks. For work that may fail on one."""
        return self._with(None)

    @contextmanager
    def _with(self, processes: Any) -> Iterator[None]:
        self._processes = processes
        try:
            yield
        finally:
            self._processes = self._all[0]

    def together(self, work: Callable[[], T]) -> T:
        """Run `work`, which must not wait for other ranks, on all ranks. If it fails on one, all ranks raise an error.

        On every rank, `is_out_of_memory` returns whether the cause is a lack of memory.
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
        """Replace each number with its sum over all ranks. Its bits depend neither on the rank nor on other numbers.

        The tensor must be contiguous, and equal in shape and type on all ranks.
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
        """Return the columns of all ranks, [..., size * num_columns]. tensor: [..., num_columns] on every rank."""
        if self._processes is None:
            return self._sizes.gather_columns(tensor)
        self._counts.add(self.rank)
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        _exchange(lambda: self._processes.allgather([parts], [tensor.contiguous()]))
        return torch.cat(parts, dim=-1)

    def gather_at_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the columns of all ranks on rank 0. On any other rank, return the tensor itself."""
        if self._processes is None:
            return self._sizes.gather_columns(tensor) if self.rank == 0 else tensor
        self._counts.add(self.rank)
        tensor, options = tensor.contiguous(), GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else []
        _exchange(lambda: self._processes.gather([parts] if parts else [], [tensor], options))
        return torch.cat(parts, dim=-1) if parts else tensor

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy rank 0's tensor to all ranks. It must be contiguous, and equal in shape and type on all ranks."""
        self._counts.add(self.rank)
        _exchange(lambda: self._processes.broadcast(tensor, 0))

    def minimum(self, number: int) -> int:
        """Return the smallest of the numbers that all ranks pass."""
        self._counts.add(self.rank)
        self._number.fill_(number)  # allocated in advance, so that this works without free memory
        _exchange(lambda: self._processes.allreduce([self._number], ReduceOp.MIN))
        return int(self._number.item())

    def set_timeout(self, timeout_s: float) -> None:
        """Set how long an exchange waits for the other ranks, in seconds."""
        for processes in self._all:
            processes.set_timeout(timedelta(seconds=timeout_s))

    def abort(self) -> None:
        """Make the pending exchanges of this rank fail. Thread-safe."""
        for processes in self._all:
            processes.abort()


def _exchange(begin: Callable[[], Any]) -> None:
    """Run an exchange and wait for it. Raises ExchangeFailed if another rank has ended or does not join in time."""
    try:
        begin().wait()
    except RuntimeError as error:
        raise ExchangeFailed(f"{error}") from error


class ExchangeCounts:
    """Counts the exchanges that each rank has begun, in a shared file, so that a rank that hangs can be identified.

    Exchanges in captured graphs are not counted.
    """

    def __init__(self, store: Path, size: int) -> None:
        """Map the file with the counts, which is next to the group's `store`. Creates it if needed."""
        count_bytes = 8
        with open(store.with_name(f"{store.name}-counts"), "a+b", buffering=0) as file:
            os.ftruncate(file.fileno(), size * count_bytes)  # fills a new file with zeros, and keeps existing counts
            self._counts = memoryview(mmap.mmap(file.fileno(), size * count_bytes)).cast("Q")

    def add(self, rank: int) -> None:
        """Count an exchange of a rank. Only that rank may call this method."""
        self._counts[rank] += 1

    def missing(self) -> list[int]:
        """Return the ranks that have begun fewer exchanges than another rank."""
        counts = self._counts.tolist()
        return [rank for rank, count in enumerate(counts) if count < max(counts)]


def _gloo(files: Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._threads = 1  # enough, because exchanges run one at a time
    return ProcessGroupGloo(files, rank, size, options)


def _nccl(files: Store, rank: int, size: int, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(files, rank, size, options)
