"""Copies blocks between a CPU's KV memory and buffers, for stores and other replicas."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from app.engine.model_runner import BlockCopies, BlockMemory


class HostBlocks(BlockMemory, BlockCopies):
    """Gives access to a CPU's KV memory by block, and to the states of recurrent layers by slot (`states`).

    A thread that is waiting for a folder or another replica may keep this object alive, so `release` drops the tensors.
    """

    states: HostBlocks | None

    def __init__(self, tensors: Sequence[torch.Tensor], states: Sequence[torch.Tensor] = ()) -> None:
        """tensors: KV memory; the first dimension is the block. states: recurrent states; the first one is the slot."""
        self.states = HostBlocks(states) if states else None
        self._sizes = [each.nbytes // len(each) for each in tensors]
        self.block_bytes = sum(self._sizes)
        self._lock = threading.Lock()
        # Guarded by _lock; empty after `release`.
        self._tensors = [each.flatten().view(torch.uint8).numpy().data for each in tensors]

    def release(self) -> None:
        """Drop the tensors permanently, so that later copies return False. Waits until a running copy is done."""
        if self.states is not None:
            self.states.release()
        with self._lock:
            self._tensors = []

    def new_buffer(self) -> memoryview:
        """Return a buffer for one block. Callers transfer whole blocks, so they rarely need the interpreter's lock."""
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
        """Yield each tensor's part of a block, with its offset in the buffer. Yields nothing after `release`."""
        at = 0
        for tensor, size in zip(self._tensors, self._sizes, strict=False):
            yield at, tensor[block_id * size : (block_id + 1) * size]
            at += size
