"""Copies blocks between a GPU's KV memory and pinned host memory, from any thread, while steps are running.

Each layer stores its part of a block in two tensors, so copying tensor by tensor would need about a hundred launches
per block. Instead, one kernel copies all parts, as in LMCache (Liu et al., 2025, arXiv 2510.09665). The speed has not
been measured on a GPU yet.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch

from app.engine.model_runner import BlockCopies, BlockMemory
from app.model.cuda.launching import copy_stream, kernels_of

_WORD_BYTES = torch.int32.itemsize
_TILE = 2048  # words that a program copies


class DeviceBlocks(BlockMemory):
    """Gives any thread access to the blocks of a GPU's KV memory, except between `suspend` and `resume`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy block 0 out and back once to compile the kernel. Each tensor's first dimension is the block."""
        self._tensors = tensors
        self._device = tensors[0].device
        self._kernels = kernels_of("block_kernels", self._device)
        self._sizes = [each.nbytes // len(each) // _WORD_BYTES for each in tensors]
        self.block_bytes = sum(self._sizes) * _WORD_BYTES
        self._lock = threading.Lock()
        self._table: torch.Tensor | None = None  # None while the memory is freed
        self.resume()
        buffer = self.new_buffer()
        with self.copies() as copies:
            copies.take(0, buffer)
            copies.put(0, buffer)

    @property
    def is_there(self) -> bool:
        return self._table is not None

    def suspend(self) -> None:
        """Reject all copies until `resume`. Call before the memory is freed. Blocks until a running copy is done."""
        with self._lock:
            self._table = None

    def resume(self) -> None:
        """Allow copies again. Call after the memory is restored: the tensors' new addresses are read here."""
        firsts = [0, *accumulate(self._sizes)][:-1]
        table = [[each.data_ptr() for each in self._tensors], self._sizes, firsts]
        self._table = torch.tensor(table, dtype=torch.int64).to(self._device)

    def new_buffer(self) -> memoryview:
        memory = torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        return memory.numpy().data

    @contextmanager
    def copies(self) -> Iterator[BlockCopies]:
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with copy_stream(stream):
            yield _Copies(self, stream)

    def copy(self, block_id: int, buffer: memoryview, stream: torch.cuda.Stream | None, *, takes: bool) -> bool:
        """Copy a block to the buffer if `takes`, otherwise from it, and wait. Return False after `suspend`."""
        with self._lock:
            if self._table is None:
                return False
            grid = (len(self._sizes), -(-max(self._sizes) // _TILE))
            words = torch.frombuffer(buffer, dtype=torch.int32)
            self._kernels.copy_block_kernel[grid](
                self._table, words, block_id, num_tensors=len(self._sizes), takes=takes, tile=_TILE
            )
            if stream is not None:
                stream.synchronize()
            return True


class _Copies(BlockCopies):
    """Copies blocks on a separate stream, which `copies` has made the thread's current stream."""

    def __init__(self, blocks: DeviceBlocks, stream: torch.cuda.Stream | None) -> None:
        self._blocks = blocks
        self._stream = stream

    def take(self, block_id: int, buffer: memoryview) -> bool:
        return self._blocks.copy(block_id, buffer, self._stream, takes=True)

    def put(self, block_id: int, buffer: memoryview) -> bool:
        return self._blocks.copy(block_id, buffer, self._stream, takes=False)
