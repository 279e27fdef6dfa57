"""Fair shares among tenants: a queue by virtual time, and a pool with dynamic thresholds. Knows nothing of requests.

Each object is for one thread, or under its owner's lock.
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
    """How much each tenant has been served, in any unit: the virtual token counter of Sheng et al. (2024).

    A tenant of which nothing waits is idle. When it returns, its counter is lifted to the smallest of the tenants that
    wait (or waited last), so that idling earns no credit. `max_idle` idle tenants are remembered, with what they were
    charged beyond others.
    """

    def __init__(self, *, max_idle: int = 0) -> None:
        self.max_idle = max_idle
        self._counters: dict[str, float] = {}  # by tenant; the longest idle first
        self._num_waiting: dict[str, int] = {}  # by tenant, without those at 0
        self._turns: dict[str, int] = {}  # of waiting tenants: of equal counters the lowest goes first
        self._next_turn = count()
        self._order = _TenantHeap(self.place)
        self._last_served = 0.0  # the counter of the tenant that was served last

    def __len__(self) -> int:
        """Tenants that are remembered."""
        return len(self._counters)

    def served(self, tenant: str) -> float:
        """The tenant's counter."""
        return self._counters.get(tenant, 0.0)

    @property
    def waiting(self) -> Collection[str]:
        """The tenants of which something waits."""
        return self._num_waiting.keys()

    def num_waiting(self, tenant: str) -> int:
        """What of the tenant waits, in all queues."""
        return self._num_waiting.get(tenant, 0)

    def place(self, tenant: str) -> tuple[float, ...]:
        """The place of a waiting tenant, lowest first."""
        return self._counters[tenant], self._turns[tenant]

    def serve(self, tenant: str, amount: float) -> None:
        """Something of the tenant begins, and is charged so much."""
        self._last_served = max(self._last_served, self.served(tenant))
        self.charge(tenant, amount)

    def charge(self, tenant: str, amount: float) -> None:
        """Charge a tenant, unless it is forgotten."""
        if tenant in self._counters:
            self._counters[tenant] += amount

    def enter(self, tenant: str) -> None:
        """One thing more of this tenant waits."""
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
        """One thing less of this tenant waits. Of tenants with its counter it is the last now."""
        self._num_waiting[tenant] -= 1
        self._turns[tenant] = next(self._next_turn)
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant], self._turns[tenant]


class Line(Protocol[ItemT]):
    """What waits of one tenant, in any order. `peek` and `pop` are only called while it is not empty."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[ItemT]: ...

    def push(self, item: ItemT) -> None: ...

    def peek(self) -> ItemT: ...

    def pop(self) -> ItemT: ...

    def remove(self, item: ItemT) -> None: ...


class FairQueue(Generic[ItemT]):
    """Items of tenants. The next is of the tenant with the fewest running, of these the one that was served least.

    A tenant that enters goes behind those that were served as little, so each that waits has its turn.
    """

    def __init__(
        self,
        shares: FairShares | None = None,
        *,
        max_running: int = sys.maxsize,
        new_line: Callable[[], Line[ItemT]] | None = None,
    ) -> None:
        """`shares` may be those of several queues. Of a tenant at most `max_running` items run, from `take` to `end`.

        `new_line` makes the line of a tenant; by default the oldest is first.
        """
        self._shares = FairShares() if shares is None else shares
        self._max_running = max_running
        self._new_line: Callable[[], Line[ItemT]] = new_line or Fifo
        self._lines: dict[str, Line[ItemT]] = {}  # by tenant, without empty ones
        self._num_running: Counter[str] = Counter()  # by tenant, without those at 0
        self._order = _TenantHeap(lambda tenant: (self._num_running[tenant], *self._shares.place(tenant)))

    def __len__(self) -> int:
        """Items that wait."""
        return sum(map(len, self._lines.values()))

    @property
    def lines(self) -> Mapping[str, Line[ItemT]]:
        """What waits, by tenant; none is empty."""
        return self._lines

    def num_waiting(self, tenant: str) -> int:
        """Items of the tenant that wait."""
        return len(self._lines.get(tenant, ()))

    def num_running(self, tenant: str) -> int:
        """Items of the tenant that were taken and have not ended."""
        return self._num_running[tenant]

    def push(self, tenant: str, item: ItemT) -> None:
        """Add an item."""
        self._shares.enter(tenant)
        if tenant not in self._lines:
            self._lines[tenant] = self._new_line()
            self._order.add(tenant)
        self._lines[tenant].push(item)

    def peek(self) -> ItemT:
        """The next item, whatever runs of its tenant. The queue must not be empty."""
        return self._lines[self._first()].peek()

    def pop(self) -> ItemT:
        """Take out what `peek` gives. The caller charges the tenant."""
        tenant = self._first()
        item = self._lines[tenant].pop()
        self._leave(tenant)
        return item

    def take(self) -> tuple[str, ItemT] | None:
        """Take out the next tenant's item, which runs until `end`, and charge 1; None where no tenant has a turn."""
        tenant = self._order.first(self._lines)
        if tenant is None or self._num_running[tenant] >= self._max_running:
            return None
        item = self._lines[tenant].pop()
        self._num_running[tenant] += 1
        self._shares.serve(tenant, 1.0)
        self._leave(tenant)
        return tenant, item

    def end(self, tenant: str) -> None:
        """An item that was taken does not run any more."""
        self._num_running[tenant] -= 1
        if not self._num_running[tenant]:
            del self._num_running[tenant]
        if tenant in self._lines:
            self._order.add(tenant)

    def remove(self, tenant: str, item: ItemT) -> None:
        """Take out an item that waits."""
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
    """A line in which the oldest is first."""

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
    """Tenants by place, lowest first. An outdated place is corrected at the top, where it can only be too low."""

    def __init__(self, place: Callable[[str], tuple[float, ...]]) -> None:
        self._place = place
        self._heap: list[tuple[tuple[float, ...], str]] = []
        self._entered: dict[str, tuple[float, ...]] = {}  # the places in the heap that count

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, tenant: str) -> None:
        """Put a tenant in; it may be there already, with another place."""
        place, entered = self._place(tenant), self._entered.get(tenant)
        if entered is not None and entered <= place:
            return
        self._entered[tenant] = place
        heapq.heappush(self._heap, (place, tenant))
        if len(self._heap) > 2 * len(self._entered) + 8:  # most are places that tenants had before they moved forward
            self._heap = [(place, tenant) for tenant, place in self._entered.items()]
            heapq.heapify(self._heap)

    def first(self, among: Collection[str]) -> str | None:
        """The tenant with the lowest place; one that is not `among` these leaves when it reaches the top."""
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
    """What owners share, for example places or bytes: an owner may hold as much as is free.

    So an owner alone comes to hold half of all, and one that comes later half of what the others leave: there is always
    something for the next. As things are given back, owners that want more come to hold equally much (dynamic
    thresholds: Choudhury and Hahne, 1998).
    """

    def __init__(self, size: int, held: Mapping[OwnerT, int] | None = None) -> None:
        self.size = size
        self._held: dict[OwnerT, int] = {} if held is None else dict(held)  # by owner, without those at 0
        self.free = size - sum(self._held.values())  # below 0 when owners hold too much

    def held(self, owner: OwnerT) -> int:
        """What an owner holds."""
        return self._held.get(owner, 0)

    def allows(self, owner: OwnerT, amount: int) -> bool:
        """Whether an owner may take an amount, by what is free before: of the last things one may take the last."""
        return self._held.get(owner, 0) + amount <= self.free

    def room_left(self, owner: OwnerT) -> int:
        """What an owner may still take so that it holds no more than is free afterwards; below 0: it has too much."""
        return (self.free - self.held(owner)) // 2

    def take(self, owner: OwnerT, amount: int) -> None:
        """Take an amount; a negative amount is given back."""
        self.free -= amount
        held = self._held[owner] = self._held.get(owner, 0) + amount
        if not held:
            del self._held[owner]


class RetryTimes:
    """Times at which refused clients should come back: those of a tenant one after the other, as fast as requests end.

    If all of them got the time of the next free place, all but one would be refused again. Tenants share the places
    evenly, so one that floods a full service moves its own times only.
    """

    _MAX_AHEAD_S = 120.0  # no client is told to wait longer, and a flood is forgotten after this
    _MAX_TENANTS = 1_000

    def __init__(self) -> None:
        self._last_at: dict[str, float] = {}  # by tenant, of those with times that have not passed

    def next_after(self, now: float, *, ended_per_s: float, tenant: str = "", takes_place: bool = True) -> float:
        """Seconds until a place should be free for this client; 1 while no request has ended.

        `takes_place`: the tenant's next refused client comes back after this one. A request that never waits for a
        place may be tried at any rate, and delays no other request.
        """
        if ended_per_s <= 0:
            return 1.0
        if tenant not in self._last_at or self._last_at[tenant] <= now:
            self._last_at = {each: at for each, at in self._last_at.items() if at > now}
        num_tenants = len(self._last_at) + (tenant not in self._last_at)
        next_at = min(self._last_at.get(tenant, now) + num_tenants / ended_per_s, now + self._MAX_AHEAD_S)
        if takes_place:
            self._last_at[tenant] = next_at
            if len(self._last_at) > self._MAX_TENANTS:
                self._last_at.pop(next(iter(self._last_at)))
        return next_at - now
