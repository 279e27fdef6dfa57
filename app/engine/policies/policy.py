"""What a scheduling policy decides, and the queue that most of them need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from app.engine.batch import Batch
from app.engine.lazy_heap import LazyHeap
from app.engine.sequence import Sequence

Rank = tuple[float, ...]


class PolicyQueue(Protocol):
    """Waiting sequences in a policy's order."""

    def push(self, sequence: Sequence) -> None: ...

    def peek(self) -> Sequence:
        """The next to join. The queue must not be empty."""
        ...

    def pop(self) -> Sequence:
        """Take out the next to join. The queue must not be empty."""
        ...

    def note_finished(self, sequence: Sequence) -> None:
        """Account for a sequence inside that has just become finished."""
        ...


class SchedulingPolicy(ABC):
    """An order over sequences, and what it has to be told to keep it.

    Most orders are a rank that never changes while a sequence waits: where waiting is to buy priority, the time of
    arrival is part of the rank, which orders any two sequences at any time as their ages would. So nothing is ever
    sorted again, and the cost of a step does not grow with the number waiting.
    """

    preempts = False  # whether a waiting sequence may ever take the place of a running one

    @abstractmethod
    def rank(self, sequence: Sequence) -> Rank:
        """Where the sequence stands, lowest first; asked when it arrives and again when it joins.

        The running sequence of the highest rank is preempted first.
        """

    def new_queue(self) -> PolicyQueue:
        """An empty queue in this order."""
        return RankQueue()

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether `waiting` may take the place of `running`, which then waits behind it."""
        return False

    def give_up_at(self, sequence: Sequence, service_s: float) -> float | None:
        """When a sequence that has not started is refused for its deadline; None when it has none.

        `service_s` is how long it would take if it started at once. Seconds of the engine's clock.
        """
        return sequence.deadline_at

    def joined(self, sequence: Sequence) -> None:
        """A sequence has started to run, for the first time or after a preemption."""

    def computed(self, batch: Batch) -> None:
        """A step has been computed, and its results booked."""


class RankQueue:
    """Sequences by their rank: a heap."""

    def __init__(self) -> None:
        self._heap: LazyHeap[Rank] = LazyHeap()

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, sequence: Sequence) -> None:
        self._heap.push(sequence.rank, sequence)

    def peek(self) -> Sequence:
        return self._heap.peek()

    def pop(self) -> Sequence:
        return self._heap.pop()

    def note_finished(self, sequence: Sequence) -> None:
        self._heap.note_finished()
