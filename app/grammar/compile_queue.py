"""The queue of requests whose grammars must be compiled. Tenants take turns, and share the queue's slots."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from app.engine.matcher import Matcher
from app.engine.request import Grammar, Request
from app.fair import FairQueue


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class WaitingRequest:
    """A request and the future for its matcher."""

    request: Request
    grammar: Grammar
    matcher: Future[Matcher | None] = field(default_factory=Future)


class CompileQueue:
    """A queue in which tenants take turns, with one limit for all tenants. Not thread-safe: must be used with a lock.

    Only one grammar per tenant is compiled at a time, so that no tenant occupies all threads.
    """

    def __init__(self, max_requests: int) -> None:
        """`max_requests` limits the waiting and compiling requests of all tenants."""
        self._max_requests = max_requests
        self._queue: FairQueue[WaitingRequest] = FairQueue(max_running=1)
        self._num_compiling = 0

    def __len__(self) -> int:
        return self._num_compiling + len(self._queue)

    def num_of(self, tenant: str) -> int:
        """Return the number of a tenant's requests, including one that is being compiled."""
        return self._queue.num_waiting(tenant) + self._queue.num_running(tenant)

    def add(self, new: WaitingRequest) -> WaitingRequest | None:
        """Add a request. Returns the request that is refused because no slot is free, or None.

        If another tenant has more requests than the new request's tenant would have, its newest request is refused.
        """
        tenant, refused = new.request.tenant, None
        if len(self) >= self._max_requests:
            largest = max([tenant, *self._queue.lines], key=self.num_of)
            if self.num_of(largest) <= self.num_of(tenant) + 1:
                return new
            refused = list(self._queue.lines[largest])[-1]
            self.discard(refused)
        self._queue.push(tenant, new)
        return refused

    def discard(self, left: WaitingRequest) -> None:
        """Remove a waiting request. Does nothing if the request is no longer waiting."""
        if left in self._queue.lines.get(left.request.tenant, ()):
            self._queue.remove(left.request.tenant, left)

    def take(self) -> WaitingRequest | None:
        """Return the next request to compile, or None if no tenant has a turn. Call `end` after compiling it."""
        taken = self._queue.take()
        if taken is None:
            return None
        self._num_compiling += 1
        return taken[1]

    def end(self, taken: WaitingRequest) -> None:
        """Record that a request's compilation has ended. Its tenant may then have another turn."""
        self._num_compiling -= 1
        self._queue.end(taken.request.tenant)

    def clear(self) -> list[WaitingRequest]:
        """Remove and return all waiting requests."""
        left = [each for line in self._queue.lines.values() for each in line]
        for each in left:
            self.discard(each)
        return left
