"""An engine that schedules and launches the next step while the device computes the one before it.

    host      schedule 1, launch | schedule 2, launch, wait for 1, deliver | schedule 3, launch, wait for 2, deliver
    device                       | compute 1 ............................. | compute 2 .............................

The tokens of step 1 are step 2's input without having been on the host: they are read from where step 1 leaves them.
That a sequence has ended at one of its end tokens is found out a step late, and the token drawn for it meanwhile is
thrown away. (The "zero-overhead" scheduling of SGLang 0.4, and vLLM's asynchronous scheduling, do the same.)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from app.config import SchedulerConfig
from app.engine.batch import Batch, StepResult
from app.engine.engine import Engine, LaunchingRunner, PendingStep
from app.engine.request import ModelFacts, TokenDelta
from app.engine.scheduler import Scheduler
from app.engine.trace.entries import FailureKind
from app.engine.trace.recorder import Recorder

logger = logging.getLogger(__name__)

_NOTHING = Batch((), ())


@dataclass(frozen=True, slots=True)
class _Launched:
    batch: Batch
    step: PendingStep


class OverlappedEngine(Engine):
    """An Engine for runners that launch; its tokens are the same. A step delivers what the one before it drew."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: LaunchingRunner,
        facts: ModelFacts,
        clock: Callable[[], float] = time.monotonic,
        largest_step: SchedulerConfig | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(
            scheduler=scheduler,
            runner=runner,
            facts=facts,
            clock=clock,
            largest_step=largest_step,
            recorder=recorder,
        )
        self._launcher = runner
        self._launched: _Launched | None = None
        self._has_failed = False  # the step to come is computed alone, so that the requests at fault can be found

    @property
    def idle_s(self) -> float | None:
        return 0.0 if self._launched is not None else super().idle_s

    def step(self) -> list[TokenDelta]:
        """Launch one step and wait for the one launched before it, whose tokens are returned; the first has none.

        When a step fails, what was launched is taken back, and the next call computes the same again without
        launching ahead, as `Engine.step` does: it finds the requests at fault, or raises StepError.
        """
        before = self._launched
        if before is None and self._has_failed:
            self._has_failed = False
            return super().step()
        self._recorder.began()
        # Penalties and grammars look at tokens on the host: such a batch is waited for before the next is made.
        must_wait = before is not None and (before.batch.needs_history or self._has_failed)
        self._launched = None if must_wait else self._launch(is_ahead=before is not None)
        return self._tell_ended() if before is None else self._settle(before)

    def _launch(self, *, is_ahead: bool) -> _Launched | None:
        batch = self._scheduler.schedule(self._clock(), is_ahead=is_ahead)
        self._recorder.scheduled(batch, self._scheduler.take_decision())
        if not batch:
            return None  # everybody waits to hear of their last token, or for the strategy's timer
        try:
            step = self._launcher.launch(batch)
        except Exception as error:  # nothing has advanced: the same is scheduled again
            self._note_failure(FailureKind.LAUNCH, batch, error)
            return None
        self._scheduler.advance(batch)
        return _Launched(batch, step)

    def _settle(self, launched: _Launched) -> list[TokenDelta]:
        try:
            result = launched.step.result()
        except Exception as error:
            self._note_failure(FailureKind.RESULT, launched.batch, error)
            self._take_back(launched)
            return self._tell_ended()
        self._end_the_unmatched(launched.batch)
        self._recorder.drew(launched.batch, result.token_ids)
        ended_at = self._clock()
        deltas = self._scheduler.settle(launched.batch, result, now=ended_at)
        self._recorder.told(deltas, at=ended_at)
        return deltas

    def _take_back(self, failed: _Launched) -> None:
        """Undo the failed step, and the one that was launched after it with what the failed one drew."""
        ahead, self._launched = self._launched, None
        if ahead is not None:
            with suppress(Exception):
                ahead.step.result()  # the device must be done with it; what it drew means nothing
            self._scheduler.retreat(ahead.batch)
        self._scheduler.retreat(failed.batch)

    def _note_failure(self, how: FailureKind, batch: Batch, error: Exception) -> None:
        logger.warning("a step of %d requests failed and is computed again: %r", len(batch.scheduled), error)
        self._recorder.failed(how)
        self._has_failed = True

    def _tell_ended(self) -> list[TokenDelta]:
        """Those who ended without a step."""
        ended_at = self._clock()
        deltas = self._scheduler.update(_NOTHING, StepResult([]), now=ended_at)
        self._recorder.told(deltas, at=ended_at)
        return deltas
