"""Requests that wait for their grammars to be compiled: tenants take turns and share the places. Knows no compiler."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from app.engine.matcher import Matcher
from app.engine.request import Grammar, Request
from app.fair import FairQueue


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class WaitingRequest:
    """A request, and the future of the matcher that it waits for."""

    request: Request
    grammar: Grammar
    matcher: Future[Matcher | None] = field(default_factory=Future)


class CompileQueue:
    """Requests of tenants in turns, where all have places for so many. For one thread, or under a lock.

    Of one tenant one grammar is compiled at a time, so the grammars of one never keep all threads.
    """

    def __init__(self, max_requests: int) -> None:
        """`max_requests`: those that wait and those that are being compiled."""
        self._max_requests = max_requests
        self._queue: FairQueue[WaitingRequest] = FairQueue(max_running=1)
        self._num_compiling = 0

    def __len__(self) -> int:
        return self._num_compiling + len(self._queue)

    def num_of(self, tenant: str) -> int:
        """The requests of a tenant, with the one that is being compiled."""
        return self._queue.num_waiting(tenant) + self._queue.num_running(tenant)

    def add(self, new: WaitingRequest) -> WaitingRequest | None:
        """Add a request. Returns the one that has no place: where all are taken, a tenant with fewer takes a place of
        the tenant with the most, which loses its newest.
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
        """Remove a request, if it still waits."""
        if left in self._queue.lines.get(left.request.tenant, ()):
            self._queue.remove(left.request.tenant, left)

    def take(self) -> WaitingRequest | None:
        """The next request, which is being compiled until `end`; None where no tenant has a turn now."""
        taken = self._queue.take()
        if taken is None:
            return None
        self._num_compiling += 1
        return taken[1]

    def end(self, taken: WaitingRequest) -> None:
        """A request is not being compiled any more."""
        self._num_compiling -= 1
        self._queue.end(taken.request.tenant)

    def clear(self) -> list[WaitingRequest]:
        """Remove all that wait."""
        left = [each for line in self._queue.lines.values() for each in line]
        for each in left:
            self.discard(each)
        return left
