"""Scheduling policies decide which waiting sequence joins next and which running sequence is preempted first.

To add a policy, add its settings to `app/config/scheduler.py`, a class to this module, and a case to `make_policy`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import repeat

from app.config import PolicyConfig
from app.engine.batch import StepBatch
from app.engine.sequence import EngineSequence
from app.engine.waiting_queue import LazyHeap, PolicyQueue
from app.fair import FairQueue, FairShares

# With `sjf`, one second of waiting outweighs this many tokens of work.
AGEING_TOKENS_PER_S = 1000.0
# With `sjf`, no request is overtaken by one that arrives more than this many seconds later. Requests with less work
# than 30,000 tokens have a lower limit: their work, converted to seconds at the above rate.
MAX_OVERTAKING_S = 30.0
# With `priority`, this many seconds of waiting outweigh a difference of 1. Clients can skip numbers to increase the
# distance between two classes of requests: the priorities 0 and 6 are a minute apart.
AGEING_S = 10.0
# Requests without a deadline are ordered as if they had this deadline.
DEFAULT_DEADLINE_S = 60.0
# Each generated token needs a step, while one step computes many prompt tokens. Sheng et al. use the same weights.
PROMPT_WEIGHT, GENERATED_WEIGHT = 1.0, 2.0

OrderKey = tuple[float, ...]


def make_policy(config: PolicyConfig) -> SchedulingPolicy:
    """Return a new policy with no state from an earlier one."""
    match config.name:
        case "fcfs":
            return FirstComeFirstServed()
        case "sjf":
            return ShortestJobFirst()
        case "priority":
            return PriorityFirst()
        case "fair":
            return FairShare()
        case "deadline":
            return EarliestDeadlineFirst()


# ---------------------------------------------------------------------- the interface


class SchedulingPolicy(ABC):
    """An order of sequences, and the events that update the order.

    In most policies, a sequence's rank does not change while it waits. If waiting improves the rank (ageing), the rank
    is based on the arrival time, so that two sequences compare equally at any time. The queue never needs to be sorted
    again, and the cost of a step does not grow with the number of waiting sequences.

    Every policy ranks background requests after all others, by arrival. A background request joins only if no other
    request is waiting. It is preempted first, both for memory and for foreground requests that wait for a slot. Its
    computed tokens stay in the prefix cache until they are evicted.
    """

    preempts = False  # whether a waiting foreground sequence may preempt a running foreground sequence
    counts_steps = False  # whether `computed` does anything
    refuses_late = False  # whether a waiting sequence is rejected once it can no longer meet its deadline

    def order_key(self, sequence: EngineSequence) -> OrderKey:
        """Return the sequence's rank. Called when the sequence starts waiting and again when it joins.

        The waiting sequence with the lowest rank joins first. The running one with the highest rank is preempted first.
        """
        if sequence.request.is_background:
            return (1.0, sequence.arrival)
        return (0.0, *self.foreground_key(sequence))

    @abstractmethod
    def foreground_key(self, sequence: EngineSequence) -> OrderKey:
        """Return a foreground sequence's rank among all foreground sequences. The lowest rank joins first."""

    def new_queue(self) -> PolicyQueue:
        """Return an empty queue in this order."""
        return LazyHeap(self.order_key)

    def may_preempt(self, waiting: EngineSequence, running: EngineSequence) -> bool:
        """Whether `waiting` may take the slot of `running`, which must then wait again."""
        return running.request.is_background and not waiting.request.is_background

    def joined(self, sequence: EngineSequence) -> None:
        """Account for a sequence that has joined, for the first time or after a preemption."""

    def has_new_order(self, running: Sequence[EngineSequence]) -> bool:
        """Whether the order keys of running sequences must be recomputed. Called before each step."""
        return False

    def computed(self, batch: StepBatch, num_kept: Sequence[int] = ()) -> None:
        """Account for a step whose results were processed. `num_kept`: see `StepResult`."""


# ---------------------------------------------------------------------- orders by rank


class FirstComeFirstServed(SchedulingPolicy):
    """Orders sequences by arrival. Preempted sequences keep their rank, so none of them starves."""

    def foreground_key(self, sequence: EngineSequence) -> OrderKey:
        return (sequence.arrival,)


class ShortestJobFirst(SchedulingPolicy):
    """The sequence with the least estimated work (prompt and predicted output tokens) joins first, with ageing.

    The rank is the arrival time plus a handicap in seconds that grows with the work. A sequence can only be overtaken
    by sequences that arrive within its handicap. No handicap exceeds `MAX_OVERTAKING_S`, so no sequence starves under
    any load.
    """

    def foreground_key(self, sequence: EngineSequence) -> OrderKey:
        handicap_s = sequence.estimated_work / AGEING_TOKENS_PER_S
        return (sequence.arrived_at + min(handicap_s, MAX_OVERTAKING_S), sequence.arrival)


class PriorityFirst(SchedulingPolicy):
    """The sequence with the lowest priority number joins first, then the earliest arrival, with ageing.

    A difference of `n` in priority is worth `n * AGEING_S` seconds of waiting. A request can only overtake one that
    arrived less than this time before it, so no request starves.
    """

    preempts = True

    def foreground_key(self, sequence: EngineSequence) -> OrderKey:
        handicap_s = sequence.request.priority * AGEING_S
        return (sequence.arrived_at + handicap_s, sequence.request.priority, sequence.arrival)

    def may_preempt(self, waiting: EngineSequence, running: EngineSequence) -> bool:
        if waiting.request.is_background or running.request.is_background:
            return super().may_preempt(waiting, running)
        # The rank must be better too, because the preempted sequence would otherwise join again immediately.
        return waiting.request.priority < running.request.priority and waiting.order_key < running.order_key


# ---------------------------------------------------------------------- fair shares


class FairShare(SchedulingPolicy):
    """The tenant with the fewest served tokens is next: the virtual token counter of Sheng et al. (2024).

    Tenants are charged for each computed prompt token and each generated token.
    """

    counts_steps = True

    def __init__(self) -> None:
        self.shares = FairShares(max_idle=10_000)

    def foreground_key(self, sequence: EngineSequence) -> OrderKey:
        # Set when a sequence joins. The running sequence whose tenant had the highest counter then is preempted first.
        return (self.shares.served(sequence.request.tenant), *self.own_key(sequence))

    def own_key(self, sequence: EngineSequence) -> OrderKey:
        """Return the sequence's rank among its tenant's sequences. The earliest arrival joins first."""
        return (sequence.arrival,)

    def new_queue(self) -> PolicyQueue:
        return _TenantsQueue(self)

    def joined(self, sequence: EngineSequence) -> None:
        if sequence.request.is_background:
            return  # background requests use spare capacity, so their tenants are not charged
        # Tenants are not charged for tokens that are recomputed after a preemption.
        num_tokens = 0 if sequence.num_preemptions else sequence.num_uncomputed_tokens
        self.shares.serve(sequence.request.tenant, num_tokens * PROMPT_WEIGHT)

    def computed(self, batch: StepBatch, num_kept: Sequence[int] = ()) -> None:
        numbers = num_kept or repeat(1)
        for item, sequence, number in zip(batch.scheduled, batch.sequences, numbers, strict=False):
            if item.samples and not sequence.request.is_background:
                self.shares.charge(sequence.request.tenant, number * GENERATED_WEIGHT)


class EarliestDeadlineFirst(FairShare):
    """Fair shares for tenants. Within a tenant, the earliest deadline comes first (Liu and Layland, 1973).

    A short deadline moves a request ahead of the same tenant's other requests, but not ahead of other tenants. If only
    one tenant has requests, they are ordered by deadline.

    Under overload, this order would be the worst of all, because it serves requests that are about to be late.
    Therefore, a request is rejected when it can no longer finish in time, and ended when its deadline has passed. A
    request without a deadline is never rejected. To avoid starvation, it is ordered as if its deadline were
    `DEFAULT_DEADLINE_S`.
    """

    refuses_late = True

    def __init__(self) -> None:
        super().__init__()
        self._is_by_deadline = True  # whether at most one tenant had requests before the last step

    def has_new_order(self, running: Sequence[EngineSequence]) -> bool:
        waiting = self.shares.waiting
        is_alone = len(waiting) < 2 and len({*waiting, *_tenants_of(running)}) < 2
        before, self._is_by_deadline = self._is_by_deadline, is_alone
        return is_alone != before

    def foreground_key(self, sequence: EngineSequence) -> OrderKey:
        # Without a counter, the running sequence with the latest deadline is preempted first.
        return (0.0, *self.own_key(sequence)) if self._is_by_deadline else super().foreground_key(sequence)

    def own_key(self, sequence: EngineSequence) -> OrderKey:
        at = sequence.deadline_at
        return (sequence.arrived_at + DEFAULT_DEADLINE_S if at is None else at, sequence.arrival)


def _tenants_of(sequences: Sequence[EngineSequence]) -> set[str]:
    return {each.request.tenant for each in sequences if not each.request.is_background}


class _TenantsQueue:
    """Orders tenants by served tokens, and each tenant's sequences by `own_key`. Background sequences come last."""

    def __init__(self, policy: FairShare) -> None:
        self._foreground: FairQueue[EngineSequence] = FairQueue(
            policy.shares, new_line=lambda: LazyHeap(policy.own_key)
        )
        self._background = LazyHeap(policy.order_key)

    def push(self, sequence: EngineSequence) -> None:
        if sequence.request.is_background:
            self._background.push(sequence)
        else:
            self._foreground.push(sequence.request.tenant, sequence)

    def peek(self) -> EngineSequence:
        return self._foreground.peek() if self._foreground.lines else self._background.peek()

    def pop(self) -> EngineSequence:
        return self._foreground.pop() if self._foreground.lines else self._background.pop()

    def note_finished(self, sequence: EngineSequence) -> None:
        if sequence.request.is_background:
            self._background.note_finished(sequence)
        else:
            self._foreground.remove(sequence.request.tenant, sequence)
