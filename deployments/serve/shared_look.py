"""Shares one query of other processes among all callers, so that requests without a key cannot multiply queries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedQuery(Generic[T]):
    """Callers share the running query, and its result for `holds_s` afterwards. Belongs to one event loop."""

    def __init__(
        self, look: Callable[[], Awaitable[T]], *, holds_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`holds_s`: seconds after the end of a look for which its result answers other callers."""
        self._look = look
        self._holds_s = holds_s
        self._clock = clock
        self._task: asyncio.Task[T] | None = None
        self._holds_until = 0.0

    async def __call__(self) -> T:
        """Return the result of a look, or raise the error of the look. A cancelled caller does not end the look."""
        task = self._task
        if task is None or (task.done() and self._clock() >= self._holds_until):
            # An empty context, because Serve would cancel calls in the request's context when the request ends.
            task = self._task = asyncio.create_task(self._looked(), context=Context())
        return await asyncio.shield(task)

    async def _looked(self) -> T:
        try:
            return await self._look()
        finally:
            self._holds_until = self._clock() + self._holds_s
            if not self._holds_s:
                self._task = None  # a result may be large
