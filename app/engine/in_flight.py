"""A launched step whose results are still to come.

An engine on a device schedules and launches the next step while the device computes the one before it.

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

from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from app.engine.batch import StepBatch
from app.engine.model_runner import PendingStep


@dataclass(slots=True)
class InFlight:
    """A launched step, until its result is processed or the step is undone."""

    batch: StepBatch
    pending: PendingStep
    is_committed: bool = False

    def commit(self) -> None:
        """Count the batch as computed before its tokens are known, so that the next batch can be scheduled meanwhile.

        The placeholder -1 - n stands for the token of `batch.sampled[n]` until `Scheduler.update` replaces it. A batch
        with drafts is not counted, and the next batch waits for it: the number of accepted drafts is known only at its
        end.
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
        """Undo `commit`. The whole batch is computed again."""
        if not self.is_committed:
            return
        for item, sequence in zip(self.batch.scheduled, self.batch.sequences, strict=True):
            if item.samples:
                sequence.generated_token_ids.pop()
            if sequence.epoch <= self.batch.epoch:
                sequence.num_computed_tokens = item.start

    def discard(self) -> None:
        """Wait until the device has finished the step, ignore the result, and undo `commit`."""
        if not self.batch.lacks_history:  # a step that lacks history has neither drawn tokens nor advanced sequences
            with suppress(Exception):
                self.pending.result()
            self.roll_back()
