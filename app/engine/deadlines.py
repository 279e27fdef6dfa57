"""Deadlines of requests: decides when it is too late to start a request, and which requests must end now."""

from __future__ import annotations

from collections.abc import Iterator

from app.engine.policies import SchedulingPolicy
from app.engine.sequence import EngineSequence
from app.engine.step_times import Throughput
from app.engine.waiting_queue import LazyHeap
from app.errors import DeadlineMissed


class Deadlines:
    """Sequences with a deadline, ordered by the time of their next check."""

    def __init__(self, throughput: Throughput) -> None:
        self._throughput = throughput
        self._heap = LazyHeap(_deadline_at)

    @property
    def next_at(self) -> float | None:
        """The time of the next check, or None if no sequence has a deadline."""
        return self._heap.first_key() if len(self._heap) else None

    def watch(
        self,
        sequence: EngineSequence,
        policy: SchedulingPolicy,
        *,
        chunk_tokens: int,
        num_expected_tokens: int | None,
        is_idle: bool,
    ) -> None:
        """Schedule checks for a sequence that has just arrived: at its latest useful start, and at its deadline.

        Each step computes `chunk_tokens` of the prompt. Without `num_expected_tokens`, only the minimum output
        (`min_tokens`) counts, to avoid rejecting requests because of a guess. An idle engine (`is_idle`) starts every
        sequence, because it would otherwise not notice that it has become faster.
        """
        num_tokens = sequence.request.sampling.min_tokens if num_expected_tokens is None else num_expected_tokens
        give_up_at = None if is_idle else self._give_up_at(sequence, policy, chunk_tokens, num_tokens)
        self._heap.push(sequence, give_up_at)

    def overdue(self, now: float) -> Iterator[EngineSequence]:
        """Yield sequences that have expired or can no longer start in time. Each must be ended before the next one."""
        while (at := self.next_at) is not None and at <= now:
            sequence = self._heap.peek()
            if now < _deadline_at(sequence) and sequence.has_started:
                self._heap.push(self._heap.pop())
            else:
                yield sequence
                assert sequence.is_finished, "an overdue sequence was not ended"

    def note_finished(self, sequence: EngineSequence) -> None:
        """Stop watching a sequence that has just finished."""
        self._heap.note_finished(sequence)

    def _give_up_at(
        self, sequence: EngineSequence, policy: SchedulingPolicy, chunk_tokens: int, num_tokens: int
    ) -> float:
        """Return the time at which a sequence is rejected if it has not started."""
        num_chunks = -(-sequence.num_prompt_tokens // chunk_tokens)
        service_s = self._throughput.step_s * (num_chunks + max(1, num_tokens - sequence.num_generated_tokens) - 1)
        deadline_at = _deadline_at(sequence)
        if sequence.arrived_at + service_s > deadline_at:
            return sequence.arrived_at  # the deadline would be missed even if the sequence started on arrival
        return deadline_at - service_s if policy.refuses_late else deadline_at


def deadline_missed(sequence: EngineSequence, now: float) -> DeadlineMissed:
    """Return the error for a sequence that is overdue at `now`."""
    asked, spent = sequence.request.deadline_s, now - sequence.arrived_at
    if now >= _deadline_at(sequence):
        when = "while the request was running" if sequence.has_started else "while the request was waiting"
        return DeadlineMissed(f"the deadline of {asked:g} s passed {when}; allow more time")
    return DeadlineMissed(
        f"the deadline of {asked:g} s cannot be met: {spent:.3g} s passed in the queue, and the remaining time is too "
        f"short; allow more time"
    )


def _deadline_at(sequence: EngineSequence) -> float:
    assert sequence.deadline_at is not None, "only sequences with a deadline are watched"
    return sequence.deadline_at
