"""Scheduling policies decide which waiting sequence runs next and which running sequence is preempted first.

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

# Under `sjf`, the tokens of work that one second of waiting outweighs.
AGEING_TOKENS_PER_S = 1000.0
# Under `sjf`, a request never overtakes one that arrived more than this many seconds earlier. This limit applies to
# requests of more than 30,000 tokens; smaller requests have a lower limit, their work at the rate above.
MAX_OVERTAKING_S = 30.0
# Under `priority`, the seconds of waiting that outweigh one class. A caller that wants a larger distance between two
# classes skips numbers: the priorities 0 and 6 are a minute apart.
AGEING_S = 10.0
# The deadline that orders a request without a deadline among the others.
DEFAULT_DEADLINE_S = 60.0
# A generated token needs a step, while one step computes many prompt tokens. Sheng et al. use the same weights.
PROMPT_WEIGHT, GENERATED_WEIGHT = 1.0, 2.0

OrderKey = tuple[float, ...]


def make_policy(config: PolicyConfig) -> SchedulingPolicy:
    """Return a new policy without state of earlier policies."""
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

    Most orders are a rank that does not change while a sequence waits. If waiting improves the rank (ageing), the rank
    contains the arrival time, so that the comparison of two sequences is the same at any time. The queue is therefore
    never sorted again, and the cost of a step does not grow with the number of waiting sequences.

    Every policy puts background requests behind all others, by arrival. A background request joins only if no other
    request waits. It is preempted first, for memory and for any other request that waits for a slot. Its computed
    tokens stay in the prefix cache until they are evicted.
    """

    preempts = False  # whether a waiting foreground sequence may preempt a running foreground sequence
    counts_steps = False  # whether `computed` does anything
    refuses_late = False  # whether a waiting sequence is refused once it can no longer meet its deadline

    def order_key(self, sequence: EngineSequence) -> OrderKey:
        """Return the sequence's rank. Called when the sequence begins to wait and again when the sequence joins.

        The waiting sequence of the lowest rank goes first. The running sequence of the highest rank is preempted first.
        """
        if sequence.request.is_background:
            return (1.0, sequence.arrival)
        return (0.0, *self.foreground_key(sequence))

    @abstractmethod
    def foreground_key(self, sequence: EngineSequence) -> OrderKey:
        """Return the rank of a foreground sequence among the foreground sequences. The lowest rank goes first."""

    def new_queue(self) -> PolicyQueue:
        """Return an empty queue in this order."""
        return LazyHeap(self.order_key)

    def may_preempt(self, waiting: EngineSequence, running: EngineSequence) -> bool:
        """Return whether `waiting` may take the slot of `running`, which then waits behind `waiting`."""
        return running.request.is_background and not waiting.request.is_background

    def joined(self, sequence: EngineSequence) -> None:
        """Account for a sequence that has started to run, for the first time or after a preemption."""

    def has_new_order(self, running: Sequence[EngineSequence]) -> bool:
        """Return whether the order keys of running sequences must be computed again. Called before each step."""
        return False

    def computed(self, batch: StepBatch, num_kept: Sequence[int] = ()) -> None:
        """Account for a step whose results have been processed. `num_kept`: see `StepResult`."""


# ---------------------------------------------------------------------- orders by rank


class FirstComeFirstServed(SchedulingPolicy):
    """Orders sequences by arrival. A preempted sequence keeps its rank, so no sequence starves."""

    def foreground_key(self, sequence: EngineSequence) -> OrderKey:
        return (sequence.arrival,)


class ShortestJobFirst(SchedulingPolicy):
    """The least estimated work (prompt and predicted output tokens) goes first, with ageing.

    The rank is the arrival time plus a handicap in seconds that grows with the work. A sequence can be overtaken only
    by sequences that arrive within its handicap. No handicap exceeds `MAX_OVERTAKING_S`, which bounds starvation under
    any load.
    """

    def foreground_key(self, sequence: EngineSequence) -> OrderKey:
        handicap_s = sequence.estimated_work / AGEING_TOKENS_PER_S
        return (sequence.arrived_at + min(handicap_s, MAX_OVERTAKING_S), sequence.arrival)


class PriorityFirst(SchedulingPolicy):
    """The lowest priority number goes first, then the earliest arrival, with ageing.

    One class outweighs `AGEING_S` seconds of waiting. A request that is `n` classes better overtakes only if it arrives
    at most `n * AGEING_S` seconds later, which bounds starvation.
    """

    preempts = True

    def foreground_key(self, sequence: EngineSequence) -> OrderKey:
        handicap_s = sequence.request.priority * AGEING_S
        return (sequence.arrived_at + handicap_s, sequence.request.priority, sequence.arrival)

    def may_preempt(self, waiting: EngineSequence, running: EngineSequence) -> bool:
        if waiting.request.is_background or running.request.is_background:
            return super().may_preempt(waiting, running)
        # Requires a better class and a better rank. With a worse rank, the preempted sequence would return at once.
        return waiting.request.priority < running.request.priority and waiting.order_key < running.order_key


# ---------------------------------------------------------------------- fair shares


class FairShare(SchedulingPolicy):
    """The tenant with the fewest served tokens goes first: the virtual token counter of Sheng et al. (2024).

    A tenant is charged for every computed prompt token and every generated token.
    """

    counts_steps = True

    def __init__(self) -> None:
        self.shares = FairShares(max_idle=10_000)

    def foreground_key(self, sequence: EngineSequence) -> OrderKey:
        # The key is set when the sequence joins. The running sequence whose key has the highest counter goes last.
        return (self.shares.served(sequence.request.tenant), *self.own_key(sequence))

    def own_key(self, sequence: EngineSequence) -> OrderKey:
        """Return the sequence's rank among the sequences of its tenant. The earliest arrival goes first."""
        return (sequence.arrival,)

    def new_queue(self) -> PolicyQueue:
        return _TenantsQueue(self)

    def joined(self, sequence: EngineSequence) -> None:
        if sequence.request.is_background:
            return  # a background request uses spare capacity, so its tenant is not charged
        # A tenant is not charged for tokens that are computed again after a preemption.
        num_tokens = 0 if sequence.num_preemptions else sequence.num_uncomputed_tokens
        self.shares.serve(sequence.request.tenant, num_tokens * PROMPT_WEIGHT)

    def computed(self, batch: StepBatch, num_kept: Sequence[int] = ()) -> None:
        numbers = num_kept or repeat(1)
        for item, sequence, number in zip(batch.scheduled, batch.sequences, numbers, strict=False):
            if item.samples and not sequence.request.is_background:
                self.shares.charge(sequence.request.tenant, number * GENERATED_WEIGHT)


class EarliestDeadlineFirst(FairShare):
    """Fair shares of tenants; within a tenant, the earliest deadline goes first (Liu and Layland, 1973).

    A short deadline moves a request ahead of the same tenant's other requests, but not ahead of other tenants. If only
    one tenant has requests, they are ordered by deadline.

    Without refusals, this order is the worst of all under overload, because it serves requests that are about to be
    late. The policy therefore refuses a request that can no longer finish in time, and the engine ends a request whose
    deadline has passed. A request without a deadline is never refused. To prevent starvation, it is ordered as if its
    deadline were `DEFAULT_DEADLINE_S`.
    """

    refuses_late = True

    def __init__(self) -> None:
        super().__init__()
        self._is_by_deadline = True  # whether at most one tenant had requests before the last step

    def has_new_order(self, running: Sequence[EngineSequence]) -> bool:
        waiting = self.shares.waiting  # without idle tenants
        is_alone = len(waiting) < 2 and len({*waiting, *_tenants_of(running)}) < 2
        before, self._is_by_deadline = self._is_by_deadline, is_alone
        return is_alone != before

    def foreground_key(self, sequence: EngineSequence) -> OrderKey:
        # A single tenant needs no counter: the running sequence with the latest deadline is preempted first.
        return (0.0, *self.own_key(sequence)) if self._is_by_deadline else super().foreground_key(sequence)

    def own_key(self, sequence: EngineSequence) -> OrderKey:
        at = sequence.deadline_at
        return (sequence.arrived_at + DEFAULT_DEADLINE_S if at is None else at, sequence.arrival)


def _tenants_of(sequences: Sequence[EngineSequence]) -> set[str]:
    return {each.request.tenant for each in sequences if not each.request.is_background}


class _TenantsQueue:
    """Orders tenants by served tokens and a tenant's sequences by `own_key`. Background sequences come last."""

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
