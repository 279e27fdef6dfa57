"""Batching strategies decide in which steps waiting sequences may join the running ones, and how many.

To add a strategy, add its settings to `app/config/scheduler.py`, a class here, and a line to `make_strategy`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
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
)
from app.engine.sequence import EngineSequence
from app.engine.waiting_queue import Bucket, WaitingQueue


def make_strategy(config: StrategyConfig) -> BatchingStrategy:
    """Return a new strategy, without any state of an earlier one."""
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
    """How many waiting sequences may join a step, and how the step's token budget is divided."""

    num_admissible: int  # waiting sequences that may join, if budget and memory suffice
    buckets: tuple[int, ...] = ()  # the bucket of each sequence that may join, in order; empty: all from bucket 0
    max_prefill_tokens: int | None = None  # limit for all prompt chunks of the step together; None: the whole budget

    def bucket(self, number: int) -> int:
        """Return the bucket of the sequence that joins as number `number`, counted from 0."""
        return self.buckets[number] if self.buckets else 0


CLOSED = StepPlan(num_admissible=0)


class BatchingStrategy(ABC):
    """Decides before every step how many waiting sequences may join. Used by one thread. The view contains the time."""

    joins_any_step = False  # whether sequences may join while other sequences run, so that one may replace another
    batch_size = 0  # the batch size that the strategy currently aims at; 0 if it forms no batches

    @abstractmethod
    def plan(self, view: SchedulerView) -> StepPlan:
        """Return how many sequences may join the next step. Called once before each step."""

    @abstractmethod
    def opens_at(self, view: SchedulerView) -> float | None:
        """While nothing runs, return when `plan` will admit a sequence if none arrives; None if no sequence waits.

        A time that is not after `view.now` means the next step.
        """

    def bucket_of(self, sequence: EngineSequence) -> int:
        """Return the number of the bucket in which a sequence waits. The number of a sequence must never change."""
        return 0

    def admits(self, sequence: EngineSequence) -> bool:
        """Whether the next sequence in order may join; False ends admission for this step."""
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

    The limit keeps the time between tokens constant under long prompts, as the token budget of Sarathi-Serve does
    (Agrawal et al., 2024). Steps in which no sequence decodes keep their full size.
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
    """The running batch. A sequence of the batch may join in a later step, and again after a preemption."""

    began_at: float
    seats: dict[int, int]  # number of free seats, by bucket
    num_tokens_left: int | None  # prompt tokens that the batch may still take; None: no limit
    is_empty: bool = True


class WholeBatches(BatchingStrategy):
    """Once a batch has formed, no other sequence joins until all sequences of the batch have ended.

    A batch starts when it is full or when its oldest sequence has waited `max_wait_s`, so a last partial batch always
    starts when this timer ends. If the token budget or memory of one step does not suffice for a batch, its remaining
    seats are filled in the next steps. A preempted sequence gets its seat back.
    """

    def __init__(self, *, batch_size: int, max_wait_s: float, max_batch_tokens: int | None = None) -> None:
        self.batch_size = batch_size
        self._max_wait_s = max_wait_s
        self._max_batch_tokens = max_batch_tokens
        self._batch: _OpenBatch | None = None

    def plan(self, view: SchedulerView) -> StepPlan:
        if not view.running:
            opens_at = self.opens_at(view)
            is_open = opens_at is not None and opens_at <= view.now
            self._batch = _OpenBatch(view.now, self._new_seats(view), self._max_batch_tokens) if is_open else None
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
        assert batch is not None, "only an open batch admits"
        left = batch.num_tokens_left
        if left is None or batch.is_empty or sequence.num_prompt_tokens <= left:
            return True
        batch.seats.clear()  # the batch is closed, so that no later sequence overtakes this one
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
        """Return the seats of a new batch: all of them in the bucket that has been due for longest.

        Some bucket must be due. Only sequences that wait now get seats: later arrivals do not fill a partial batch.
        """
        _, number = min((self._due_at(bucket, view), bucket.number) for bucket in view.waiting.buckets)
        return {number: min(self.batch_size, view.waiting.bucket(number).num_waiting)}

    def _due_at(self, bucket: Bucket, view: SchedulerView) -> float:
        """Return when a bucket's next batch starts if no other sequence arrives."""
        is_full = bucket.num_waiting >= min(self.batch_size, view.max_running)
        has_tokens = self._max_batch_tokens is not None and bucket.num_tokens >= self._max_batch_tokens
        timer_ends = bucket.oldest_at + self._max_wait_s
        return min(view.now, timer_ends) if is_full or has_tokens else timer_ends

    def _batch_ended(self, latency_s: float) -> None:
        """Account for a batch whose sequences have all ended, `latency_s` after it began."""

    def _take_seats(self, number: int, sequence: EngineSequence) -> None:
        batch = self._batch
        if batch is None:
            return  # the sequence already ran when this strategy was chosen
        batch.is_empty = False
        bucket = self.bucket_of(sequence)
        batch.seats[bucket] = batch.seats.get(bucket, 0) - number
        if batch.num_tokens_left is not None:
            batch.num_tokens_left -= number * sequence.num_prompt_tokens


class Static(WholeBatches):
    """A batch starts when none runs and `batch_size` sequences wait, or the oldest has waited `max_wait_ms`."""

    def __init__(self, config: StaticConfig) -> None:
        super().__init__(batch_size=config.batch_size, max_wait_s=config.max_wait_ms / 1e3)


class Dynamic(WholeBatches):
    """As `Static`; a batch starts earlier when waiting prompts have `max_batch_tokens`, which also limits its size."""

    def __init__(self, config: DynamicConfig) -> None:
        super().__init__(
            batch_size=config.batch_size,
            max_wait_s=config.max_wait_ms / 1e3,
            max_batch_tokens=config.max_batch_tokens,
        )


class Bucketed(WholeBatches):
    """As `Static`, but only prompts of one length class share a batch, and each class has its own timer.

    Bucket `n` contains the prompts of at most `bounds[n]` tokens. The last bucket contains all longer prompts.
    """

    def __init__(self, config: BucketedConfig) -> None:
        super().__init__(batch_size=config.batch_size, max_wait_s=config.max_wait_ms / 1e3)
        self._bounds = config.bounds

    def bucket_of(self, sequence: EngineSequence) -> int:
        return bisect_left(self._bounds, sequence.num_prompt_tokens)


class Sorted(WholeBatches):
    """A batch has the sequence that has waited longest, and the sequences whose prompt lengths are nearest to its own.

    A sequence therefore waits for at most as many batches as there are older waiting sequences. A batch starts under
    the conditions of `Static`. Background sequences get only the seats that foreground sequences leave.
    """

    _STEP = 16  # lengths are compared in steps of 16 tokens; within one step, the policy's order decides

    def __init__(self, config: SortedConfig) -> None:
        super().__init__(batch_size=config.batch_size, max_wait_s=config.max_wait_ms / 1e3)

    def bucket_of(self, sequence: EngineSequence) -> int:
        """Return the length class: 0 or higher for foreground sequences, below 0 for background sequences."""
        number = sequence.num_prompt_tokens // self._STEP
        return ~number if sequence.request.is_background else number

    def opens_at(self, view: SchedulerView) -> float | None:
        if not len(view.waiting):
            return None
        timer_ends = min(bucket.oldest_at for bucket in view.waiting.buckets) + self._max_wait_s
        return min(view.now, timer_ends) if len(view.waiting) >= min(self.batch_size, view.max_running) else timer_ends

    def _new_seats(self, view: SchedulerView) -> dict[int, int]:
        """Return seats for the waiting sequences whose lengths are nearest to that of the oldest one."""
        waiting = list(view.waiting.buckets)
        oldest = min(waiting, key=lambda bucket: (bucket.number < 0, bucket.oldest_at))
        length = max(oldest.number, ~oldest.number)
        seats, num_left = dict[int, int](), min(self.batch_size, view.max_running)
        for bucket in sorted(waiting, key=lambda each: (each.number < 0, abs(max(each.number, ~each.number) - length))):
            seats[bucket.number] = min(bucket.num_waiting, num_left)
            num_left -= seats[bucket.number]
        return seats


class Adaptive(WholeBatches):
    """As `Static`, but the batch size grows by one while batches are fast and shrinks by one while batches are slow.

    The first batch has one sequence. The configured `batch_size` is the maximum.
    """

    _NEWEST_SHARE = 0.25  # weight of the newest batch in the moving average: about the last eight batches count
    _TOO_FAST, _TOO_SLOW = 0.8, 1.2  # bounds of the average latency, as multiples of the target

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__(batch_size=1, max_wait_s=config.max_wait_ms / 1e3)
        self._largest = config.batch_size
        self._target_s = config.target_latency_ms / 1e3
        self._average_s: float | None = None

    def _batch_ended(self, latency_s: float) -> None:
        before = latency_s if self._average_s is None else self._average_s
        self._average_s = before + self._NEWEST_SHARE * (latency_s - before)
        if self._average_s < self._TOO_FAST * self._target_s:
            self.batch_size = min(self.batch_size + 1, self._largest)
        elif self._average_s > self._TOO_SLOW * self._target_s:
            self.batch_size = max(self.batch_size - 1, 1)
