"""What a batching strategy decides, and what it sees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import abc
from dataclasses import dataclass

from app.engine.sequence import Sequence
from app.engine.waiting import WaitingRoom


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What there is before a step. Nothing of it may be changed or kept."""

    now: float  # seconds of the engine's clock
    max_running: int
    max_step_tokens: int
    running: abc.Sequence[Sequence]
    waiting: WaitingRoom

    @property
    def num_free_slots(self) -> int:
        return self.max_running - len(self.running)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """How far the door is open in one step, and how the step's budget is split."""

    num_admissible: int  # waiting sequences that may join, budget and memory permitting
    bucket: int = 0  # where they come from
    max_prefill_tokens: int | None = None  # for all chunks of the step together; None: the whole budget
    includes: abc.Callable[[Sequence], bool] | None = None  # which running sequences take part; None: all

    def taking_part(self, running: list[Sequence], *, is_ahead: bool) -> list[Sequence]:
        """Those in the step, as a new list; `is_ahead`: without those who get their last token in the step before."""
        taking_part = running if self.includes is None else filter(self.includes, running)
        if is_ahead:
            # Who generates nothing takes part until its prompt is computed, as everybody does.
            return [s for s in taking_part if len(s.generated_token_ids) < (s.request.sampling.max_tokens or 1)]
        return list(taking_part)


CLOSED = StepPlan(num_admissible=0)


class BatchingStrategy(ABC):
    """Decides before every step how far the door is open. One thread, no clock: the time is in the situation."""

    joins_any_step = False  # waiting sequences may join while others run, so that one may take another's place
    batch_size = 0  # the size of batch that is aimed at now; 0 where there are no batches

    @abstractmethod
    def plan(self, situation: Situation) -> StepPlan:
        """What the next step may do. Called once before each step."""

    @abstractmethod
    def opens_at(self, situation: Situation) -> float | None:
        """While nothing runs: when `plan` will let somebody in, if nobody else arrives; None if nobody waits.

        Not after `situation.now` means: in the next step.
        """

    def bucket_of(self, sequence: Sequence) -> int:
        """Which bucket a sequence waits in. Always the same for the same sequence."""
        return 0

    def admits(self, sequence: Sequence) -> bool:
        """A last look at the next to join; False closes the door for this step."""
        return True

    def joined(self, sequence: Sequence) -> None:
        """A sequence has joined, for the first time or after a preemption."""

    def preempted(self, sequence: Sequence) -> None:
        """A running sequence waits again."""

    def emptied(self, now: float) -> None:
        """A step has ended and nothing runs any more. Seconds of the engine's clock."""
