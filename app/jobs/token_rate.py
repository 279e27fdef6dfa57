"""How fast tokens have come in the last minute, for each owner."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

WINDOW_S = 60


class TokenRate:
    """Output tokens by whole seconds; a minute of them is kept."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at = clock()
        self._seconds: dict[str, deque[tuple[int, int]]] = {}

    def add(self, owner: str, num_tokens: int) -> None:
        """Count tokens that have come now."""
        second = int(self._clock())
        seconds = self._seconds.setdefault(owner, deque(maxlen=WINDOW_S))
        if seconds and seconds[-1][0] == second:
            num_tokens += seconds.pop()[1]
        seconds.append((second, num_tokens))

    def per_second(self, owner: str) -> float:
        """Tokens a second over the last minute, or since it began to count if that was later."""
        now = self._clock()
        counted_s = min(max(now - self._began_at, 1.0), WINDOW_S)
        return sum(num for second, num in self._seconds.get(owner, ()) if second > now - WINDOW_S) / counted_s
