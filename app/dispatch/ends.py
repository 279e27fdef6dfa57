"""How fast places become free, seen from the ends of requests."""

from __future__ import annotations

from collections import deque


class Ends:
    """When the last requests ended. While the replicas are full, that is how fast places become free."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=256)

    def note(self, now: float) -> None:
        """A request has ended."""
        self._times.append(now)

    def per_s(self, now: float) -> float:
        """Requests that end in a second; 0 while too few have ended to tell."""
        if len(self._times) < 2 or now <= self._times[0]:
            return 0.0
        return len(self._times) / (now - self._times[0])
