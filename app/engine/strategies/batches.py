"""Batching by whole batches: what static, dynamic, bucketed and adaptive batching have in common."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from app.engine.sequence import Sequence
from app.engine.strategies.strategy import CLOSED, BatchingStrategy, Situation, StepPlan
from app.engine.waiting import Bucket


@dataclass(slots=True)
class _OpenBatch:
    """The batch that runs: who belongs to it may still join, and join again after a preemption."""

    bucket: int
    began_at: float
    num_seats: int  # not taken
    num_tokens_left: int | None  # of prompts; None: no bound
    is_empty: bool = True


class WholeBatches(BatchingStrategy):
    """Nobody joins until the whole batch has left.

    A batch goes when it is full or when its oldest member has waited `max_wait_s`, so the last partial one always
    goes, and by the clock of the one that waits, not of the one that comes. A batch that the token budget or memory
    does not take in one step fills its seats in the next ones; whoever is preempted has its seat back.
    """

    def __init__(self, *, batch_size: int, max_wait_s: float, max_batch_tokens: int | None = None) -> None:
        self.batch_size = batch_size
        self._max_wait_s = max_wait_s
        self._max_batch_tokens = max_batch_tokens
        self._batch: _OpenBatch | None = None

    def plan(self, situation: Situation) -> StepPlan:
        if not situation.running:
            self._batch = self._next_batch(situation)
        batch = self._batch
        if batch is None:
            return CLOSED
        num_waiting = situation.waiting.bucket(batch.bucket).num_waiting
        num_admissible = max(0, min(batch.num_seats, num_waiting, situation.num_free_slots))
        return StepPlan(num_admissible=num_admissible, bucket=batch.bucket)

    def opens_at(self, situation: Situation) -> float | None:
        due = [self._due_at(bucket, situation) for bucket in situation.waiting.buckets]
        return min(due, default=None)

    def admits(self, sequence: Sequence) -> bool:
        """Whether the batch has tokens left for it; a prompt above the bound goes alone."""
        batch = self._batch
        assert batch is not None, "only an open batch admits"
        left = batch.num_tokens_left
        if left is None or batch.is_empty or sequence.num_prompt_tokens <= left:
            return True
        batch.num_seats = 0  # full; and whoever comes next in order shall not be overtaken
        return False

    def joined(self, sequence: Sequence) -> None:
        self._take_seats(1, sequence)

    def preempted(self, sequence: Sequence) -> None:
        self._take_seats(-1, sequence)

    def emptied(self, now: float) -> None:
        if self._batch is not None:
            self._batch_ended(now - self._batch.began_at)
        self._batch = None

    def _next_batch(self, situation: Situation) -> _OpenBatch | None:
        """A new batch, from the bucket that has been due for longest."""
        due = [(self._due_at(bucket, situation), bucket.number) for bucket in situation.waiting.buckets]
        if not due or min(due)[0] > situation.now:
            return None
        _, number = min(due)
        # Only for those who are there: a batch that goes half full is not filled up by whoever comes later.
        num_seats = min(self.batch_size, situation.waiting.bucket(number).num_waiting)
        return _OpenBatch(number, situation.now, num_seats, self._max_batch_tokens)

    def _due_at(self, bucket: Bucket, situation: Situation) -> float:
        """When a bucket's next batch goes if nobody else arrives."""
        is_full = bucket.num_waiting >= min(self.batch_size, situation.max_running)
        has_tokens = self._max_batch_tokens is not None and bucket.num_tokens >= self._max_batch_tokens
        timer_ends = bucket.oldest_at + self._max_wait_s
        return min(situation.now, timer_ends) if is_full or has_tokens else timer_ends

    @abstractmethod
    def _batch_ended(self, latency_s: float) -> None:
        """A whole batch has left, this long after it began."""

    def _take_seats(self, number: int, sequence: Sequence) -> None:
        batch = self._batch
        if batch is None:
            return  # it runs since before this strategy was chosen
        batch.is_empty = False
        batch.num_seats -= number
        if batch.num_tokens_left is not None:
            batch.num_tokens_left -= number * sequence.num_prompt_tokens
