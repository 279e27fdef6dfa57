"""The sequences that wait to join, in the order of the scheduling policy."""

from __future__ import annotations

import heapq

from app.engine.policy import SchedulingPolicy
from app.engine.sequence import Sequence


class WaitingQueue:
    """A heap by policy key. Removal is lazy, so the cost of a step does not grow with the number waiting."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[float, ...], int, Sequence]] = []
        self._num_removed = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_removed

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (self._policy.key(sequence), sequence.arrival, sequence))

    def peek(self) -> Sequence:
        """The next to join. The queue must not be empty."""
        self._drop_removed()
        return self._heap[0][2]

    def pop(self) -> Sequence:
        self._drop_removed()
        return heapq.heappop(self._heap)[2]

    def remove_finished(self) -> None:
        """Account for one waiting sequence that has just become finished."""
        self._num_removed += 1
        if self._num_removed > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)
            self._num_removed = 0

    def _drop_removed(self) -> None:
        while self._heap[0][2].is_finished:
            heapq.heappop(self._heap)
            self._num_removed -= 1
