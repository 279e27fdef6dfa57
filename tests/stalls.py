"""The pauses of an event loop: how long its other tasks had to wait while something ran beside them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

EVERY_S = 0.001  # a task that came round in every turn would take the interpreter lock from those that work


class Stalls:
    """Between two looks of a task of its own, which does nothing else; so none is found shorter than it was.

    `longest_s` is the most CPU time of the loop's own thread: a busy machine does not change it. `longest_process_s` is
    the most CPU time of all threads, of each pause no more than its time by the clock: it also holds the time in which
    another thread held the interpreter lock.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.longest_process_s = 0.0
        self._last = _times()

    async def watch(self) -> None:
        """Measure until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(EVERY_S)

    def look(self) -> None:
        """Measure the time since the last look."""
        before, self._last = self._last, _times()
        cpu_s, process_s, pause_s = (now - then for now, then in zip(self._last, before, strict=True))
        self.longest_s = max(self.longest_s, cpu_s)
        self.longest_process_s = max(self.longest_process_s, min(pause_s, process_s))


def _times() -> tuple[float, float, float]:
    """CPU time of this thread and of the process, and the clock: s."""
    return time.thread_time(), time.process_time(), time.perf_counter()


@asynccontextmanager
async def stalls_of_loop() -> AsyncIterator[Stalls]:
    """The pauses of this loop while the block runs."""
    stalls = Stalls()
    task = asyncio.create_task(stalls.watch())
    await asyncio.sleep(0)
    try:
        yield stalls
    finally:
        stalls.look()  # what the block has done last is measured too
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
