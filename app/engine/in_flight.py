"""A launched step whose results are not available yet.

An engine with a GPU schedules and launches the next step while the device is still computing the current one.

    host      schedule 1, launch | schedule 2, launch, wait for 1, deliver | schedule 3, launch, wait for 2, deliver
    device                       | compute 1 ............................. | compute 2 .............................

Step 2 reads the tokens of step 1 on the device, without a copy to the host. The host learns one step late that a
sequence has drawn an end token, and discards the token that was drawn for the sequence in the meantime. (The
"zero-overhead" scheduling of SGLang 0.4 and vLLM's asynchronous scheduling do the same.)

With penalties or grammars, step 2 cannot draw before the tokens of step 1 are on the host. The engine still launches
the forward pass of step 2 ahead. While the device computes it, the tokens of step 1 arrive, and the engine launches the
draw.

A step with drafts requires known tokens, and the number of accepted drafts is only known when it has finished. The
device is therefore idle while this step and the next one are being scheduled, so the engine only schedules drafts if
the drafter expects them to be worth the idle time.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from app.engine.batch import StepBatch
from app.engine.model_runner import PendingStep


@dataclass(slots=True)
class InFlight:
    """A launched step whose result was neither processed nor discarded."""

    batch: StepBatch
    pending: PendingStep
    is_committed: bool = False

    def commit(self) -> None:
        """Count the batch as computed before its tokens are known, so that the next batch can already be scheduled.

        The placeholder -1 - n stands for the token of `batch.sampled[n]` until `Scheduler.update` replaces it. Does
        nothing for a batch with drafts, because the number of accepted drafts is not known yet.
        """
        if self.batch.has_drafts:
            return
        self.is_committed = True
        unknown = count(-1, -1)
        for item, sequence in zip(self.batch.scheduled, self.batch.sequences, strict=True):
            sequence.num_computed_tokens = item.end
            if item.samples:
                sequence.generated_token_ids.append(next(unknown))

    def roll_back(self) -> None:
        """Undo `commit`. The whole batch will be recomputed."""
        if not self.is_committed:
            return
        for item, sequence in zip(self.batch.scheduled, self.batch.sequences, strict=True):
            if item.samples:
                sequence.generated_token_ids.pop()
            if sequence.epoch <= self.batch.epoch:
                sequence.num_computed_tokens = item.start

    def discard(self) -> None:
        """Wait until the device has finished the step, ignore the result, and undo `commit`."""
        if not self.batch.lacks_history:  # a step that lacks history has not drawn tokens and was not committed
            with suppress(Exception):
                self.pending.result()
            self.roll_back()
