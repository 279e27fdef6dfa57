"""The waiting sequences, divided into the strategy's buckets. Each bucket is in the policy's order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush, nsmallest
from itertools import islice
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from app.engine.sequence import EngineSequence, SequenceStatus

KeyT = TypeVar("KeyT")

MAX_SORTED = 1000  # maximum number of sequences per bucket that `WaitingQueue.first` sorts, in half a millisecond


class PolicyQueue(Protocol):
    """Waiting sequences in a policy's order."""

    def push(self, sequence: EngineSequence) -> None: ...

    def peek(self) -> EngineSequence:
        """Return the next sequence to join. The queue must not be empty."""
        ...

    def pop(self) -> EngineSequence:
        """Remove and return the next sequence to join. The queue must not be empty."""
        ...

    def note_finished(self, sequence: EngineSequence) -> None:
        """Account for a queued sequence that has just finished."""
        ...


class WaitingQueue:
    """All waiting sequences, with totals. Push, pop and peek take at most O(log n) time for n waiting sequences."""

    def __init__(self, new_queue: Callable[[], PolicyQueue], bucket_of: Callable[[EngineSequence], int]) -> None:
        """`new_queue` returns an empty queue in the policy's order.

        `bucket_of` returns a sequence's bucket number, which must never change.
        """
        self._new_queue = new_queue
        self._bucket_of = bucket_of
        self._buckets: dict[int, Bucket] = {}  # created when first used
        self._num_waiting = 0
        self.num_foreground = 0  # sequences of foreground requests
        self.num_tokens = 0  # prompt tokens
        self.num_foreground_tokens = 0  # prompt tokens of foreground requests
        self.work = 0  # estimated tokens to compute, prompt and output

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def buckets(self) -> Iterable[Bucket]:
        """The buckets that are not empty."""
        return [bucket for bucket in self._buckets.values() if bucket.num_waiting]

    def bucket(self, number: int) -> Bucket:
        """Return a bucket, which may be empty."""
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = Bucket(number, self._new_queue())
        return bucket

    def push(self, sequence: EngineSequence) -> None:
        """Add a sequence. A preempted sequence returns to its old position."""
        self.bucket(self._bucket_of(sequence)).push(sequence)
        self._count(sequence, 1)

    def peek(self, number: int = 0) -> EngineSequence:
        """Return a bucket's next sequence to join. The bucket must not be empty."""
        return self._buckets[number].queue.peek()

    def pop(self, number: int = 0) -> EngineSequence:
        """Remove and return a bucket's next sequence. Its status must no longer be WAITING."""
        sequence = self._buckets[number].pop()
        self._count(sequence, -1)
        return sequence

    def first(self, number: int) -> list[EngineSequence]:
        """Return the first sequences by rank among the oldest MAX_SORTED of each bucket. Slow, so for display only.

        Each bucket's next sequence comes first. With `fair`, later ones may join in another order: tenants take turns.
        """
        found: dict[int, EngineSequence] = {}  # by arrival number, because a bucket may list a preempted sequence twice
        for bucket in self.buckets:
            found |= {sequence.arrival: sequence for sequence in bucket.oldest(MAX_SORTED)}
        heads = [bucket.queue.peek() for bucket in self.buckets]
        ordered = nsmallest(number, found.values(), key=attrgetter("order_key"))
        return list(dict.fromkeys([*heads, *ordered]))[:number]

    def take_all(self) -> list[EngineSequence]:
        """Remove all sequences and return them in order of arrival."""
        taken = [bucket.queue.pop() for bucket in self.buckets for _ in range(bucket.num_waiting)]
        self._buckets.clear()
        self._num_waiting = self.num_foreground = self.num_tokens = self.num_foreground_tokens = self.work = 0
        return sorted(taken, key=attrgetter("arrival"))

    def note_finished(self, sequence: EngineSequence) -> None:
        self._buckets[self._bucket_of(sequence)].note_finished(sequence)
        self._count(sequence, -1)

    def _count(self, sequence: EngineSequence, number: int) -> None:
        self._num_waiting += number
        self.num_tokens += number * sequence.num_prompt_tokens
        if not sequence.request.is_background:
            self.num_foreground += number
            self.num_foreground_tokens += number * sequence.num_prompt_tokens
        self.work += number * sequence.estimated_work


class Bucket:
    """The waiting sequences that may share a batch, in the policy's order and by age."""

    def __init__(self, number: int, queue: PolicyQueue) -> None:
        self.number = number
        self.queue = queue
        self.num_waiting = 0
        self.num_tokens = 0  # prompt tokens
        self._by_age = deque[EngineSequence]()  # oldest first; sequences that no longer wait are removed lazily

    @property
    def oldest_at(self) -> float:
        """When the oldest sequence arrived, in seconds of the engine's clock. The bucket must not be empty."""
        self._drop_gone()
        return self._by_age[0].arrived_at

    def oldest(self, number: int) -> Iterable[EngineSequence]:
        """Yield the waiting sequences among the oldest `number` entries, oldest first."""
        return (each for each in islice(self._by_age, number) if each.status is SequenceStatus.WAITING)

    def push(self, sequence: EngineSequence) -> None:
        self.queue.push(sequence)
        self.num_waiting += 1
        self.num_tokens += sequence.num_prompt_tokens
        if self._by_age and sequence.arrival < self._by_age[0].arrival:  # it was preempted
            self._by_age.appendleft(sequence)
        else:
            self._by_age.append(sequence)

    def pop(self) -> EngineSequence:
        sequence = self.queue.pop()
        self._leave(sequence)
        return sequence

    def note_finished(self, sequence: EngineSequence) -> None:
        self.queue.note_finished(sequence)
        self._leave(sequence)

    def _leave(self, sequence: EngineSequence) -> None:
        self.num_waiting -= 1
        self.num_tokens -= sequence.num_prompt_tokens
        self._drop_gone()
        if len(self._by_age) > 2 * self.num_waiting + 16:  # release the prompts of sequences that no longer wait
            self._by_age = deque(each for each in self._by_age if each.status is SequenceStatus.WAITING)

    def _drop_gone(self) -> None:
        while self._by_age and self._by_age[0].status is not SequenceStatus.WAITING:
            self._by_age.popleft()


class LazyHeap(Generic[KeyT]):
    """Sequences in ascending order of their keys. Sequences with equal keys are in order of arrival.

    A queued sequence that finishes is only counted. It is removed when it reaches the top, or when finished sequences
    make up half of the heap, which removes all of them. Each operation therefore takes O(log n) time on average.
    """

    def __init__(self, key: Callable[[EngineSequence], KeyT]) -> None:
        """`key` is called once per push without an explicit key."""
        self._key = key
        self._heap: list[tuple[KeyT, int, EngineSequence]] = []
        self._num_finished = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_finished

    def __iter__(self) -> Iterator[EngineSequence]:
        return (sequence for _, _, sequence in self._heap if not sequence.is_finished)

    def push(self, sequence: EngineSequence, key: KeyT | None = None) -> None:
        """Add a sequence with this key, or with the heap's own key for the sequence if `key` is None."""
        heappush(self._heap, (self._key(sequence) if key is None else key, sequence.arrival, sequence))

    def first_key(self) -> KeyT:
        """Return the lowest key. The heap must not be empty."""
        self._drop_finished()
        return self._heap[0][0]

    def peek(self) -> EngineSequence:
        """Return the first sequence. The heap must not be empty."""
        self._drop_finished()
        return self._heap[0][2]

    def pop(self) -> EngineSequence:
        """Remove and return the first sequence. The heap must not be empty."""
        self._drop_finished()
        return heappop(self._heap)[2]

    def note_finished(self, sequence: EngineSequence) -> None:
        self._num_finished += 1
        if self._num_finished > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapify(self._heap)
            self._num_finished = 0

    remove = note_finished  # part of the `Line` interface of a fair queue

    def _drop_finished(self) -> None:
        while self._heap[0][2].is_finished:
            heappop(self._heap)
            self._num_finished -= 1
