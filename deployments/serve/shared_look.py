"""One look at other processes for all who ask at once: a question without a key costs the same however many ask it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedLook(Generic[T]):
    """Callers share the look that is under way, and its result for a moment. For one event loop."""

    def __init__(
        self, look: Callable[[], Awaitable[T]], *, holds_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`holds_s`: for how long after its end a result answers other callers."""
        self._look = look
        self._holds_s = holds_s
        self._clock = clock
        self._task: asyncio.Task[T] | None = None
        self._holds_until = 0.0

    async def __call__(self) -> T:
        """The result of a look, or the error that it has raised. A caller that goes does not end the look."""
        task = self._task
        if task is None or (task.done() and self._clock() >= self._holds_until):
            # An empty context: Serve would cancel calls of the look together with the request that started it.
            task = self._task = asyncio.create_task(self._looked(), context=Context())
        return await asyncio.shield(task)

    async def _looked(self) -> T:
        try:
            return await self._look()
        finally:
            self._holds_until = self._clock() + self._holds_s
            if not self._holds_s:
                self._task = None  # a result may be large
