"""The memory through which ranks on one machine exchange numbers in the middle of a step, in the layout of ranks.h.

There an exchange of a decode step takes microseconds, where one through a socket takes a tenth of a millisecond.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from app.errors import Failure
from app.model.cpu.library import LANES, RanksShape
from app.model.llama import DecoderSettings
from app.model.parallel.group import RankGroup

# Of a rank: its two counters, of 8 bytes each.
_LINE_BYTES, _ABORTED_AT = 64, 8
_ROWS = 192  # exchanged at a time: as many as a matrix is multiplied with at a time
_NO_BOUND = 2**62
# Far longer than ranks differ in a step. Where one ends or hangs, rank 0 finds out earlier and aborts.
_TIMEOUT_S = 60.0


class RankMissing(Failure):
    """A rank has not come to an exchange in time. The step is lost, and the ranks cannot compute another."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} did not come to an exchange in the middle of a step")


class RankMemory:
    """One rank's view of it."""

    def __init__(self, settings: DecoderSettings, memory: torch.Tensor, *, timeout_s: float = _TIMEOUT_S) -> None:
        """memory: `num_bytes` zeros, the same for all ranks. timeout_s: for which a rank waits for the others."""
        self._memory = memory
        line = memory.data_ptr() + settings.rank * _LINE_BYTES
        self._is_aborted = ctypes.c_uint64.from_address(line + _ABORTED_AT)
        self.shape = RanksShape(
            settings.rank, settings.num_ranks, _capacity(settings), timeout_s, memory.data_ptr()
        )  # fmt: skip

    @classmethod
    def of_group(cls, settings: DecoderSettings, group: RankGroup) -> RankMemory:
        """All ranks of a group call it together. Linux has such memory."""
        own = os.memfd_create("carousel-ranks") if group.rank == 0 else -1
        place = torch.tensor([os.getpid(), own])
        group.broadcast(place)
        process, number = place.tolist()
        size = cls.num_bytes(settings)
        with open(own if group.rank == 0 else f"/proc/{process}/fd/{number}", "r+b", buffering=0) as file:
            if group.rank == 0:
                os.ftruncate(own, size)
            group.minimum(0)
            memory = mmap.mmap(file.fileno(), size)
            group.minimum(0)  # until then the file is open
        own_view = cls(settings, torch.frombuffer(memory, dtype=torch.uint8))
        group.when_aborted(own_view.abort)
        return own_view

    @staticmethod
    def num_bytes(settings: DecoderSettings) -> int:
        """settings: of any rank."""
        return settings.num_ranks * (_LINE_BYTES + 2 * torch.float32.itemsize * _capacity(settings))

    def abort(self) -> None:
        """End what this rank waits for in another thread, now and later: it raises RankMissing there."""
        self._is_aborted.value = 1


def ranks_shape(settings: DecoderSettings, memory: RankMemory | None) -> RanksShape:
    """memory: None of a model that one process computes."""
    assert (settings.num_ranks > 1) == (memory is not None), "several ranks exchange numbers"
    return RanksShape(0, 1, _NO_BOUND, 0.0, None) if memory is None else memory.shape


def _capacity(settings: DecoderSettings) -> int:
    """Floats that a rank gives at a time; at least so many rows of a packed panel."""
    return _ROWS * max(settings.hidden_size, 2 * LANES)
