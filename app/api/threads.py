"""Threads for work that would hold the event loop. The size of a request's body says where its work is done.

Tenants take turns, and large bodies have threads of their own: those of one tenant delay neither the loop, nor small
bodies, nor another tenant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar

from app.errors import Overloaded
from app.fair import FairQueue

MAX_SIZE_ON_THE_LOOP = 2000  # characters and values of a body; a text of so many is encoded in a millisecond
MAX_SMALL_SIZE = 65_536  # the fields of such a body are checked, and its text encoded, in some tens of milliseconds
MAX_WAITING = 256  # pieces of work of one tenant

T = TypeVar("T")


class FairThreads:
    """A few threads. Waiting tenants take turns, and one tenant never has more than its share of the threads."""

    def __init__(self, num_threads: int, *, max_per_tenant: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="preparation")
        self._lock = Lock()
        self._queue: FairQueue[tuple[Future[Any], Callable[[], Any]]] = FairQueue(max_running=max_per_tenant)

    @property
    def num_waiting(self) -> int:
        """Pieces of work that no thread has begun."""
        with self._lock:
            return len(self._queue)

    def submit(self, tenant: str, work: Callable[[], T]) -> Future[T]:
        """Queue work. Raises Overloaded when too much of this tenant's waits."""
        future: Future[T] = Future()
        with self._lock:
            if self._queue.num_waiting(tenant) >= MAX_WAITING:
                raise Overloaded(
                    f"{MAX_WAITING:,} large requests of this client wait to be checked; send fewer at once"
                )
            self._queue.push(tenant, (future, work))
        self._executor.submit(self._run_all)
        return future

    def _run_all(self) -> None:
        """Run work until none may begin. What is passed over for its tenant's share begins when that has room."""
        while (taken := self._take()) is not None:
            tenant, (future, work) = taken
            try:
                if future.set_running_or_notify_cancel():
                    _settle(future, work)
            finally:
                # An error's traceback has the frames. Else the future, its error and the body would be one cycle.
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
        del future, work  # as above
    else:
        future.set_result(result)


class BodyThreads:
    """Where the bodies of requests are read, checked and encoded."""

    def __init__(self) -> None:
        # Python's parser and validators hold the interpreter lock for long: two at once would double the loop's pauses.
        self._reading = FairThreads(1, max_per_tenant=1)
        self._small = FairThreads(3, max_per_tenant=3)
        self._large = FairThreads(3, max_per_tenant=2)

    @property
    def num_waiting(self) -> int:
        """Pieces of work that no thread has begun."""
        return self._reading.num_waiting + self._small.num_waiting + self._large.num_waiting

    async def read(self, tenant: str, size: int, work: Callable[[], T]) -> T:
        """The result of work that parses or checks so many characters. Raises Overloaded."""
        return work() if size <= MAX_SMALL_SIZE else await asyncio.wrap_future(self._reading.submit(tenant, work))

    async def encode(self, tenant: str, size: int, work: Callable[[], T]) -> T:
        """The result of work that makes tokens of so many characters, or text of tokens. Raises Overloaded."""
        if size <= MAX_SIZE_ON_THE_LOOP:
            return work()
        threads = self._small if size <= MAX_SMALL_SIZE else self._large
        return await asyncio.wrap_future(threads.submit(tenant, work))
