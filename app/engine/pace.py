"""How fast an engine has been of late, and what follows for those who wait or were sent away. No clock here."""

from __future__ import annotations

from math import exp

HORIZON_S = 10.0  # seconds of computing after which a step counts for a third of a new one


class Pace:
    """Steps, tokens and ended requests for each second of computing; idle time does not count."""

    def __init__(self) -> None:
        # Sums in which old steps fade; their ratios are the averages.
        self._seconds = 0.0
        self._num_steps = 0.0
        self._num_tokens = 0.0
        self._num_ended = 0.0

    def note_step(self, seconds: float, *, num_tokens: int, num_ended: int) -> None:
        """A step took so long, computed so many tokens and was the last of so many requests."""
        fading = exp(-max(seconds, 0.0) / HORIZON_S)
        self._seconds = self._seconds * fading + seconds
        self._num_steps = self._num_steps * fading + 1
        self._num_tokens = self._num_tokens * fading + num_tokens
        self._num_ended = self._num_ended * fading + num_ended

    @property
    def step_s(self) -> float:
        """Seconds a step takes; 0 while nothing is known."""
        return self._seconds / self._num_steps if self._num_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self._num_tokens / self._seconds if self._seconds > 0 else 0.0

    @property
    def ended_per_s(self) -> float:
        """Requests that end in a second: how fast the queue drains."""
        return self._num_ended / self._seconds if self._seconds > 0 else 0.0


class RetryTimes:
    """When to come back, for callers who are sent away: one after the other, as fast as places become free.

    If all of them were told the time of the next free place, all but one would be sent away again.
    """

    def __init__(self) -> None:
        self._last_at = 0.0

    def next_after(self, now: float, *, ended_per_s: float) -> float:
        """Seconds until a place should be free for this caller; 1 while the pace is not known."""
        if ended_per_s <= 0:
            return 1.0
        self._last_at = max(self._last_at, now) + 1.0 / ended_per_s
        return self._last_at - now
