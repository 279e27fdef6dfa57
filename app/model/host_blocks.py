"""KV memory of a CPU, block by block."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from app.engine.model_runner import BlockCopies, BlockMemory


class HostBlocks(BlockMemory, BlockCopies):
    """The tensors of KV memory, in each of which all blocks have as many bytes, one after the other.

    The slots for states of recurrent layers lie in memory in the same way.

    A thread that waits for a folder or another replica may hold this for long. It does not keep the memory that is
    given up meanwhile.
    """

    states: HostBlocks | None

    def __init__(self, tensors: Sequence[torch.Tensor], states: Sequence[torch.Tensor] = ()) -> None:
        """The first dimension of each is that of the blocks; of the `states` of recurrent layers, that of the slots."""
        self.states = HostBlocks(states) if states else None
        self._sizes = [each.nbytes // len(each) for each in tensors]
        self.block_bytes = sum(self._sizes)
        self._lock = threading.Lock()
        # Empty once the memory is given up; guarded by _lock.
        self._tensors = [each.flatten().view(torch.uint8).numpy().data for each in tensors]

    def leave(self) -> None:
        """The memory is given up, for good. Waits for the copy of a block."""
        if self.states is not None:
            self.states.leave()
        with self._lock:
            self._tensors = []

    def new_buffer(self) -> memoryview:
        """A thread copies through it: it takes the interpreter's lock a few times for a block, not for each tensor."""
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
        """The bytes of a block in each tensor, and where in the buffer."""
        at = 0
        for tensor, size in zip(self._tensors, self._sizes, strict=False):
            yield at, tensor[block_id * size : (block_id + 1) * size]
            at += size
