"""What an engine tells of its steps: the step log, the measurements, the views and the tuner listen."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Several
from typing import NamedTuple

from app.config import SchedulerConfig
from app.engine.batch import SchedulingDecision, StepBatch, StepLimits
from app.engine.request import Request, TokenDelta
from app.engine.sequence import Sequence
from app.engine.trace.entries import FailureKind


class EndedStep(NamedTuple):
    """A step whose results are processed."""

    batch: StepBatch  # an empty one where nothing was computed
    deltas: list[TokenDelta]  # what callers get
    at: float  # when it ended, in seconds of the engine's clock
    seconds: float  # that it took, without what it overlaps with the step before
    gap_s: float  # from the end of the step before, where requests went on: between two tokens of them


class StepObserver:
    """The events of an engine, in their order, from the one thread that uses it. This class ignores them."""

    def arrived(self, request: Request, *, at: float) -> None:
        """A request was queued; `at` is in seconds of the engine's clock."""

    def aborted(self, request_id: str) -> None:
        """A request was ended because its caller wanted that."""

    def reconfigured(self, config: SchedulerConfig) -> None:
        """Other settings hold from the next step on."""

    def limited(self, limits: StepLimits) -> None:
        """The tuner has other limits used from the next step on."""

    def cache_cleared(self) -> None:
        """The prefix cache was cleared."""

    def slept(self) -> None:
        """The engine has gone to sleep: nothing runs, nothing is cached, no batch is made until it wakes."""

    def woke(self) -> None:
        """It is awake again."""

    def step_began(self) -> None:
        """A call of `Engine.step`; it ends with `step_ended`, or with `failed` of the device."""

    def scheduled(self, batch: StepBatch, decision: SchedulingDecision) -> None:
        """The scheduler made this batch, perhaps an empty one."""

    def sampled(self, batch: StepBatch, token_ids: list[int], num_kept: Several[int] = ()) -> None:
        """The model runner has computed this batch: one token for each sampled sequence of it.

        With drafts, the tokens that were kept; `num_kept` of each sequence.
        """

    def failed(self, how: FailureKind, sequences: Iterable[Sequence] = ()) -> None:
        """A step failed, and these sequences end with it."""

    def step_ended(self, step: EndedStep) -> None:
        """A step's results are processed."""

    def close(self) -> None:
        """No event follows."""
