"""What the model runners of rank 0 have in common: the other ranks, or none."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from app.engine.batch import StepBatch
from app.engine.model_runner import ModelRunner
from app.model.parallel.group import RankGroup
from app.model.parallel.ranks import Ranks


class NoRanks:
    """In place of `Ranks` where one process computes all."""

    def step(self, _batch: StepBatch) -> AbstractContextManager[None]:
        return nullcontext()

    def watched(self) -> AbstractContextManager[None]:
        return nullcontext()

    def preparing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class LeadingRunner(ModelRunner):
    """Base of the model runners with which other ranks may compute: on rank 0 it leads them, on others it joins."""

    def __init__(self) -> None:
        self._ranks: Ranks | NoRanks = NoRanks()
        self._group: RankGroup | None = None

    def lead(self, ranks: Ranks) -> None:
        """Have other ranks compute each step, too."""
        self._ranks = ranks
        self.join(ranks.group)

    def join(self, group: RankGroup) -> None:
        """Before all else: the ranks with which it computes."""
        self._group = group

    def check(self) -> None:
        """Raises DeviceLost if another rank has ended."""
        self._ranks.check()

    def close(self) -> None:
        self._ranks.close()
