"""The pauses of an event loop: how long its other tasks had to wait while something ran beside them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

REFERENCE_S = 0.01  # CPU time of 200,000 turns of a loop in Python 3.11 on a Zen 4 with nothing else on it
EVERY_S = 0.001  # a task that came round in every turn would take the interpreter lock from those that work


class Stalls:
    """Between two looks of a task of its own, which does nothing else; so none is found shorter than it was.

    `longest_s` is the most CPU time of the loop's own thread: a busy machine does not change it. `longest_process_s` is
    the most CPU time of all threads, of each pause no more than its time by the clock: it also holds the time in which
    another thread held the interpreter lock. The loop's thread's own wait for a core is no part of it, where the system
    tells that: what other threads compute meanwhile, without the lock, does not hold the loop.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.longest_process_s = 0.0
        try:
            self._schedule: int | None = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        except OSError:
            self._schedule = None
        self._last = self._times()

    async def watch(self) -> None:
        """Measure until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(EVERY_S)

    def look(self) -> None:
        """Measure the time since the last look."""
        before, self._last = self._last, self._times()
        cpu_s, process_s, pause_s, waited_s = (now - then for now, then in zip(self._last, before, strict=True))
        self.longest_s = max(self.longest_s, cpu_s)
        self.longest_process_s = max(self.longest_process_s, min(pause_s - waited_s, process_s))

    def close(self) -> None:
        """Nothing is looked at any more."""
        if self._schedule is not None:
            os.close(self._schedule)

    def _times(self) -> tuple[float, float, float, float]:
        """CPU time of this thread and of the process, the clock, this thread's wait for a core: s."""
        waited_ns = 0 if self._schedule is None else int(os.pread(self._schedule, 100, 0).split()[1])
        return time.thread_time(), time.process_time(), time.perf_counter(), waited_ns / 1e9


def slowness() -> float:
    """How many times as long as there Python takes here and now: at least 1. What else runs takes caches and speed."""
    before, total = time.thread_time(), 0
    for number in range(200_000):
        total += number * number
    return max(1.0, (time.thread_time() - before) / REFERENCE_S)


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
        stalls.close()
