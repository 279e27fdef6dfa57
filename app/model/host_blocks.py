"""Copies of blocks of a CPU's KV memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from app.engine.model_runner import BlockCopies, BlockMemory


class HostBlocks(BlockMemory, BlockCopies):
    """The tensors of KV memory. In each tensor, blocks of equal size follow one another.

    The slots for states of recurrent layers are stored in the same way.

    A thread that waits for a folder or another replica may hold this object for long. `leave` frees the memory anyway.
    """

    states: HostBlocks | None

    def __init__(self, tensors: Sequence[torch.Tensor], states: Sequence[torch.Tensor] = ()) -> None:
        """tensors: the first dimension counts the blocks. states: of recurrent layers; it counts the slots."""
        self.states = HostBlocks(states) if states else None
        self._sizes = [each.nbytes // len(each) for each in tensors]
        self.block_bytes = sum(self._sizes)
        self._lock = threading.Lock()
        # Guarded by _lock; empty after `leave`.
        self._tensors = [each.flatten().view(torch.uint8).numpy().data for each in tensors]

    def leave(self) -> None:
        """Release the memory for good. Waits until the copy of a block in progress has ended."""
        if self.states is not None:
            self.states.leave()
        with self._lock:
            self._tensors = []

    def new_buffer(self) -> memoryview:
        """Return a buffer for copies: a thread takes the interpreter's lock a few times per block, not per tensor."""
        return memoryview(bytearray(self.block_bytes))

    @contextmanager
    def copies(self) -> Iterator[BlockCopies]:
        yield self

    def take(self, block_id: int, buffer: memoryview) -> bool:
        with self._lock:
            for at, part in self._parts(block_id):
                buffer[at : at + len(part)] = part
            return bool(self._tensors)

    def put(self, block_id: int, buffer: memoryview) -> bool:
        with self._lock:
            for at, part in self._parts(block_id):
                part[:] = buffer[at : at + len(part)]
            return bool(self._tensors)

    def _parts(self, block_id: int) -> Iterator[tuple[int, memoryview]]:
        """Yield the offset in the buffer and the bytes of each tensor's part of a block."""
        at = 0
        for tensor, size in zip(self._tensors, self._sizes, strict=False):
            yield at, tensor[block_id * size : (block_id + 1) * size]
            at += size
