"""The events of an engine, which are observed by the step log, the measurements, the snapshots and the tuner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from app.config import SchedulerConfig
from app.engine.batch import StepBatch, StepLimits
from app.engine.request import Request, TokenDelta
from app.engine.sequence import EngineSequence
from app.engine.trace.entries import FailureKind


class EndedStep(NamedTuple):
    """A step whose results were processed."""

    batch: StepBatch  # empty if nothing was computed
    deltas: list[TokenDelta]  # the deltas that callers receive
    at: float  # when the step ended, in seconds of the engine's clock
    seconds: float  # the step's duration, excluding its overlap with the previous step
    gap_s: float  # time between two tokens: since the end of the previous step, or since this step began after a pause


class StepObserver:
    """Receives the events of an engine in order, in the engine's thread. This base class ignores all events."""

    def arrived(self, request: Request, *, at: float) -> None:
        """A request was queued; `at` is in seconds of the engine's clock."""

    def aborted(self, request_id: str) -> None:
        """The caller of a request aborted it."""

    def reconfigured(self, config: SchedulerConfig) -> None:
        """The scheduler settings were replaced; the new settings apply from the next step on."""

    def limited(self, limits: StepLimits) -> None:
        """The tuner replaced the step limits; the new limits apply from the next step on."""

    def cache_cleared(self) -> None:
        """The prefix cache was cleared."""

    def slept(self) -> None:
        """The engine fell asleep: no request runs, the cache is empty, and no batch is scheduled until it wakes up."""

    def woke(self) -> None:
        """The engine woke up."""

    def step_began(self) -> None:
        """A call of `Engine.step` began. The call ends with `step_ended`, or with `failed` if the device fails."""

    def scheduled(self, batch: StepBatch) -> None:
        """The scheduler returned this batch, which may be empty."""

    def sampled(self, batch: StepBatch, token_ids: list[int], num_kept: Sequence[int] = ()) -> None:
        """The model runner computed this batch and drew one token for each item of `batch.sampled`.

        With drafts, `token_ids` contains only the kept tokens, and `num_kept` is their number for each sequence.
        """

    def failed(self, how: FailureKind, sequences: Iterable[EngineSequence] = ()) -> None:
        """A step failed, and these sequences will end because of it."""

    def step_ended(self, step: EndedStep) -> None:
        """The results of a step were processed."""

    def close(self) -> None:
        """The engine was closed. No event follows."""
