"""Background work under any policy: it takes what nobody else wants, and gives it back at once."""

from __future__ import annotations

from app.engine.batch import Batch
from app.engine.policies.policy import PolicyQueue, Rank, RankQueue, SchedulingPolicy
from app.engine.sequence import Sequence


class BackgroundLast(SchedulingPolicy):
    """The order of another policy, with background requests behind everybody, by arrival.

    They join when no other request waits, and are the first to be preempted: by memory, and by any other request that
    waits for a slot. What they had computed stays in the prefix cache as long as there is room.
    """

    def __init__(self, inner: SchedulingPolicy) -> None:
        self._inner = inner
        self.preempts = inner.preempts

    def rank(self, sequence: Sequence) -> Rank:
        if sequence.request.is_background:
            return (1.0, sequence.arrival)
        return (0.0, *self._inner.rank(sequence))

    def new_queue(self) -> PolicyQueue:
        return _TwoQueues(self, self._inner.new_queue())

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        if waiting.request.is_background:
            return False
        return running.request.is_background or (self._inner.preempts and self._inner.may_preempt(waiting, running))

    def give_up_at(self, sequence: Sequence, service_s: float) -> float | None:
        return self._inner.give_up_at(sequence, service_s)

    def joined(self, sequence: Sequence) -> None:
        self._inner.joined(sequence)

    def computed(self, batch: Batch) -> None:
        self._inner.computed(batch)


class _TwoQueues:
    """Those in the foreground in their policy's order; the others behind them."""

    def __init__(self, policy: BackgroundLast, foreground: PolicyQueue) -> None:
        self._policy = policy
        self._foreground = foreground
        self._background = RankQueue()
        self._num_in_foreground = 0

    def push(self, sequence: Sequence) -> None:
        if sequence.request.is_background:
            self._background.push(sequence)
            return
        self._num_in_foreground += 1
        self._foreground.push(sequence)
        # A queue may have an order, and ranks, of its own; whoever runs is compared with this one.
        sequence.rank = self._policy.rank(sequence)

    def peek(self) -> Sequence:
        return self._foreground.peek() if self._num_in_foreground else self._background.peek()

    def pop(self) -> Sequence:
        if not self._num_in_foreground:
            return self._background.pop()
        self._num_in_foreground -= 1
        return self._foreground.pop()

    def note_finished(self, sequence: Sequence) -> None:
        if sequence.request.is_background:
            self._background.note_finished(sequence)
            return
        self._num_in_foreground -= 1
        self._foreground.note_finished(sequence)
