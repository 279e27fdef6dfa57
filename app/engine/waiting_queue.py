"""The sequences that wait to join: in buckets as the strategy wants them, in the policy's order inside each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter

from app.engine.policies import SchedulingPolicy
from app.engine.sequence import Sequence, SequenceStatus


class WaitingQueue:
    """Every waiting sequence, counted. What it costs to come, to go and to look does not grow with their number."""

    def __init__(self, policy: SchedulingPolicy, bucket_of: Callable[[Sequence], int]) -> None:
        """`bucket_of` says where a sequence waits; it must always say the same of it."""
        self._policy = policy
        self._bucket_of = bucket_of
        self._buckets: dict[int, Bucket] = {}  # as many as the strategy has, once each was needed
        self._num_waiting = 0
        self.num_foreground = 0  # sequences that somebody waits for
        self.num_tokens = 0  # of prompts
        self.num_foreground_tokens = 0  # of these, somebody waits for
        self.work = 0  # estimated tokens to compute, prompt and output

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def buckets(self) -> Iterable[Bucket]:
        """Those in which somebody waits."""
        return [bucket for bucket in self._buckets.values() if bucket.num_waiting]

    def bucket(self, number: int) -> Bucket:
        """One bucket, perhaps an empty one."""
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = Bucket(number, self._policy)
        return bucket

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait; one that was preempted waits at its old place."""
        self.bucket(self._bucket_of(sequence)).push(sequence)
        self._count(sequence, 1)

    def peek(self, number: int = 0) -> Sequence:
        """The next to join from a bucket. It must not be empty."""
        return self._buckets[number].queue.peek()

    def pop(self, number: int = 0) -> Sequence:
        """Take out the next to join from a bucket, which must not be empty. Call it once that sequence runs."""
        sequence = self._buckets[number].pop()
        self._count(sequence, -1)
        return sequence

    def take_all(self) -> list[Sequence]:
        """Everybody who waits, by arrival; the room is empty afterwards."""
        taken = [bucket.queue.pop() for bucket in self.buckets for _ in range(bucket.num_waiting)]
        self._buckets.clear()
        self._num_waiting = self.num_foreground = self.num_tokens = self.num_foreground_tokens = self.work = 0
        return sorted(taken, key=attrgetter("arrival"))

    def note_finished(self, sequence: Sequence) -> None:
        """Account for a waiting sequence that has just become finished."""
        self._buckets[self._bucket_of(sequence)].note_finished(sequence)
        self._count(sequence, -1)

    def _count(self, sequence: Sequence, number: int) -> None:
        self._num_waiting += number
        self.num_tokens += number * sequence.num_prompt_tokens
        if not sequence.request.is_background:
            self.num_foreground += number
            self.num_foreground_tokens += number * sequence.num_prompt_tokens
        self.work += number * sequence.estimated_work


class Bucket:
    """Sequences that may share a batch, in the policy's order, and who of them came first."""

    def __init__(self, number: int, policy: SchedulingPolicy) -> None:
        self.number = number
        self.queue = policy.new_queue()
        self.num_waiting = 0
        self.num_tokens = 0  # of prompts
        self._by_age: deque[Sequence] = deque()  # the oldest first; who no longer waits goes when it comes to the front

    @property
    def oldest_at(self) -> float:
        """When the one that has waited longest arrived, in seconds of the engine's clock. Must not be empty."""
        self._drop_gone()
        return self._by_age[0].arrived_at

    def push(self, sequence: Sequence) -> None:
        self.queue.push(sequence)
        self.num_waiting += 1
        self.num_tokens += sequence.num_prompt_tokens
        if self._by_age and sequence.arrival < self._by_age[0].arrival:  # preempted: it was here before
            self._by_age.appendleft(sequence)
        else:
            self._by_age.append(sequence)

    def pop(self) -> Sequence:
        sequence = self.queue.pop()
        self._leave(sequence)
        return sequence

    def note_finished(self, sequence: Sequence) -> None:
        self.queue.note_finished(sequence)
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.num_waiting -= 1
        self.num_tokens -= sequence.num_prompt_tokens
        self._drop_gone()
        if len(self._by_age) > 2 * self.num_waiting + 16:  # some behind the oldest are gone: let go of their prompts
            self._by_age = deque(each for each in self._by_age if each.status is SequenceStatus.WAITING)

    def _drop_gone(self) -> None:
        while self._by_age and self._by_age[0].status is not SequenceStatus.WAITING:
            self._by_age.popleft()
