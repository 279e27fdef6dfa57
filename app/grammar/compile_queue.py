"""Requests that wait for their grammars to be compiled: tenants take turns and share the places. Knows no compiler."""

from __future__ import annotations

from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from app.engine.matcher import Matcher
from app.engine.request import Grammar, Request


@dataclass(frozen=True, slots=True, eq=False)
class WaitingRequest:
    """A request, and the future of the matcher that it waits for."""

    request: Request
    grammar: Grammar
    matcher: Future[Matcher | None] = field(default_factory=Future)


class CompileQueue:
    """The next request is the oldest of the tenant that had its last turn longest ago. For one thread, or under a lock.

    Of one tenant one grammar is compiled at a time, so the grammars of one never keep all threads.
    """

    def __init__(self, max_requests: int) -> None:
        """`max_requests`: those that wait and those that are being compiled."""
        self._max_requests = max_requests
        self._waiting: OrderedDict[str, deque[WaitingRequest]] = OrderedDict()  # by tenant, the next turn first
        self._compiling: set[str] = set()  # tenants

    def __len__(self) -> int:
        return len(self._compiling) + sum(map(len, self._waiting.values()))

    def num_of(self, tenant: str) -> int:
        """The requests of a tenant, with the one that is being compiled."""
        return len(self._waiting.get(tenant, ())) + (tenant in self._compiling)

    def add(self, new: WaitingRequest) -> WaitingRequest | None:
        """Add a request. Returns the one that has no place: where all are taken, a tenant with fewer takes a place of
        the tenant with the most, which loses its newest.
        """
        tenant, refused = new.request.tenant, None
        if len(self) >= self._max_requests:
            largest = max([tenant, *self._waiting], key=self.num_of)
            if self.num_of(largest) <= self.num_of(tenant) + 1:
                return new
            refused = self._waiting[largest][-1]
            self.discard(refused)
        self._waiting.setdefault(tenant, deque()).append(new)
        return refused

    def discard(self, left: WaitingRequest) -> None:
        """Remove a request, if it still waits."""
        tenant = left.request.tenant
        of_tenant = self._waiting.get(tenant)
        if of_tenant is not None and left in of_tenant:
            of_tenant.remove(left)
            if not of_tenant:
                del self._waiting[tenant]

    def take(self) -> WaitingRequest | None:
        """The next request, which is being compiled until `end`; None where no tenant has a turn now."""
        tenant = next((each for each in self._waiting if each not in self._compiling), None)
        if tenant is None:
            return None
        taken = self._waiting[tenant].popleft()
        if self._waiting[tenant]:
            self._waiting.move_to_end(tenant)
        else:
            del self._waiting[tenant]
        self._compiling.add(tenant)
        return taken

    def end(self, taken: WaitingRequest) -> None:
        """A request is not being compiled any more."""
        self._compiling.remove(taken.request.tenant)

    def clear(self) -> list[WaitingRequest]:
        """Remove all that wait."""
        left = [each for of_tenant in self._waiting.values() for each in of_tenant]
        self._waiting.clear()
        return left
