"""Assigns running requests to slots while people watch an engine, and creates views of the engine.

The engine itself has no numbered slots. A slot is a line on the screen, and each request gets the lowest free one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from app.engine.batch import StepBatch
from app.engine.observer import EndedStep, StepObserver
from app.engine.request import TokenDelta
from app.engine.scheduler import Scheduler
from app.engine.sequence import EngineSequence
from app.engine.snapshot import EngineSnapshot, QueueEntry, SlotUse, StepSums, TuningView
from app.engine.trace.entries import FailureKind
from app.engine.tuner import Tuning

# A screen shows no more lines. The limits bound a view's size (about 40 kB) and the time that it takes to create.
MAX_SLOTS = 256
MAX_WAITING = 14


@dataclass(slots=True)
class _Occupancy:
    """A sequence in a slot. Times are readings of the engine's clock."""

    sequence: EngineSequence
    slot: int
    joined_at: float
    first_token_at: float | None = None
    left_at: float | None = None
    why_left: str = ""
    is_shown: bool = False  # whether the last view showed everything but new tokens and blocks


class Viewer(StepObserver):
    """Records the events between two views. Used by the engine's thread."""

    def __init__(self, running: Iterable[EngineSequence], *, now: float) -> None:
        """`running`: the sequences that are already running."""
        self._occupancies: dict[str, _Occupancy] = {}  # by request id
        self._prefilling: dict[str, _Occupancy] = {}  # the occupancies that have had no token since they joined
        # Maximum number of requests that left since the last view. Beyond it, the oldest are not shown.
        max_left = 512
        self._left: deque[_Occupancy] = deque(maxlen=max_left)
        self._num_slots = 0
        self._free_slots: list[int] = []  # a heap of free slots below `_num_slots`
        self._wait_reason = ""
        self._last_step_at = now
        self._forget_steps()
        for sequence in running:
            occupancy = self._enter(sequence, now)
            if sequence.is_decoding:
                occupancy.first_token_at = now
                del self._prefilling[sequence.request.request_id]

    def _forget_steps(self) -> None:
        self._num_steps = self._num_tokens = self._num_drawn = self._num_sequences = self._most_tokens = 0
        self._busy_s = self._longest_s = 0.0
        # Maximum number of step ends in a view. With five views a second, this covers all steps of more than 3 ms.
        max_ends = 64
        self._ends: deque[float] = deque(maxlen=max_ends)

    # ------------------------------------------------------------------ events

    def aborted(self, request_id: str) -> None:
        self._leave(request_id, self._last_step_at, "abort")

    def slept(self) -> None:
        for request_id in list(self._occupancies):
            self._leave(request_id, self._last_step_at, "preempted")

    def scheduled(self, batch: StepBatch) -> None:
        decision = batch.decision
        for sequence in decision.preempted:
            self._leave(sequence.request.request_id, batch.began_at, "preempted")
        for sequence in decision.joined:
            self._enter(sequence, batch.began_at)
        self._wait_reason = "" if decision.wait_reason is None else str(decision.wait_reason)

    def sampled(self, batch: StepBatch, token_ids: list[int], num_kept: Sequence[int] = ()) -> None:
        self._num_drawn += len(token_ids)

    def failed(self, how: FailureKind, sequences: Iterable[EngineSequence] = ()) -> None:
        if how is FailureKind.DEVICE:  # no `step_ended` follows
            for sequence in sequences:
                self._leave(sequence.request.request_id, self._last_step_at, "error")

    def step_ended(self, step: EndedStep) -> None:
        if step.batch:
            self._note_step(step)
        if self._prefilling:
            self._note_first_tokens(step.deltas, step.at)
        for delta in step.deltas:
            if delta.finish_reason is not None:
                self._leave(delta.request_id, step.at, str(delta.finish_reason))

    def _note_step(self, step: EndedStep) -> None:
        self._last_step_at = step.at
        self._num_steps += 1
        self._ends.append(step.at)
        self._num_tokens += step.batch.num_scheduled_tokens
        self._num_sequences += len(step.batch.sequences)
        self._busy_s += step.seconds
        self._longest_s = max(self._longest_s, step.seconds)
        self._most_tokens = max(self._most_tokens, step.batch.num_scheduled_tokens)

    def _note_first_tokens(self, deltas: list[TokenDelta], at: float) -> None:
        for delta in deltas:
            if delta.token_ids and delta.request_id in self._prefilling:
                occupancy = self._prefilling.pop(delta.request_id)
                occupancy.first_token_at, occupancy.is_shown = at, False

    def _enter(self, sequence: EngineSequence, at: float) -> _Occupancy:
        request_id = sequence.request.request_id
        self._leave(request_id, at, "")  # frees the slot of an earlier request with this id whose end was not reported
        if self._free_slots:
            slot = heappop(self._free_slots)
        else:
            slot, self._num_slots = self._num_slots, self._num_slots + 1
        occupancy = self._occupancies[request_id] = self._prefilling[request_id] = _Occupancy(sequence, slot, at)
        return occupancy

    def _leave(self, request_id: str, at: float, why: str) -> None:
        occupancy = self._occupancies.pop(request_id, None)
        if occupancy is None:
            return  # the request was waiting, so it had no slot
        self._prefilling.pop(request_id, None)
        heappush(self._free_slots, occupancy.slot)
        occupancy.left_at, occupancy.why_left = at, why
        self._left.append(occupancy)

    # ------------------------------------------------------------------ views

    def snapshot(self, scheduler: Scheduler, tuning: Tuning | None, *, now: float, is_full: bool) -> EngineSnapshot:
        """Return the engine's current state and the events since the last view."""
        stats = scheduler.stats()
        shown = [*self._left]
        reported: list[int] = []
        for occupancy in self._occupancies.values():
            if is_full or not occupancy.is_shown:
                shown.append(occupancy)
                occupancy.is_shown = True
            elif occupancy.slot < MAX_SLOTS:
                sequence = occupancy.sequence
                reported += (occupancy.slot, len(sequence.generated_token_ids), len(sequence.blocks))
        slots = tuple([_slot_use(occupancy, now) for occupancy in shown if occupancy.slot < MAX_SLOTS])
        steps = StepSums(
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
            num_drawn_tokens=self._num_drawn,
            num_sequences=self._num_sequences,
            busy_ms=round(1000 * self._busy_s, 2),
            longest_ms=round(1000 * self._longest_s, 2),
            most_tokens=self._most_tokens,
            ended_ms=tuple([_ms(now - at) for at in self._ends]),
        )
        self._left.clear()
        self._forget_steps()
        return EngineSnapshot(
            strategy=stats.strategy,
            policy=stats.policy,
            max_running=stats.max_running,
            max_step_tokens=scheduler.limits.max_step_tokens,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            wait_reason=self._wait_reason if stats.num_waiting else "",
            num_blocks=stats.num_blocks,
            num_cached_blocks=scheduler.pool.num_evictable,
            num_free_blocks=stats.num_free_blocks - scheduler.pool.num_evictable,
            steps=steps,
            slots=slots,
            waiting=tuple(_waiting_requests(scheduler, now)),
            settings=stats.settings,
            reported=tuple(reported),
            prefill_chunk_tokens=scheduler.limits.prefill_chunk_tokens,
            tuning=None if tuning is None else _tuning_view(tuning),
        )


def _tuning_view(tuning: Tuning) -> TuningView:
    return TuningView(
        reason=str(tuning.reason),
        num_changes=tuning.num_changes,
        ttft_p99_ms=round(1000 * tuning.ttft_p99_s, 2),
        itl_p99_ms=round(1000 * tuning.itl_p99_s, 2),
        is_missed=tuning.is_missed,
    )


def _slot_use(occupancy: _Occupancy, now: float) -> SlotUse:
    sequence = occupancy.sequence
    request = sequence.request
    return SlotUse(
        request_id=request.request_id,
        tenant=request.tenant,
        priority=request.priority,
        is_background=request.is_background,
        slot=occupancy.slot,
        arrived_ms=_ms(now - sequence.arrived_at),
        joined_ms=_ms(now - occupancy.joined_at),
        first_token_ms=None if occupancy.first_token_at is None else _ms(now - occupancy.first_token_at),
        left_ms=None if occupancy.left_at is None else _ms(now - occupancy.left_at),
        why_left=occupancy.why_left,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        num_given_tokens=len(request.generated_token_ids),
        num_generated_tokens=sequence.num_generated_tokens,
        num_blocks=len(sequence.blocks),
        num_preemptions=sequence.num_preemptions,
        num_fetched_tokens=sequence.num_fetched_tokens,
        fetch_ms=_ms(sequence.fetch_s),
    )


def _waiting_requests(scheduler: Scheduler, now: float) -> Iterable[QueueEntry]:
    work = 0  # tokens to compute for the sequences ahead of this one
    for sequence in scheduler.first_waiting(MAX_WAITING):
        request = sequence.request
        yield QueueEntry(
            request_id=request.request_id,
            tenant=request.tenant,
            priority=request.priority,
            is_background=request.is_background,
            arrived_ms=_ms(now - sequence.arrived_at),
            expected_ms=_ms(scheduler.expected_wait_s(work)),
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_generated_tokens=sequence.num_generated_tokens,
            num_preemptions=sequence.num_preemptions,
        )
        work += sequence.estimated_work


def _ms(seconds: float) -> int:
    return round(1000 * seconds)
