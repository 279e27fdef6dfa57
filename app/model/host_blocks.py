"""KV memory of a CPU, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from app.engine.model_runner import BlockCopies, BlockMemory


class HostBlocks(BlockMemory, BlockCopies):
    """The tensors of KV memory, in each of which all blocks have as many bytes, one after the other."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """The first dimension of each is that of the blocks."""
        self._tensors = [each.flatten().view(torch.uint8).numpy().data for each in tensors]
        self._sizes = [each.nbytes // len(each) for each in tensors]
        self.block_bytes = sum(self._sizes)

    def new_buffer(self) -> memoryview:
        """A thread copies through it: it takes the interpreter's lock a few times for a block, not for each tensor."""
        return memoryview(bytearray(self.block_bytes))

    @contextmanager
    def copies(self) -> Iterator[BlockCopies]:
        yield self

    def take(self, block_id: int, buffer: memoryview) -> bool:
        for at, part in self._parts(block_id):
            buffer[at : at + len(part)] = part
        return True

    def put(self, block_id: int, buffer: memoryview) -> bool:
        for at, part in self._parts(block_id):
            part[:] = buffer[at : at + len(part)]
        return True

    def _parts(self, block_id: int) -> Iterator[tuple[int, memoryview]]:
        """The bytes of a block in each tensor, and where in the buffer."""
        at = 0
        for tensor, size in zip(self._tensors, self._sizes, strict=True):
            yield at, tensor[block_id * size : (block_id + 1) * size]
            at += size
