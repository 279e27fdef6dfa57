"""An engine that schedules and launches the next step while the device computes the one before it.

    host      schedule 1, launch | schedule 2, launch, wait for 1, deliver | schedule 3, launch, wait for 2, deliver
    device                       | compute 1 ............................. | compute 2 .............................

The tokens of step 1 are step 2's input without having been on the host: they are read from where step 1 leaves them.
That a sequence has ended at one of its end tokens is found out a step late, and the token drawn for it meanwhile is
thrown away. (The "zero-overhead" scheduling of SGLang 0.4, and vLLM's asynchronous scheduling, do the same.)
"""

from __future__ import annotations

from dataclasses import dataclass

from app.engine.batch import Batch
from app.engine.engine import Engine, LaunchingRunner, PendingStep, StepError
from app.engine.facts import ModelFacts
from app.engine.request import TokenDelta
from app.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class _Launched:
    batch: Batch
    step: PendingStep


class OverlappedEngine(Engine):
    """An Engine for runners that launch; its tokens are the same. A step delivers what the one before it drew."""

    def __init__(self, *, scheduler: Scheduler, runner: LaunchingRunner, facts: ModelFacts) -> None:
        super().__init__(scheduler=scheduler, runner=runner, facts=facts)
        self._launcher = runner
        self._launched: _Launched | None = None

    def step(self) -> list[TokenDelta]:
        """Launch one step and wait for the one launched before it, whose tokens are returned; the first has none.

        A failure ends the requests of the batch that failed, as in `Engine.step`. The other one is not lost: the next
        call settles it.
        """
        before = self._launched
        # Penalties look at all tokens on the host: such a batch is waited for before the next is made.
        must_wait = before is not None and before.batch.needs_history
        self._launched = None if must_wait else self._launch(is_ahead=before is not None)
        return [] if before is None else self._settle(before)

    def _launch(self, *, is_ahead: bool) -> _Launched | None:
        batch = self._scheduler.schedule(is_ahead=is_ahead)
        if not batch:
            return None  # everybody waits to hear of their last token
        try:
            step = self._launcher.launch(batch)
        except Exception as error:
            raise StepError(self._scheduler.fail(batch)) from error
        self._scheduler.advance(batch)
        return _Launched(batch, step)

    def _settle(self, launched: _Launched) -> list[TokenDelta]:
        try:
            token_ids = launched.step.result()
        except Exception as error:
            raise StepError(self._scheduler.fail(launched.batch)) from error
        return self._scheduler.settle(launched.batch, token_ids)
