"""Batching strategies decide at which steps waiting sequences may join the running ones, and how many may join.

To add a strategy, add its settings to `app/config/scheduler.py`, a class here, and a line to `make_strategy`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from app.config import (
    AdaptiveConfig,
    BucketedConfig,
    ContinuousConfig,
    DynamicConfig,
    HybridConfig,
    SortedConfig,
    StaticConfig,
    StrategyConfig,
    WholeBatchesConfig,
)
from app.engine.sequence import EngineSequence
from app.engine.waiting_queue import Bucket, WaitingQueue

PREFILL_STEPS = 8  # maximum for a dynamic batch: with more, its first sequences would wait too long for its last ones
SHORTEST_CLASS_TOKENS = 64  # shorter prompts take about as long, because every step reads all weights


def make_strategy(config: StrategyConfig) -> BatchingStrategy:
    """Return a new strategy with no state from an earlier one."""
    match config:
        case StaticConfig():
            return Static(config)
        case DynamicConfig():
            return Dynamic(config)
        case BucketedConfig():
            return Bucketed(config)
        case SortedConfig():
            return Sorted(config)
        case AdaptiveConfig():
            return Adaptive(config)
        case HybridConfig():
            return Hybrid(config)
        case ContinuousConfig():
            return Continuous()


# ---------------------------------------------------------------------- the interface


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerView:
    """The scheduler's state before a step. A strategy must neither change the view nor keep a reference to it."""

    now: float  # seconds of the engine's clock
    max_running: int
    max_step_tokens: int
    running: Sequence[EngineSequence]
    waiting: WaitingQueue

    @property
    def num_free_slots(self) -> int:
        return self.max_running - len(self.running)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """How many waiting sequences may join a step, and how much of its token budget prompts may use."""

    num_admissible: int  # how many waiting sequences may join, if budget and memory suffice
    buckets: tuple[int, ...] = ()  # the bucket of each sequence that may join, in order; if empty, all are in bucket 0
    max_prefill_tokens: int | None = None  # limit for all prompt chunks together, or None for the whole budget

    def bucket(self, number: int) -> int:
        """Return the bucket of the sequence that joins at position `number`, counted from 0."""
        return self.buckets[number] if self.buckets else 0


CLOSED = StepPlan(num_admissible=0)


class BatchingStrategy(ABC):
    """Decides before every step how many waiting sequences may join. Used by one thread. Does not read a clock."""

    joins_any_step = False  # whether sequences may join while others run, so that one may replace another

    def batch_size(self, max_running: int) -> int:
        """Return the current target for the batch size, or 0 if the strategy does not form batches."""
        return 0

    @abstractmethod
    def plan(self, view: SchedulerView) -> StepPlan:
        """Return how many sequences may join the next step. Called once before each step."""

    @abstractmethod
    def opens_at(self, view: SchedulerView) -> float | None:
        """Return when `plan` will admit a sequence if none arrives, or None if no sequence waits.

        Only called while no sequence runs. A time at or before `view.now` means the next step.
        """

    def bucket_of(self, sequence: EngineSequence) -> int:
        """Return the number of the bucket in which a sequence waits. It must never change."""
        return 0

    def admits(self, sequence: EngineSequence) -> bool:
        """Whether the next sequence in order may join. False ends admission for this step."""
        return True

    def joined(self, sequence: EngineSequence) -> None:
        """Account for a sequence that has joined, for the first time or after a preemption."""

    def preempted(self, sequence: EngineSequence) -> None:
        """Account for a running sequence that was preempted and waits again."""

    def emptied(self, now: float) -> None:
        """Account for a step after which no sequence runs. `now` is in seconds of the engine's clock."""


# ---------------------------------------------------------------------- iteration-level batching


class Continuous(BatchingStrategy):
    """Sequences join at every step if slots, blocks and the token budget suffice: Orca (Yu et al., 2022)."""

    joins_any_step = True

    def plan(self, view: SchedulerView) -> StepPlan:
        return StepPlan(
            num_admissible=max(0, min(view.num_free_slots, len(view.waiting))),
            max_prefill_tokens=self._max_prefill_tokens(view),
        )

    def opens_at(self, view: SchedulerView) -> float | None:
        return view.now if len(view.waiting) else None

    def _max_prefill_tokens(self, view: SchedulerView) -> int | None:
        return None


class Hybrid(Continuous):
    """Continuous batching, with a limit on the prefill tokens of a step while any sequence decodes.

    The limit prevents long prompts from increasing the time between tokens, like the token budget of Sarathi-Serve
    (Agrawal et al., 2024). Steps in which no sequence decodes may use the whole budget for prefill.
    """

    def __init__(self, config: HybridConfig) -> None:
        self._prefill_share = config.prefill_share

    def _max_prefill_tokens(self, view: SchedulerView) -> int | None:
        if not any(sequence.is_decoding for sequence in view.running):
            return None
        return max(1, int(self._prefill_share * view.max_step_tokens))


# ---------------------------------------------------------------------- request-level batching


@dataclass(slots=True)
class _OpenBatch:
    """The running batch. Its sequences may join at later steps, and join again after a preemption."""

    began_at: float
    seats: dict[int, int]  # number of free seats, by bucket
    num_tokens_left: int | None  # prompt tokens for which the batch still has room, or None for no limit
    is_empty: bool = True


class WholeBatches(BatchingStrategy):
    """Once a batch has started, no other sequence joins until all sequences in the batch have ended.

    A batch starts when `max_running` sequences are waiting or the oldest one has waited `max_wait_s`, so that a partial
    batch does not wait forever. If one step has too little budget or memory for all sequences of a batch, its remaining
    seats are filled at the next steps. A preempted sequence gets its seat back.
    """

    def __init__(self, config: WholeBatchesConfig) -> None:
        self._max_wait_s = config.max_wait_ms / 1e3
        self._batch: _OpenBatch | None = None

    def batch_size(self, max_running: int) -> int:
        return max_running

    def _max_batch_tokens(self, view: SchedulerView) -> int | None:
        """Return the maximum number of prompt tokens in a batch, or None for no limit."""
        return None

    def plan(self, view: SchedulerView) -> StepPlan:
        if not view.running:
            opens_at = self.opens_at(view)
            is_open = opens_at is not None and opens_at <= view.now
            self._batch = _OpenBatch(view.now, self._new_seats(view), self._max_batch_tokens(view)) if is_open else None
        if self._batch is None:
            return CLOSED
        buckets = [
            number
            for number, num_seats in self._batch.seats.items()
            for _ in range(min(num_seats, view.waiting.bucket(number).num_waiting))
        ]
        buckets = buckets[: max(0, view.num_free_slots)]
        return StepPlan(num_admissible=len(buckets), buckets=tuple(buckets))

    def opens_at(self, view: SchedulerView) -> float | None:
        return min((self._due_at(bucket, view) for bucket in view.waiting.buckets), default=None)

    def admits(self, sequence: EngineSequence) -> bool:
        """Whether the batch has enough tokens left for the sequence. A prompt above the limit runs alone."""
        batch = self._batch
        assert batch is not None, "sequences are only admitted to an open batch"
        left = batch.num_tokens_left
        if left is None or batch.is_empty or sequence.num_prompt_tokens <= left:
            return True
        batch.seats.clear()  # close the batch, so that no later sequence overtakes this one
        return False

    def joined(self, sequence: EngineSequence) -> None:
        self._take_seats(1, sequence)

    def preempted(self, sequence: EngineSequence) -> None:
        self._take_seats(-1, sequence)

    def emptied(self, now: float) -> None:
        if self._batch is not None:
            self._batch_ended(now - self._batch.began_at)
        self._batch = None

    def _new_seats(self, view: SchedulerView) -> dict[int, int]:
        """Return the seats of a new batch: all of them in the bucket that has been due the longest.

        At least one bucket must be due. Only sequences that are already waiting get seats, even in a partial batch.
        """
        _, number = min((self._due_at(bucket, view), bucket.number) for bucket in view.waiting.buckets)
        return {number: min(self.batch_size(view.max_running), view.waiting.bucket(number).num_waiting)}

    def _due_at(self, bucket: Bucket, view: SchedulerView) -> float:
        """Return when a bucket's next batch starts if no other sequence arrives."""
        is_full, most = bucket.num_waiting >= self.batch_size(view.max_running), self._max_batch_tokens(view)
        has_tokens = most is not None and bucket.num_tokens >= most
        timer_ends = bucket.oldest_at + self._max_wait_s
        return min(view.now, timer_ends) if is_full or has_tokens else timer_ends

    def _batch_ended(self, latency_s: float) -> None:
        """Account for a batch whose sequences have all ended, `latency_s` after it began."""

    def _take_seats(self, number: int, sequence: EngineSequence) -> None:
        batch = self._batch
        if batch is None:
            return  # the sequence was already running when this strategy was selected
        batch.is_empty = False
        bucket = self.bucket_of(sequence)
        batch.seats[bucket] = batch.seats.get(bucket, 0) - number
        if batch.num_tokens_left is not None:
            batch.num_tokens_left -= number * sequence.num_prompt_tokens


class Static(WholeBatches):
    """A batch starts when no batch is running, and `max_running` sequences wait or one has waited `max_wait_ms`."""


class Dynamic(WholeBatches):
    """Like `Static`, but a batch starts as soon as waiting prompts fill `PREFILL_STEPS` steps. No batch is larger."""

    def _max_batch_tokens(self, view: SchedulerView) -> int:
        return PREFILL_STEPS * view.max_step_tokens


class Bucketed(WholeBatches):
    """Like `Static`, but only prompts of one length class share a batch, and each class has its own timer.

    The first class contains the prompts of at most `SHORTEST_CLASS_TOKENS`. The maximum length doubles with each class,
    so that a batch takes at most twice the time of its shortest prompt.
    """

    def bucket_of(self, sequence: EngineSequence) -> int:
        return max(0, ((sequence.num_prompt_tokens - 1) // (SHORTEST_CLASS_TOKENS // 2)).bit_length() - 1)


class Sorted(WholeBatches):
    """A batch contains the sequence that has waited longest, and those with the most similar prompt lengths.

    A sequence therefore waits for at most one batch per older waiting sequence. A batch starts under the conditions of
    `Static`. Background sequences only get the seats that foreground sequences leave free.
    """

    _STEP = 16  # lengths are compared in multiples of 16 tokens; among equal lengths, the policy's order decides

    def bucket_of(self, sequence: EngineSequence) -> int:
        """Return the length class, which is at least 0 for a foreground sequence and negative for a background one."""
        number = sequence.num_prompt_tokens // self._STEP
        return ~number if sequence.request.is_background else number

    def opens_at(self, view: SchedulerView) -> float | None:
        if not len(view.waiting):
            return None
        timer_ends = min(bucket.oldest_at for bucket in view.waiting.buckets) + self._max_wait_s
        return min(view.now, timer_ends) if len(view.waiting) >= view.max_running else timer_ends

    def _new_seats(self, view: SchedulerView) -> dict[int, int]:
        """Return seats for the waiting sequences whose lengths are nearest to the oldest one's length."""
        waiting = list(view.waiting.buckets)
        oldest = min(waiting, key=lambda bucket: (bucket.number < 0, bucket.oldest_at))
        length = max(oldest.number, ~oldest.number)
        seats, num_left = dict[int, int](), view.max_running
        for bucket in sorted(waiting, key=lambda each: (each.number < 0, abs(max(each.number, ~each.number) - length))):
            seats[bucket.number] = min(bucket.num_waiting, num_left)
            num_left -= seats[bucket.number]
        return seats


class Adaptive(WholeBatches):
    """Like `Static`, but the batch size grows by one after fast batches and shrinks by one after slow batches.

    The size starts at 1 and never exceeds `max_running`.
    """

    _NEWEST_SHARE = 0.25  # weight of the newest batch in the moving average, in which about the last eight count
    _TOO_FAST, _TOO_SLOW = 0.8, 1.2  # bounds of the average latency, as multiples of the target

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__(config)
        self._batch_size = 1
        self._target_s = config.target_latency_ms / 1e3
        self._average_s: float | None = None

    def batch_size(self, max_running: int) -> int:
        return min(self._batch_size, max_running)

    def _new_seats(self, view: SchedulerView) -> dict[int, int]:
        self._batch_size = self.batch_size(view.max_running)
        return super()._new_seats(view)

    def _batch_ended(self, latency_s: float) -> None:
        before = latency_s if self._average_s is None else self._average_s
        self._average_s = before + self._NEWEST_SHARE * (latency_s - before)
        if self._average_s < self._TOO_FAST * self._target_s:
            self._batch_size += 1
        elif self._average_s > self._TOO_SLOW * self._target_s:
            self._batch_size = max(self._batch_size - 1, 1)
