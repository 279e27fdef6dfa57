"""The pauses of an event loop: how long its other tasks had to wait while something ran beside them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Stalls:
    """Between two turns of a task of its own, which does nothing.

    `longest_s` is the most CPU time of the loop's own thread: a busy machine does not change it. `longest_process_s` is
    the most CPU time of all threads, of each pause no more than its time by the clock: it also holds the time in which
    another thread held the interpreter lock, and not what threads without the lock compute beside the loop.
    `longest_pause_s` is the most time by the clock, whatever else runs on the machine: for benchmarks.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.longest_process_s = 0.0
        self.longest_pause_s = 0.0

    async def watch(self) -> None:
        """Measure until it is cancelled."""
        while True:
            cpu_s, process_s, at_s = time.thread_time(), time.process_time(), time.perf_counter()
            await asyncio.sleep(0)
            self.longest_s = max(self.longest_s, time.thread_time() - cpu_s)
            pause_s = time.perf_counter() - at_s
            self.longest_process_s = max(self.longest_process_s, min(pause_s, time.process_time() - process_s))
            self.longest_pause_s = max(self.longest_pause_s, pause_s)


@asynccontextmanager
async def stalls_of_loop() -> AsyncIterator[Stalls]:
    """The pauses of this loop while the block runs."""
    stalls = Stalls()
    task = asyncio.create_task(stalls.watch())
    await asyncio.sleep(0)
    try:
        yield stalls
    finally:
        await asyncio.sleep(0)  # what the block has done last is measured too
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
