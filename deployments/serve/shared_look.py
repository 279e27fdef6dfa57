"""Shares queries to other processes among concurrent callers, because anyone may send requests that trigger them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedQuery(Generic[T]):
    """A query that concurrent callers share. Its result may be reused for a time. Belongs to one event loop."""

    def __init__(
        self, look: Callable[[], Awaitable[T]], *, holds_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`look` runs the query. `holds_s` is how long the result is reused after the query has ended."""
        self._look = look
        self._holds_s = holds_s
        self._clock = clock
        self._task: asyncio.Task[T] | None = None
        self._holds_until = 0.0

    async def __call__(self) -> T:
        """Return the query's result, or raise its error. Cancelling a caller does not cancel the query."""
        task = self._task
        if task is None or (task.done() and self._clock() >= self._holds_until):
            # An empty context, because Serve would cancel the query's calls with the request that started it.
            task = self._task = asyncio.create_task(self._looked(), context=Context())
        return await asyncio.shield(task)

    async def _looked(self) -> T:
        try:
            return await self._look()
        finally:
            self._holds_until = self._clock() + self._holds_s
            if not self._holds_s:
                self._task = None  # to free the result, which may be large
