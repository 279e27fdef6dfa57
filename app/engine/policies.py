"""Scheduling policies: which waiting sequence runs next, and which running one is preempted first.

To add one: its settings in `app/config/scheduler.py`, a class here, a line in `make_policy`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Several
from itertools import repeat

from app.config import DeadlineConfig, FairConfig, FcfsConfig, PolicyConfig, PriorityConfig, SjfConfig
from app.engine.batch import StepBatch
from app.engine.sequence import Sequence
from app.engine.waiting_queue import LazyHeap, PolicyQueue
from app.fair import FairQueue, FairShares

# Under `sjf`, one second of waiting outweighs so many tokens of work.
AGEING_TOKENS_PER_S = 1000.0
# Under `sjf`, a shorter request that arrives later than this never goes first. It limits the waiting of requests of
# more than 30,000 tokens; of all others the limit is their own work, by the rate above.
MAX_OVERTAKING_S = 30.0
# Under `priority`, so many seconds of waiting outweigh one class. A caller that wants more between two classes leaves
# numbers out: with the priorities 0 and 6 it is a minute.
AGEING_S = 10.0
# The deadline by which a request without one is ordered among the others.
DEFAULT_DEADLINE_S = 60.0
# A generated token takes a place in a step of its own, prompt tokens are computed many at a time; Sheng et al. charge
# the same.
PROMPT_WEIGHT, GENERATED_WEIGHT = 1.0, 2.0

OrderKey = tuple[float, ...]


def make_policy(config: PolicyConfig) -> SchedulingPolicy:
    """A new policy, without the memory of an earlier one."""
    match config:
        case FcfsConfig():
            return FirstComeFirstServed()
        case SjfConfig():
            return ShortestJobFirst()
        case PriorityConfig():
            return PriorityFirst()
        case FairConfig():
            return FairShare()
        case DeadlineConfig():
            return EarliestDeadlineFirst()


# ---------------------------------------------------------------------- the interface


class SchedulingPolicy(ABC):
    """An order over sequences, with the events that it needs to keep it.

    Most orders are a rank that does not change while a sequence waits. Where waiting improves the place, the rank
    contains the time of arrival: two sequences then compare at any time as their ages would. So nothing is sorted
    again, and the cost of a step does not grow with the number of waiting sequences.

    Under each, background requests are behind all others, by arrival. They join when no other request waits, and are
    preempted first: for memory, and for any other request that waits for a slot. What they had computed stays in the
    prefix cache as long as there is room.
    """

    preempts = False  # whether a waiting foreground sequence may take the place of a running one
    counts_steps = False  # whether `computed` does anything
    refuses_late = False  # a sequence that waits, as soon as it can no longer be finished by its deadline

    def order_key(self, sequence: Sequence) -> OrderKey:
        """The sequence's place, lowest first. Called when it begins to wait and again when it joins.

        The running sequence of the highest rank is preempted first.
        """
        if sequence.request.is_background:
            return (1.0, sequence.arrival)
        return (0.0, *self.foreground_key(sequence))

    @abstractmethod
    def foreground_key(self, sequence: Sequence) -> OrderKey:
        """The place of a foreground sequence among the others, lowest first."""

    def new_queue(self) -> PolicyQueue:
        """An empty queue in this order."""
        return LazyHeap(self.order_key)

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether `waiting` may take the place of `running`, which then waits behind it."""
        return running.request.is_background and not waiting.request.is_background

    def joined(self, sequence: Sequence) -> None:
        """A sequence has started to run, for the first time or after a preemption."""

    def has_new_order(self, running: Several[Sequence]) -> bool:
        """Whether the order keys of running sequences are to be made again. Asked before each step."""
        return False

    def computed(self, batch: StepBatch, num_kept: Several[int] = ()) -> None:
        """A step has been computed, and its results are processed. `num_kept`: as in `StepResult`."""


# ---------------------------------------------------------------------- orders by rank


class FirstComeFirstServed(SchedulingPolicy):
    """By arrival. A preempted sequence keeps its place, so no sequence starves."""

    def foreground_key(self, sequence: Sequence) -> OrderKey:
        return (sequence.arrival,)


class ShortestJobFirst(SchedulingPolicy):
    """The least estimated work (prompt and predicted output tokens) first, with ageing.

    The rank is the arrival plus a handicap in seconds that grows with the work. A sequence can only be overtaken by
    one that arrives within its own handicap, and no handicap exceeds `MAX_OVERTAKING_S`: that limits starvation,
    whatever arrives.
    """

    def foreground_key(self, sequence: Sequence) -> OrderKey:
        handicap_s = sequence.estimated_work / AGEING_TOKENS_PER_S
        return (sequence.arrived_at + min(handicap_s, MAX_OVERTAKING_S), sequence.arrival)


class PriorityFirst(SchedulingPolicy):
    """The lowest priority number first, then arrival, with ageing.

    One class outweighs `AGEING_S` seconds of waiting. A request is only overtaken by one that is `n` classes better
    and arrives at most `n * AGEING_S` seconds later: that limits starvation.
    """

    preempts = True

    def foreground_key(self, sequence: Sequence) -> OrderKey:
        handicap_s = sequence.request.priority * AGEING_S
        return (sequence.arrived_at + handicap_s, sequence.request.priority, sequence.arrival)

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        if waiting.request.is_background or running.request.is_background:
            return super().may_preempt(waiting, running)
        # Both: a better class, and a better rank as well. With the better class alone the other would return at once.
        return waiting.request.priority < running.request.priority and waiting.order_key < running.order_key


# ---------------------------------------------------------------------- fair shares


class FairShare(SchedulingPolicy):
    """The tenant that has been served the fewest tokens first: the virtual token counter of Sheng et al. (2024).

    A tenant is charged for every prompt token that is computed and every token that is generated.
    """

    counts_steps = True

    def __init__(self) -> None:
        self.shares = FairShares(max_idle=10_000)

    def foreground_key(self, sequence: Sequence) -> OrderKey:
        # Set when it joins: of the running ones, the one that joined at its tenant's highest counter goes last.
        return (self.shares.served(sequence.request.tenant), *self.own_key(sequence))

    def own_key(self, sequence: Sequence) -> OrderKey:
        """The sequence's place among those of its tenant, lowest first: by arrival."""
        return (sequence.arrival,)

    def new_queue(self) -> PolicyQueue:
        return _TenantsQueue(self)

    def joined(self, sequence: Sequence) -> None:
        if sequence.request.is_background:
            return  # it runs on unused capacity, so its tenant is not charged
        # A tenant is not charged for what a preemption makes us compute again.
        num_tokens = 0 if sequence.num_preemptions else sequence.num_uncomputed_tokens
        self.shares.serve(sequence.request.tenant, num_tokens * PROMPT_WEIGHT)

    def computed(self, batch: StepBatch, num_kept: Several[int] = ()) -> None:
        numbers = num_kept or repeat(1)
        for item, sequence, number in zip(batch.scheduled, batch.sequences, numbers, strict=False):
            if item.samples and not sequence.request.is_background:
                self.shares.charge(sequence.request.tenant, number * GENERATED_WEIGHT)


class EarliestDeadlineFirst(FairShare):
    """Of each tenant the earliest deadline first (Liu and Layland, 1973), among those that can still be met.

    Tenants get fair shares, so a short deadline goes before the same tenant's other requests, and before no other
    tenant's. One tenant alone has the order of deadlines.

    Without refusals, this order is the worst of all under overload: it serves the requests that are about to be late.
    So a request that can no longer be finished in time is refused, and a deadline that has passed raises no urgency.
    A request without a deadline is ordered as if it had `DEFAULT_DEADLINE_S`, so that it does not starve; it is never
    refused.
    """

    refuses_late = True

    def __init__(self) -> None:
        super().__init__()
        self._is_by_deadline = True  # one tenant is alone, as far as was known before the last step

    def has_new_order(self, running: Several[Sequence]) -> bool:
        waiting = self.shares.waiting  # an idle tenant has no part in any order
        is_alone = len(waiting) < 2 and len({*waiting, *_tenants_of(running)}) < 2
        before, self._is_by_deadline = self._is_by_deadline, is_alone
        return is_alone != before

    def foreground_key(self, sequence: Sequence) -> OrderKey:
        # Of one tenant alone, the running one with the latest deadline is preempted first; its counter says nothing.
        return (0.0, *self.own_key(sequence)) if self._is_by_deadline else super().foreground_key(sequence)

    def own_key(self, sequence: Sequence) -> OrderKey:
        at = sequence.deadline_at
        return (sequence.arrived_at + DEFAULT_DEADLINE_S if at is None else at, sequence.arrival)


def _tenants_of(sequences: Several[Sequence]) -> set[str]:
    return {each.request.tenant for each in sequences if not each.request.is_background}


class _TenantsQueue:
    """Foreground sequences of each tenant by their own key, the tenants by what they were served; background behind."""

    def __init__(self, policy: FairShare) -> None:
        self._foreground: FairQueue[Sequence] = FairQueue(policy.shares, new_line=lambda: LazyHeap(policy.own_key))
        self._background = LazyHeap(policy.order_key)

    def push(self, sequence: Sequence) -> None:
        if sequence.request.is_background:
            self._background.push(sequence)
        else:
            self._foreground.push(sequence.request.tenant, sequence)

    def peek(self) -> Sequence:
        return self._foreground.peek() if self._foreground.lines else self._background.peek()

    def pop(self) -> Sequence:
        return self._foreground.pop() if self._foreground.lines else self._background.pop()

    def note_finished(self, sequence: Sequence) -> None:
        if sequence.request.is_background:
            self._background.note_finished(sequence)
        else:
            self._foreground.remove(sequence.request.tenant, sequence)
