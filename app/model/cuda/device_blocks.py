"""The blocks of a GPU's KV memory. Threads copy blocks through pinned memory of the host while steps run.

A block is spread over two tensors of each layer, and a copy for each tensor would take about a hundred launches. One
kernel therefore copies all parts from or to host memory, as in LMCache (Liu et al., 2025, arXiv 2510.09665). Not yet
measured on a GPU.
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
_TILE = 2048  # words of one program


class DeviceBlocks(BlockMemory):
    """The tensors of KV memory. Between two steps the memory may be given up and later restored at other addresses."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Compile the kernel. The first dimension of each tensor is the number of blocks."""
        self._tensors = tensors
        self._device = tensors[0].device
        self._kernels = kernels_of("block_kernels", self._device)
        self._sizes = [each.nbytes // len(each) // _WORD_BYTES for each in tensors]
        self.block_bytes = sum(self._sizes) * _WORD_BYTES
        self._lock = threading.Lock()
        self._table: torch.Tensor | None = None  # None while the memory is given up
        self.come_back()
        buffer = self.new_buffer()
        with self.copies() as copies:
            copies.take(0, buffer)
            copies.put(0, buffer)

    @property
    def is_there(self) -> bool:
        return self._table is not None

    def leave(self) -> None:
        """Stop copying because the memory is given up. Waits until a running copy of a block is complete."""
        with self._lock:
            self._table = None

    def come_back(self) -> None:
        """Read the new addresses of the tensors after the memory is restored."""
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
        """Copy a block to a buffer if `takes`, or the buffer to the block. Returns False if the memory is given up."""
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
    """Copies on a stream of their own, which is the current stream of the thread."""

    def __init__(self, blocks: DeviceBlocks, stream: torch.cuda.Stream | None) -> None:
        self._blocks = blocks
        self._stream = stream

    def take(self, block_id: int, buffer: memoryview) -> bool:
        return self._blocks.copy(block_id, buffer, self._stream, takes=True)

    def put(self, block_id: int, buffer: memoryview) -> bool:
        return self._blocks.copy(block_id, buffer, self._stream, takes=False)
