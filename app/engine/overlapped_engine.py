"""An engine that schedules and launches the next step while the device computes the one before it.

    host      schedule 1, launch | schedule 2, launch, wait for 1, deliver | schedule 3, launch, wait for 2, deliver
    device                       | compute 1 ............................. | compute 2 .............................

Step 2 reads the tokens of step 1 on the device, without a copy to the host. The host learns one step late that a
sequence has drawn an end token, and discards the token that was drawn for the sequence in the meantime. (The
"zero-overhead" scheduling of SGLang 0.4 and vLLM's asynchronous scheduling do the same.)

Penalties and grammars need the tokens of step 1 on the host before step 2 can draw. The engine launches the forward
pass of such a step ahead, like any other. While the device computes it, the tokens of step 1 arrive and the engine
launches the draw.

A step with drafts needs known tokens, and its progress is known only at its end. The device therefore waits while the
step and the next step are scheduled. The engine makes such a step only if a drafter expects drafts worth that time.
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
    """An Engine for runners that launch, with the same tokens. A step returns the tokens of the previous step."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._launched: _Launched | None = None
        self._has_failed = False  # compute the next step without launching ahead, to find the requests at fault

    @property
    def idle_s(self) -> float | None:
        return 0.0 if self._launched is not None else super().idle_s

    def sleep(self) -> None:
        """See Engine. A step that was launched ahead is computed again later."""
        launched, self._launched = self._launched, None
        if launched is not None:
            self._undo(launched)
        super().sleep()

    def step(self) -> list[TokenDelta]:
        """Launch one step and wait for the previous step. Returns the deltas of the previous step, if there is one.

        If a step fails, the engine undoes the launched steps. The next call computes them again without launching
        ahead, as `Engine.step` does, and finds the requests at fault or raises StepError.
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
        """Whether the engine schedules the next step only after the tokens of this batch are known."""
        if batch.has_drafts or batch.launched_alone:  # do not wait twice in a row if no drafts came
            return batch.has_drafts
        return self._scheduler.hopes_for_drafts()

    def _launch(self, *, is_ahead: bool) -> _Launched | None:
        batch = self._schedule(is_ahead=is_ahead)
        if not batch:
            return None  # all sequences wait for their last token, or the strategy waits for its timer
        step = run_or_error(self.runner.launch, batch)
        if isinstance(step, Exception):  # no sequence has advanced, so the same batch is scheduled again
            self._retry_after(FailureKind.LAUNCH, batch, step)
            return None
        if not batch.lacks_history:
            self._scheduler.commit_ahead(batch)
        return _Launched(batch, step)

    def _draw(self, launched: _Launched) -> _Launched | None:
        """Draw the tokens of a launched step, now that the tokens of the previous step are known."""
        batch = self._scheduler.with_history(launched.batch)
        error = run_or_error(launched.step.draw, batch)
        if isinstance(error, Exception):  # the same handling as of a failed launch
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
        """Undo the failed step, and the step after it, which was launched with the tokens of the failed step."""
        ahead, self._launched = self._launched, None
        if ahead is not None:
            self._undo(ahead)
        self._scheduler.roll_back(failed.batch)

    def _undo(self, launched: _Launched) -> None:
        """Discard a launched step. Its batch is computed again later."""
        if launched.batch.lacks_history:
            return  # the step has neither drawn tokens nor advanced sequences
        with suppress(Exception):
            launched.step.result()  # wait until the device has finished the step; discard the tokens
        self._scheduler.roll_back(launched.batch)

    def _retry_after(self, how: FailureKind, batch: StepBatch, error: Exception) -> None:
        logger.warning("a step of %d requests failed and is computed again: %s", len(batch.scheduled), described(error))
        self._note_failed(how)
        self._has_failed = True
