"""Turns an engine's events into the entries of a step log.

The recorder runs as part of every step, so it only collects data. In most steps, the same sequences advance by one
token, which costs only a comparison and an entry. Another thread writes the entries (see `step_log.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter_ns

from app.config import SchedulerConfig
from app.engine.batch import StepBatch, StepLimits
from app.engine.observer import EndedStep, StepObserver
from app.engine.request import Request, TokenDelta
from app.engine.sequence import EngineSequence
from app.engine.trace.entries import (
    NOTHING,
    UNKNOWN,
    Abort,
    Arrival,
    Asleep,
    CacheCleared,
    Entry,
    FailureKind,
    Limited,
    Reconfigured,
    ScheduledTokens,
    StepFailure,
    StepRecord,
)
from app.errors import DeviceFault


class StepRecorder(StepObserver):
    """Creates an entry for every step and every external event, and passes it to `put` when it is complete."""

    def __init__(
        self,
        put: Callable[[Entry], bool],
        close: Callable[[], None] = lambda: None,
        stopwatch_ns: Callable[[], int] = perf_counter_ns,
    ) -> None:
        """`put` is called in the engine's thread. It must not block, and returns False if it drops the entry."""
        self._put = put
        self._close = close
        self._stopwatch_ns = stopwatch_ns
        self._num_arrived = 0
        self._num_steps = 0
        self._numbers: dict[str, int] = {}  # numbers of the requests that have not ended, by request id
        self._steady: tuple[EngineSequence, ...] | None = None  # the previous step's sequences, if each drew a token
        self._begin()

    def arrived(self, request: Request, *, at: float) -> None:
        number = self._num_arrived
        self._num_arrived += 1
        self._numbers[request.request_id] = number
        self._put(Arrival(number, at, request))

    def aborted(self, request_id: str) -> None:
        self._put(Abort(self._left(request_id)))

    def reconfigured(self, config: SchedulerConfig) -> None:
        self._put(Reconfigured(config))

    def limited(self, limits: StepLimits) -> None:
        self._put(Limited(limits))

    def cache_cleared(self) -> None:
        self._put(CacheCleared())

    def slept(self) -> None:
        self._put(Asleep(True))

    def woke(self) -> None:
        self._put(Asleep(False))

    def step_began(self) -> None:
        self._begin()
        self._began_ns = self._scheduled_ns = self._stopwatch_ns()

    def _begin(self) -> None:
        self._batch: StepBatch | None = None
        self._blocks: list[list[int]] | tuple[()] = ()
        self._scheduled: ScheduledTokens | None = NOTHING
        self._token_ids: list[int] = []
        self._num_kept: Sequence[int] = ()
        self._is_late = False
        self._failures: list[StepFailure] = []
        self._began_ns = self._scheduled_ns = self._sampled_ns = 0

    def scheduled(self, batch: StepBatch) -> None:
        self._batch = batch
        joined = batch.decision.joined
        self._blocks = [list(sequence.block_ids) for sequence in joined] if joined else ()
        self._scheduled = None if self._continues_previous(batch) else _scheduled_tokens(batch)
        if self._scheduled is not None:
            is_steady = batch and not (self._scheduled.unsampled or batch.has_drafts)
            self._steady = batch.sequences if is_steady else None
        self._scheduled_ns = self._stopwatch_ns()

    def _continues_previous(self, batch: StepBatch) -> bool:
        """Whether the step has the same sequences as the previous one, and each computes one more token."""
        return (
            self._steady == batch.sequences  # compared by identity, in C
            and batch.num_scheduled_tokens == len(batch.sequences)
            and not batch.decision.joined
            and not batch.decision.preempted
        )

    def sampled(self, batch: StepBatch, token_ids: list[int], num_kept: Sequence[int] = ()) -> None:
        self._token_ids, self._num_kept, self._is_late = token_ids, num_kept, batch is not self._batch
        self._sampled_ns = self._stopwatch_ns()

    def failed(self, how: FailureKind, sequences: Iterable[EngineSequence] = ()) -> None:
        ending = [sequence for sequence in sequences if not sequence.is_finished]
        self._failures.append(StepFailure(how, [sequence.arrival for sequence in ending]))
        self._steady = None
        if how is FailureKind.DEVICE:
            reason = f"error:{DeviceFault.__name__}"  # the error that callers receive
            ended = [(self._left(sequence.request.request_id), reason) for sequence in ending]
            self._finish(ended, ended_at=None)

    def step_ended(self, step: EndedStep) -> None:
        ended = [(self._left(each.request_id), _reason(each)) for each in step.deltas if each.finish_reason is not None]
        self._finish(ended, ended_at=step.at)

    def close(self) -> None:
        self._close()

    def _left(self, request_id: str) -> int:
        # A new request may have reused the id before the earlier one's end is recorded. Recording must not fail then.
        return self._numbers.pop(request_id, UNKNOWN)

    def _finish(self, ended: list[tuple[int, str]], *, ended_at: float | None) -> None:
        now_ns = self._stopwatch_ns()
        batch, self._batch = self._batch, None  # drop the references to sequences
        record = self._record(batch, ended, ended_at, now_ns)
        if not self._put(record) or batch is None:
            self._steady = None  # after a dropped entry or a step without a batch, the next entry must be complete

    def _record(
        self, batch: StepBatch | None, ended: list[tuple[int, str]], ended_at: float | None, now_ns: int
    ) -> StepRecord:
        self._num_steps += 1
        sampled_ns = self._sampled_ns or self._scheduled_ns
        times_us = (
            (self._scheduled_ns - self._began_ns) // 1000,
            (sampled_ns - self._scheduled_ns) // 1000,
            (now_ns - sampled_ns) // 1000,
        )
        if batch is None:  # an engine that launches ahead waited for the previous step and scheduled none
            return StepRecord(
                self._num_steps,
                ended_at=ended_at,
                scheduled=NOTHING,
                token_ids=self._token_ids,
                is_late=self._is_late,
                ended=ended,
                times_us=times_us,
                failures=self._failures,
                num_kept=self._num_kept,
            )
        decision = batch.decision
        return StepRecord(
            self._num_steps,
            batch.began_at,
            ended_at,
            self._scheduled,
            self._token_ids,
            self._is_late,
            _numbers(decision.joined) if decision.joined else (),
            self._blocks,
            _numbers(decision.preempted) if decision.preempted else (),
            ended,
            decision.num_waiting,
            decision.wait_reason,
            decision.num_free_blocks,
            times_us,
            self._failures,
            self._num_kept,
            decision.fetching,
            decision.fetched,
        )


def _scheduled_tokens(batch: StepBatch) -> ScheduledTokens:
    scheduled = batch.scheduled
    is_plain = batch.num_scheduled_tokens == len(scheduled)
    counts = None if is_plain else [len(item.token_ids) for item in scheduled]
    unsampled = [index for index, item in enumerate(scheduled) if not item.samples]
    return ScheduledTokens(_numbers(batch.sequences), [item.start for item in scheduled], counts, unsampled)


def _numbers(sequences: Iterable[EngineSequence]) -> list[int]:
    return [sequence.arrival for sequence in sequences]


def _reason(delta: TokenDelta) -> str:
    return str(delta.finish_reason) if delta.error is None else f"error:{type(delta.error).__name__}"
