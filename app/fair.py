"""Fair sharing among tenants: a queue by virtual time and a pool with dynamic thresholds, for items of any kind.

The classes are not thread-safe. Use each object in one thread or under a lock.
"""

from __future__ import annotations

import heapq
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from itertools import count
from typing import Generic, Protocol, TypeVar

ItemT = TypeVar("ItemT")
OwnerT = TypeVar("OwnerT", bound=Hashable)


class FairShares:
    """Counts the service that each tenant has received, in any unit: the virtual token counter of Sheng et al. (2024).

    A tenant without waiting items is idle. When it returns, its counter is raised to the smallest counter of any
    waiting tenant (or else of the tenant served last), so that idling earns no credit. The counters of the last
    `max_idle` idle tenants are kept, so that a tenant cannot get rid of its charges by pausing briefly.
    """

    def __init__(self, *, max_idle: int = 0) -> None:
        self.max_idle = max_idle
        self._counters: dict[str, float] = {}  # by tenant, the longest idle first
        self._num_waiting: dict[str, int] = {}  # by tenant, without zeros
        self._turns: dict[str, int] = {}  # by waiting tenant; among equal counters, the lowest turn comes first
        self._next_turn = count()
        self._order = _TenantHeap(self.place)
        self._last_served = 0.0  # counter of the tenant that was served last

    def __len__(self) -> int:
        """Return the number of tenants with a counter."""
        return len(self._counters)

    def served(self, tenant: str) -> float:
        """Return the tenant's counter, or 0 if it has none."""
        return self._counters.get(tenant, 0.0)

    @property
    def waiting(self) -> Collection[str]:
        """The tenants with waiting items."""
        return self._num_waiting.keys()

    def num_waiting(self, tenant: str) -> int:
        """Return the number of the tenant's waiting items, in all queues that use these shares."""
        return self._num_waiting.get(tenant, 0)

    def place(self, tenant: str) -> tuple[float, ...]:
        """Return a waiting tenant's sort key. The tenant with the lowest key is next."""
        return self._counters[tenant], self._turns[tenant]

    def serve(self, tenant: str, amount: float) -> None:
        """Record that one of the tenant's items starts, and charge `amount` for it."""
        self._last_served = max(self._last_served, self.served(tenant))
        self.charge(tenant, amount)

    def charge(self, tenant: str, amount: float) -> None:
        """Charge a tenant. Does nothing if it has no counter."""
        if tenant in self._counters:
            self._counters[tenant] += amount

    def enter(self, tenant: str) -> None:
        """Record that another of the tenant's items waits."""
        num_waiting = self.num_waiting(tenant)
        if not num_waiting:
            first = self._order.first(self._num_waiting)
            lifted = self._last_served if first is None else self._counters[first]
            self._counters[tenant] = max(self._counters.pop(tenant, 0.0), lifted)
            self._turns[tenant] = next(self._next_turn)
            self._order.add(tenant)
        self._num_waiting[tenant] = num_waiting + 1
        if len(self._counters) > self.max_idle + len(self._num_waiting):
            del self._counters[next(each for each in self._counters if each not in self._num_waiting)]

    def leave(self, tenant: str) -> None:
        """Record that one of the tenant's items no longer waits. Moves the tenant behind all with an equal counter."""
        self._num_waiting[tenant] -= 1
        self._turns[tenant] = next(self._next_turn)
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant], self._turns[tenant]


class Line(Protocol[ItemT]):
    """One tenant's waiting items, in any order. Call `peek` and `pop` only while the line is not empty."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[ItemT]: ...

    def push(self, item: ItemT) -> None: ...

    def peek(self) -> ItemT: ...

    def pop(self) -> ItemT: ...

    def remove(self, item: ItemT) -> None: ...


class FairQueue(Generic[ItemT]):
    """Queues tenants' items. The tenant with the fewest running items is next, and among these, the smallest counter.

    A new tenant queues behind the waiting tenants with an equal counter, so that every waiting tenant gets its turn.
    """

    def __init__(
        self,
        shares: FairShares | None = None,
        *,
        max_running: int = sys.maxsize,
        new_line: Callable[[], Line[ItemT]] | None = None,
    ) -> None:
        """Several queues may use the same `shares`. A tenant may have `max_running` items between `take` and `end`.

        `new_line` creates a tenant's line, by default a `Fifo`.
        """
        self._shares = FairShares() if shares is None else shares
        self._max_running = max_running
        self._new_line: Callable[[], Line[ItemT]] = new_line or Fifo
        self._lines: dict[str, Line[ItemT]] = {}  # by tenant, without empty lines
        self._num_running: Counter[str] = Counter()  # by tenant, without zeros
        self._order = _TenantHeap(lambda tenant: (self._num_running[tenant], *self._shares.place(tenant)))

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def lines(self) -> Mapping[str, Line[ItemT]]:
        """The waiting items by tenant. No line is empty."""
        return self._lines

    def num_waiting(self, tenant: str) -> int:
        return len(self._lines.get(tenant, ()))

    def num_running(self, tenant: str) -> int:
        """Return the number of the tenant's items between `take` and `end`."""
        return self._num_running[tenant]

    def push(self, tenant: str, item: ItemT) -> None:
        self._shares.enter(tenant)
        if tenant not in self._lines:
            self._lines[tenant] = self._new_line()
            self._order.add(tenant)
        self._lines[tenant].push(item)

    def peek(self) -> ItemT:
        """Return the next item, regardless of `max_running`. The queue must not be empty."""
        return self._lines[self._first()].peek()

    def pop(self) -> ItemT:
        """Remove and return the next item. The caller must charge the tenant."""
        tenant = self._first()
        item = self._lines[tenant].pop()
        self._leave(tenant)
        return item

    def take(self) -> tuple[str, ItemT] | None:
        """Remove and return the next item, and charge 1 for it. Returns None if no waiting tenant may run another."""
        tenant = self._order.first(self._lines)
        if tenant is None or self._num_running[tenant] >= self._max_running:
            return None
        item = self._lines[tenant].pop()
        self._num_running[tenant] += 1
        self._shares.serve(tenant, 1.0)
        self._leave(tenant)
        return tenant, item

    def end(self, tenant: str) -> None:
        """Record that one of the tenant's running items has ended."""
        self._num_running[tenant] -= 1
        if not self._num_running[tenant]:
            del self._num_running[tenant]
        if tenant in self._lines:
            self._order.add(tenant)

    def remove(self, tenant: str, item: ItemT) -> None:
        """Remove a waiting item without charging for it."""
        self._lines[tenant].remove(item)
        self._leave(tenant)

    def _first(self) -> str:
        tenant = self._order.first(self._lines)
        assert tenant is not None, "the queue is not empty"
        return tenant

    def _leave(self, tenant: str) -> None:
        self._shares.leave(tenant)
        if not len(self._lines[tenant]):
            del self._lines[tenant]


class Fifo(Generic[ItemT]):
    """A line that returns the oldest item first."""

    def __init__(self) -> None:
        self._items: deque[ItemT] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[ItemT]:
        return iter(self._items)

    def push(self, item: ItemT) -> None:
        self._items.append(item)

    def peek(self) -> ItemT:
        return self._items[0]

    def pop(self) -> ItemT:
        return self._items.popleft()

    def remove(self, item: ItemT) -> None:
        self._items.remove(item)


class _TenantHeap:
    """Tenants by place, lowest first. Outdated places are never too high, so `first` only corrects the heap's top."""

    def __init__(self, place: Callable[[str], tuple[float, ...]]) -> None:
        self._place = place
        self._heap: list[tuple[tuple[float, ...], str]] = []
        self._entered: dict[str, tuple[float, ...]] = {}  # each tenant's valid entry; all others are outdated

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, tenant: str) -> None:
        """Add a tenant, or lower its place if it is already in the heap."""
        place, entered = self._place(tenant), self._entered.get(tenant)
        if entered is not None and entered <= place:
            return
        self._entered[tenant] = place
        heapq.heappush(self._heap, (place, tenant))
        if len(self._heap) > 2 * len(self._entered) + 8:  # most entries are outdated
            self._heap = [(place, tenant) for tenant, place in self._entered.items()]
            heapq.heapify(self._heap)

    def first(self, among: Collection[str]) -> str | None:
        """Return the tenant with the lowest place. Removes tenants at the top that are not in `among`."""
        while self._heap:
            entered, tenant = self._heap[0]
            if self._entered.get(tenant) != entered:
                heapq.heappop(self._heap)
            elif tenant not in among:
                heapq.heappop(self._heap)
                del self._entered[tenant]
            elif (place := self._place(tenant)) != entered:
                self._entered[tenant] = place
                heapq.heapreplace(self._heap, (place, tenant))
            else:
                return tenant
        return None


class SharedPool(Generic[OwnerT]):
    """A shared pool, for example of slots or bytes. Each owner may hold at most as much as is free.

    A single owner can hold half of the pool, and each later owner half of the rest, so that the next one can always
    take a part. As amounts are returned, owners that need more approach equal shares (dynamic thresholds: Choudhury and
    Hahne, 1998).
    """

    def __init__(self, size: int, held: Mapping[OwnerT, int] | None = None) -> None:
        self.size = size
        self._held: dict[OwnerT, int] = {} if held is None else dict(held)  # by owner, without zeros
        self.free = size - sum(self._held.values())  # negative if owners hold more than `size`

    def held(self, owner: OwnerT) -> int:
        return self._held.get(owner, 0)

    def allows(self, owner: OwnerT, amount: int) -> bool:
        """Return whether an owner may take an amount. With it, the owner may hold at most as much as is free now."""
        return self._held.get(owner, 0) + amount <= self.free

    def room_left(self, owner: OwnerT) -> int:
        """Return how much an owner can take so that it holds no more than is then free; negative if it holds more."""
        return (self.free - self.held(owner)) // 2

    def take(self, owner: OwnerT, amount: int) -> None:
        """Take an amount, or return a negative one. Does not check `allows`."""
        self.free -= amount
        held = self._held[owner] = self._held.get(owner, 0) + amount
        if not held:
            del self._held[owner]


class RetryTimes:
    """Tells rejected clients when to retry, at intervals that match the rate at which requests end.

    If all clients were told when the next slot will be free, all but one would be rejected again. Tenants share the
    slots evenly, so that a tenant that floods a full service only delays its own clients.
    """

    _MAX_AHEAD_S = 120.0  # longest delay for a client, after which a flood no longer has an effect
    _MAX_TENANTS = 1_000

    def __init__(self) -> None:
        self._last_at: dict[str, float] = {}  # the last time given to each tenant, unless it has passed

    def next_after(self, now: float, *, ended_per_s: float, tenant: str = "", delays_others: bool = True) -> float:
        """Return the seconds until a slot should be free for this client, or 1 if `ended_per_s` is 0.

        With `delays_others`, the tenant's next rejected client is told a later time. Pass False for a request that
        never waits in a queue, because it does not delay other requests.
        """
        if ended_per_s <= 0:
            return 1.0
        if tenant not in self._last_at or self._last_at[tenant] <= now:
            self._last_at = {each: at for each, at in self._last_at.items() if at > now}
        num_tenants = len(self._last_at) + (tenant not in self._last_at)
        next_at = min(self._last_at.get(tenant, now) + num_tenants / ended_per_s, now + self._MAX_AHEAD_S)
        if delays_others:
            self._last_at[tenant] = next_at
            if len(self._last_at) > self._MAX_TENANTS:
                self._last_at.pop(next(iter(self._last_at)))
        return next_at - now
