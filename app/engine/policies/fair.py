"""Fair shares of tokens for tenants."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from itertools import count

from app.engine.batch import Batch
from app.engine.policies.policy import PolicyQueue, Rank, RankQueue, SchedulingPolicy
from app.engine.sequence import Sequence

MAX_IDLE_TENANTS = 10_000
# A generated token takes a place in a step of its own, prompt tokens are computed many at a time; Sheng et al. charge
# the same.
PROMPT_WEIGHT, GENERATED_WEIGHT = 1.0, 2.0


class FairShare(SchedulingPolicy):
    """The tenant that has been served the fewest tokens first: the virtual token counter of Sheng et al. (2024).

    Each tenant has a counter, charged for every prompt token that is computed and every token that is generated. A
    tenant with nothing waiting is idle; when it comes back, its counter is lifted to the smallest of those that wait
    (or waited last), so that idling earns no credit. Among one tenant's requests the first to arrive goes first.
    """

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}  # by tenant; the longest idle first
        self._num_waiting: dict[str, int] = {}  # by tenant, those that have any
        self._order = _TenantHeap(self._counters)
        self._last_served = 0.0  # the counter of the tenant whose turn came last

    def rank(self, sequence: Sequence) -> Rank:
        # Fixed when it joins: of the running ones, those go last that joined when their tenant had got the most.
        return (self.counter(sequence.request.tenant), sequence.arrival)

    def counter(self, tenant: str) -> float:
        """What the tenant has been charged, in weighted tokens."""
        return self._counters.get(tenant, 0.0)

    def new_queue(self) -> PolicyQueue:
        return _FairQueue(self)

    def joined(self, sequence: Sequence) -> None:
        if sequence.request.is_background:
            return  # it takes nothing from anybody, and costs its tenant nothing
        tenant = sequence.request.tenant
        self._last_served = max(self._last_served, self.counter(tenant))
        if sequence.num_preemptions == 0:  # what is computed again because we took it away is on us
            self._charge(tenant, sequence.num_uncomputed_tokens * PROMPT_WEIGHT)

    def computed(self, batch: Batch) -> None:
        for item, sequence in zip(batch.scheduled, batch.sequences, strict=True):
            if item.samples and not sequence.request.is_background:
                self._charge(sequence.request.tenant, GENERATED_WEIGHT)

    def entered(self, tenant: str) -> None:
        """One more request of this tenant waits."""
        num_waiting = self._num_waiting.get(tenant, 0)
        if num_waiting == 0:
            lowest = self._order.first(self._num_waiting)
            lifted = self._last_served if lowest is None else self.counter(lowest)
            self._counters[tenant] = max(self._counters.pop(tenant, 0.0), lifted)
            self._order.add(tenant)
        self._num_waiting[tenant] = num_waiting + 1
        if len(self._counters) > MAX_IDLE_TENANTS + len(self._num_waiting):
            self._forget_longest_idle()

    def left(self, tenant: str) -> None:
        """One request less of this tenant waits."""
        self._num_waiting[tenant] -= 1
        if self._num_waiting[tenant] == 0:
            del self._num_waiting[tenant]

    def new_order(self) -> _TenantHeap:
        """An order by counters, for the tenants of one queue."""
        return _TenantHeap(self._counters)

    def _charge(self, tenant: str, tokens: float) -> None:
        if tenant in self._counters:
            self._counters[tenant] += tokens

    def _forget_longest_idle(self) -> None:
        idle = next(tenant for tenant in self._counters if tenant not in self._num_waiting)
        del self._counters[idle]


class _FairQueue:
    """One queue for each tenant, by arrival; the next is the first of the tenant with the smallest counter."""

    def __init__(self, policy: FairShare) -> None:
        self._policy = policy
        self._queues: dict[str, RankQueue] = {}  # of tenants with somebody in it
        self._order = policy.new_order()

    def push(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        self._policy.entered(tenant)
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = RankQueue()
            self._order.add(tenant)
        sequence.rank = (sequence.arrival,)
        queue.push(sequence)

    def peek(self) -> Sequence:
        return self._queues[self._next_tenant()].peek()

    def pop(self) -> Sequence:
        tenant = self._next_tenant()
        sequence = self._queues[tenant].pop()
        self._leave(tenant)
        return sequence

    def note_finished(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        self._queues[tenant].note_finished(sequence)
        self._leave(tenant)

    def _next_tenant(self) -> str:
        tenant = self._order.first(self._queues)
        assert tenant is not None, "the queue is not empty"
        return tenant

    def _leave(self, tenant: str) -> None:
        self._policy.left(tenant)
        if not len(self._queues[tenant]):
            del self._queues[tenant]


class _TenantHeap:
    """Tenants by counter, corrected when they come to the top: counters only grow, so none hides a smaller one."""

    def __init__(self, counters: dict[str, float]) -> None:
        self._counters = counters
        self._heap: list[tuple[float, int, str]] = []
        self._inside: set[str] = set()
        self._turns = count()  # of equal counters, the one looked at longest ago goes first

    def add(self, tenant: str) -> None:
        """Have a tenant in the order, once, however often it is added."""
        if tenant not in self._inside:
            self._inside.add(tenant)
            heapq.heappush(self._heap, (self._counters.get(tenant, 0.0), next(self._turns), tenant))

    def first(self, among: Collection[str]) -> str | None:
        """The tenant with the smallest counter; those that are not `among` these leave when they come to the top."""
        while self._heap:
            counter, _, tenant = self._heap[0]
            if tenant not in among:
                heapq.heappop(self._heap)
                self._inside.remove(tenant)
            elif counter != self._counters[tenant]:
                heapq.heapreplace(self._heap, (self._counters[tenant], next(self._turns), tenant))
            else:
                return tenant
        return None
