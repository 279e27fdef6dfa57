"""Threads for work that would block the event loop. The size of a request's body decides which thread runs its work.

Tenants take turns, and large bodies use separate threads. A tenant's large bodies therefore delay neither the event
loop, nor small bodies, nor other tenants.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar

from app.errors import Overloaded
from app.fair import FairQueue

MAX_SIZE_ON_THE_LOOP = 2000  # characters and values of a body; encoding a text of 2,000 characters takes a millisecond
MAX_SMALL_SIZE = 65_536  # checking the fields of a body of this size and encoding its text takes tens of ms
MAX_WAITING = 256  # pieces of work that may be queued for one tenant

T = TypeVar("T")


class FairThreads:
    """A thread pool in which waiting tenants take turns, and no tenant uses more than its share of the threads."""

    def __init__(self, num_threads: int, *, max_per_tenant: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="preparation")
        self._lock = Lock()
        self._queue: FairQueue[tuple[Future[Any], Callable[[], Any]]] = FairQueue(max_running=max_per_tenant)

    @property
    def num_waiting(self) -> int:
        """Number of queued pieces of work."""
        with self._lock:
            return len(self._queue)

    def submit(self, tenant: str, work: Callable[[], T]) -> Future[T]:
        """Queue work and return its future. Raises Overloaded if the tenant already has `MAX_WAITING` pieces queued."""
        future: Future[T] = Future()
        with self._lock:
            if self._queue.num_waiting(tenant) >= MAX_WAITING:
                raise Overloaded(
                    f"{MAX_WAITING:,} large requests from this client are already waiting to be checked; send fewer at "
                    f"once"
                )
            self._queue.push(tenant, (future, work))
        self._executor.submit(self._run_all)
        return future

    def _run_all(self) -> None:
        """Run queued work until none may start. A tenant at its limit may start work when its other work finishes."""
        while (taken := self._take()) is not None:
            tenant, (future, work) = taken
            try:
                if future.set_running_or_notify_cancel():
                    _settle(future, work)
            finally:
                # An error's traceback refers to this frame. Without `del`, future, error and body would form a cycle.
                del taken, future, work
                with self._lock:
                    self._queue.end(tenant)

    def _take(self) -> tuple[str, tuple[Future[Any], Callable[[], Any]]] | None:
        with self._lock:
            return self._queue.take()


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
        del future, work  # the traceback refers to this frame
    else:
        future.set_result(result)


class BodyThreads:
    """The threads that read, check and encode the bodies of requests."""

    def __init__(self) -> None:
        # Parsers and validators hold the GIL for a long time. Two threads would double the pauses of the event loop.
        self._reading = FairThreads(1, max_per_tenant=1)
        self._small = FairThreads(3, max_per_tenant=3)
        self._large = FairThreads(3, max_per_tenant=2)

    @property
    def num_waiting(self) -> int:
        """Number of queued pieces of work for all threads."""
        return self._reading.num_waiting + self._small.num_waiting + self._large.num_waiting

    async def read(self, tenant: str, size: int, work: Callable[[], T]) -> T:
        """Run work that parses or checks `size` characters, and return its result. Raises Overloaded."""
        return work() if size <= MAX_SMALL_SIZE else await asyncio.wrap_future(self._reading.submit(tenant, work))

    async def encode(self, tenant: str, size: int, work: Callable[[], T]) -> T:
        """Run work that encodes or decodes `size` characters, and return its result. Raises Overloaded."""
        if size <= MAX_SIZE_ON_THE_LOOP:
            return work()
        threads = self._small if size <= MAX_SMALL_SIZE else self._large
        return await asyncio.wrap_future(threads.submit(tenant, work))
