"""An engine that schedules and launches the next step while the device computes the one before it.

    host      schedule 1, launch | schedule 2, launch, wait for 1, deliver | schedule 3, launch, wait for 2, deliver
    device                       | compute 1 ............................. | compute 2 .............................

Penalties and grammars need those tokens on the host: of a step with any, the forward pass is launched like the others,
and its tokens are drawn as soon as those of the step before have arrived, while it is computed.

The tokens of step 1 are the input of step 2 without a copy to the host: step 2 reads them on the device. The host finds
out one step late that a sequence has drawn an end token; the token drawn for it meanwhile is discarded. (The
"zero-overhead" scheduling of SGLang 0.4 and vLLM's asynchronous scheduling do the same.)

A step with drafts follows known tokens, and how far it advances is known at its end: both it and the step after it are
scheduled while the device waits. So there is one only where a drafter hopes for drafts, and they have to pay for that.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from app.engine.batch import StepBatch
from app.engine.engine import Engine
from app.engine.isolation import run_or_error
from app.engine.model_runner import PendingStep
from app.engine.request import TokenDelta
from app.engine.trace.entries import FailureKind
from app.errors import described

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Launched:
    batch: StepBatch
    step: PendingStep


class OverlappedEngine(Engine):
    """An Engine for runners that launch; its tokens are the same. A step returns the tokens of the step before it."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._launched: _Launched | None = None
        self._has_failed = False  # the next step is computed without launching ahead, to find the requests at fault

    @property
    def idle_s(self) -> float | None:
        return 0.0 if self._launched is not None else super().idle_s

    def sleep(self) -> None:
        """See Engine. What was launched ahead is computed again later."""
        launched, self._launched = self._launched, None
        if launched is not None:
            self._undo(launched)
        super().sleep()

    def step(self) -> list[TokenDelta]:
        """Launch one step and wait for the one launched before it; returns the latter's deltas, at first none.

        When a step fails, the launched steps are undone, and the next call computes the same again without launching
        ahead, as `Engine.step` does: it finds the requests at fault, or raises StepError.
        """
        before = self._launched
        if self.is_asleep or (before is None and self._has_failed):
            self._has_failed = False
            return super().step()
        for observer in self._observers:
            observer.step_began()
        must_wait = before is not None and (self._has_failed or self._is_waited_for(before.batch))
        self._launched = None if must_wait else self._launch(is_ahead=before is not None)
        return self._end_without_step() if before is None else self._reconcile(before)

    def _is_waited_for(self, batch: StepBatch) -> bool:
        """Whether the next step is scheduled when the tokens of this one are known."""
        if batch.has_drafts or batch.has_waited:  # not twice in a row for drafts that do not come
            return batch.has_drafts
        return self._scheduler.hopes_for_drafts()

    def _launch(self, *, is_ahead: bool) -> _Launched | None:
        batch = self._schedule(is_ahead=is_ahead)
        if not batch:
            return None  # all sequences wait for their last token, or for the strategy's timer
        step = run_or_error(self.runner.launch, batch)
        if isinstance(step, Exception):  # nothing has advanced: the same is scheduled again
            self._retry_after(FailureKind.LAUNCH, batch, step)
            return None
        if not batch.lacks_history:
            self._scheduler.commit_ahead(batch)
        return _Launched(batch, step)

    def _draw(self, launched: _Launched) -> _Launched | None:
        """Draw the tokens of a launched step, now that those of the step before are known."""
        batch = self._scheduler.with_history(launched.batch)
        error = run_or_error(launched.step.draw, batch)
        if isinstance(error, Exception):  # as when it could not be launched
            self._retry_after(FailureKind.LAUNCH, batch, error)
            return None
        self._scheduler.commit_ahead(batch)
        return _Launched(batch, launched.step)

    def _reconcile(self, launched: _Launched) -> list[TokenDelta]:
        result = run_or_error(launched.step.result)
        if isinstance(result, Exception):
            self._retry_after(FailureKind.RESULT, launched.batch, result)
            self._take_back(launched)
            return self._end_without_step()
        result = self._kept(launched.batch, result)
        ended_at = self._clock()
        deltas = self._scheduler.reconcile(launched.batch, result, now=ended_at)
        ahead = self._launched
        if ahead is not None and ahead.batch.lacks_history:
            self._launched = self._draw(ahead)
        return self._end_step(launched.batch, deltas, at=ended_at)

    def _take_back(self, failed: _Launched) -> None:
        """Undo the failed step, and the one that was launched after it with the tokens of the failed one."""
        ahead, self._launched = self._launched, None
        if ahead is not None:
            self._undo(ahead)
        self._scheduler.roll_back(failed.batch)

    def _undo(self, launched: _Launched) -> None:
        """Discard a launched step: its batch is computed again."""
        if launched.batch.lacks_history:
            return  # it has neither drawn nor advanced
        with suppress(Exception):
            launched.step.result()  # the device must have finished it; its tokens are discarded
        self._scheduler.roll_back(launched.batch)

    def _retry_after(self, how: FailureKind, batch: StepBatch, error: Exception) -> None:
        logger.warning("a step of %d requests failed and is computed again: %s", len(batch.scheduled), described(error))
        self._note_failed(how)
        self._has_failed = True
