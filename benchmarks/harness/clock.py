"""The clock that arrival times are held against: monotonic, from zero."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since its making."""

    def now(self) -> float: ...

    def wait_until(self, at_s: float) -> None: ...


class MonotonicClock:
    """The real one."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def wait_until(self, at_s: float) -> None:
        """Sleep once, until then; a moment that has passed costs nothing."""
        time.sleep(max(0.0, at_s - self.now()))
