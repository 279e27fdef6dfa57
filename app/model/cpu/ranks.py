"""The memory through which ranks on one machine exchange numbers in the middle of a step, in the layout of ranks.h.

On two cores an exchange of a decode step takes some microseconds there, and a hundred through gloo.
"""

from __future__ import annotations

import torch

from app.errors import Failure
from app.model.cpu.library import RanksShape
from app.model.llama import DecoderSettings

_LINE_BYTES = 64  # of a rank's counter
_ROWS = 192  # exchanged at a time: as many as a matrix is multiplied with at a time
_NO_BOUND = 2**62


class RankMissing(Failure):
    """A rank has not come to an exchange in time. The step is lost, and the ranks cannot compute another."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} did not come to an exchange within the timeout of a step")


class RankMemory:
    """One rank's view of it."""

    def __init__(self, memory: torch.Tensor, *, timeout_s: float) -> None:
        """memory: `num_bytes` zeros, the same of all ranks. timeout_s: for which a rank waits for the others."""
        self.memory, self.timeout_s = memory, timeout_s

    @staticmethod
    def num_bytes(settings: DecoderSettings) -> int:
        """settings: of any rank."""
        return settings.num_ranks * (_LINE_BYTES + 2 * 4 * _capacity(settings))


def ranks_shape(settings: DecoderSettings, memory: RankMemory | None) -> RanksShape:
    if memory is None:
        assert settings.num_ranks == 1, "several ranks exchange numbers"
        return RanksShape(0, 1, _NO_BOUND, 0.0, None)
    return RanksShape(
        settings.rank, settings.num_ranks, _capacity(settings), memory.timeout_s, memory.memory.data_ptr()
    )


def _capacity(settings: DecoderSettings) -> int:
    """Floats that a rank gives at a time."""
    return _ROWS * max(settings.hidden_size, 32)
