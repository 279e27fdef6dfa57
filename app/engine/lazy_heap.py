"""A heap of sequences that removes finished ones later."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

from app.engine.sequence import Sequence

KeyT = TypeVar("KeyT")


class LazyHeap(Generic[KeyT]):
    """Sequences by key, lowest first; equal keys by arrival.

    A sequence that finishes inside is only counted. It is removed when it reaches the top, or together with all other
    finished ones once they are half of the heap. So every operation costs O(log n) on average.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[KeyT, int, Sequence]] = []
        self._num_finished = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_finished

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, _, sequence in self._heap if not sequence.is_finished)

    def push(self, key: KeyT, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (key, sequence.arrival, sequence))

    def first_key(self) -> KeyT:
        """The lowest key. The heap must not be empty."""
        self._drop_finished()
        return self._heap[0][0]

    def peek(self) -> Sequence:
        """The first. The heap must not be empty."""
        self._drop_finished()
        return self._heap[0][2]

    def pop(self) -> Sequence:
        """Take out the first. The heap must not be empty."""
        self._drop_finished()
        return heapq.heappop(self._heap)[2]

    def note_finished(self) -> None:
        """Account for one sequence inside that has just become finished."""
        self._num_finished += 1
        if self._num_finished > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)
            self._num_finished = 0

    def _drop_finished(self) -> None:
        while self._heap[0][2].is_finished:
            heapq.heappop(self._heap)
            self._num_finished -= 1
