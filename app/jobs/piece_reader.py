"""Pulls batches out of a generator that blocks, beside an event loop that must not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from contextlib import suppress
from queue import SimpleQueue
from typing import Generic, TypeVar

READER_PATIENCE_S = 20.0

BatchT = TypeVar("BatchT")


class BatchReader(Generic[BatchT]):
    """Pulls batches of rows in a thread that does not keep a job from ending.

    One thread for all: each new one may get another of the allocator's arenas, and all of them grow to what the largest
    batches take.
    """

    def __init__(self, batches: Generator[BatchT, None, None]) -> None:
        self._batches = batches
        self._loop = asyncio.get_running_loop()
        self._awaited: asyncio.Future[BatchT | None] = self._loop.create_future()
        self._awaited.set_result(None)  # the thread is not inside
        self._is_asked: SimpleQueue[bool] = SimpleQueue()  # for another batch; False: never again
        threading.Thread(target=self._read, name="input", daemon=True).start()

    async def next(self) -> BatchT | None:
        """The next batch; None after the last."""
        self._awaited = self._loop.create_future()
        self._is_asked.put(True)
        return await asyncio.shield(self._awaited)

    async def close(self) -> None:
        """Wait until the thread has come out of the generator, which then tidies up: Ray, shut down, would crash it."""
        self._is_asked.put(False)
        await asyncio.wait({self._awaited}, timeout=READER_PATIENCE_S)
        if self._awaited.done():
            self._awaited.exception()  # whoever waited has heard it, or is gone
            self._batches.close()

    def _read(self) -> None:
        while self._is_asked.get():
            batch, failure = None, None
            try:
                batch = next(self._batches, None)
            except Exception as error:
                failure = error
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._settle, batch, failure)

    def _settle(self, batch: BatchT | None, failure: Exception | None) -> None:
        if failure is None:
            self._awaited.set_result(batch)
        else:
            self._awaited.set_exception(failure)
