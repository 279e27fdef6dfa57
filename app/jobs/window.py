"""How many rows to have under way at a service: as many as it takes, found out by trying. No clock here.

A service that has no idle slot refuses at once. So whatever has not been refused is computed, and a refusal says
exactly how many those are; there is nothing to halve, as senders must who hear of a full queue by its losses.
"""

from __future__ import annotations

TRY_EVERY_S = 0.2
MAX_OUTAGE_PAUSE_S = 5.0


class Window:
    """`limit` rows may be under way. It grows while they are, the faster the longer none is refused."""

    def __init__(self, max_limit: int) -> None:
        self._max_limit = max_limit
        self.limit = 1
        self._increase = 1
        self._grows_at = 0.0
        self.gone_since: float | None = None  # when the service was heard of last, while it does not answer

    def grow(self, now: float, num_under_way: int) -> None:
        """Called now and then, when there are rows to send. Times are in seconds of one clock."""
        if num_under_way < self.limit or now < self._grows_at:
            return
        self.limit = min(self.limit + self._increase, self._max_limit)
        self._increase *= 2
        self._grows_at = now + TRY_EVERY_S

    def refused(self, now: float, num_under_way: int, *, retry_after_s: float) -> None:
        """One was refused, and so many others were not: the service has room for those and should be asked later."""
        self.limit = min(self.limit, num_under_way)
        self._increase = 1
        self._grows_at = max(self._grows_at, now + max(retry_after_s, TRY_EVERY_S))
        self.gone_since = None

    def answered(self) -> None:
        """The service has answered a row."""
        self.gone_since = None

    def gone(self, now: float) -> None:
        """The service does not answer: one row tries again after a pause, the longer the longer that lasts."""
        if self.gone_since is None:
            self.gone_since = now
        self.limit, self._increase = 0, 1
        self._grows_at = now + min(max(TRY_EVERY_S, (now - self.gone_since) / 2), MAX_OUTAGE_PAUSE_S)
