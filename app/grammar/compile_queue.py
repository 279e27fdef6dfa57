"""The queue of requests that wait for their grammars to be compiled. Tenants take turns and share the slots."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from app.engine.matcher import Matcher
from app.engine.request import Grammar, Request
from app.fair import FairQueue


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class WaitingRequest:
    """A request, and the future of the request's matcher."""

    request: Request
    grammar: Grammar
    matcher: Future[Matcher | None] = field(default_factory=Future)


class CompileQueue:
    """A queue with turns for tenants and a limit for all tenants together. Not thread-safe: use it under a lock.

    One grammar of a tenant is compiled at a time, so a single tenant never occupies all threads.
    """

    def __init__(self, max_requests: int) -> None:
        """`max_requests` limits the requests that wait or are being compiled."""
        self._max_requests = max_requests
        self._queue: FairQueue[WaitingRequest] = FairQueue(max_running=1)
        self._num_compiling = 0

    def __len__(self) -> int:
        return self._num_compiling + len(self._queue)

    def num_of(self, tenant: str) -> int:
        """Return the number of a tenant's requests, including the request that is being compiled."""
        return self._queue.num_waiting(tenant) + self._queue.num_running(tenant)

    def add(self, new: WaitingRequest) -> WaitingRequest | None:
        """Add a request. Returns the request that lost its slot, or None. If all slots are taken, the tenant with the
        most requests loses its newest request to a tenant with fewer; otherwise the new request is returned.
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
        """Remove a request. Does nothing if the request no longer waits."""
        if left in self._queue.lines.get(left.request.tenant, ()):
            self._queue.remove(left.request.tenant, left)

    def take(self) -> WaitingRequest | None:
        """Return the next request to compile, which counts as compiling until `end`; None if no tenant has a turn."""
        taken = self._queue.take()
        if taken is None:
            return None
        self._num_compiling += 1
        return taken[1]

    def end(self, taken: WaitingRequest) -> None:
        """Note that the compilation for a request has ended."""
        self._num_compiling -= 1
        self._queue.end(taken.request.tenant)

    def clear(self) -> list[WaitingRequest]:
        """Remove and return all waiting requests."""
        left = [each for line in self._queue.lines.values() for each in line]
        for each in left:
            self.discard(each)
        return left
