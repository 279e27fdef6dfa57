"""Which requests run out of time, in the order in which they do."""

from __future__ import annotations

from collections.abc import Iterator

from app.engine.lazy_heap import LazyHeap
from app.engine.sequence import Sequence
from app.errors import DeadlineMissed


class Deadlines:
    """Sequences with a deadline, by the time at which they have to be looked at."""

    def __init__(self) -> None:
        self._heap: LazyHeap[float] = LazyHeap()

    @property
    def next_at(self) -> float | None:
        """When the next one runs out of time."""
        return self._heap.first_key() if len(self._heap) else None

    def watch(self, sequence: Sequence, give_up_at: float) -> None:
        """Look at a sequence at `give_up_at` if it has not started then, and at its deadline in any case."""
        assert sequence.deadline_at is not None, "only a sequence with a deadline is watched"
        self._heap.push(min(give_up_at, sequence.deadline_at), sequence)

    def out_of_time(self, now: float) -> Iterator[Sequence]:
        """Those that must end now: expired, or too late to be started. The caller ends each before the next."""
        while (at := self.next_at) is not None and at <= now:
            sequence = self._heap.peek()
            deadline_at = sequence.deadline_at
            assert deadline_at is not None, "only a sequence with a deadline is watched"
            if now < deadline_at and sequence.has_started:
                self._heap.push(deadline_at, self._heap.pop())
            else:
                yield sequence
                assert sequence.is_finished, "the caller ends it before it asks for the next"

    def note_finished(self) -> None:
        """Account for a watched sequence that has just become finished."""
        self._heap.note_finished()


def missed(sequence: Sequence, now: float) -> DeadlineMissed:
    """What the caller of a sequence that ran out of time is told."""
    asked, spent = sequence.request.deadline_s, now - sequence.arrived_at
    assert sequence.deadline_at is not None, "only a sequence with a deadline runs out of time"
    if now >= sequence.deadline_at:
        when = "while it ran" if sequence.has_started else "while it waited"
        return DeadlineMissed(f"the deadline of {asked:g} s passed {when}; nothing is computed for it any more")
    return DeadlineMissed(
        f"the deadline of {asked:g} s cannot be met: {spent:.3g} s have passed and not enough is left; "
        f"it was refused before anything was computed"
    )
