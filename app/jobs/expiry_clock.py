"""The time by which files and batches expire: a machine that starts with a wrong clock must not delete what is kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

MAX_JUMP_S = 3 * 86_400.0  # a service may be off for a weekend; a clock that is wrong is wrong by months
TRUST_AFTER_S = 86_400.0  # for an operator to set the clock right


@dataclass(frozen=True, slots=True)
class SeenTime:
    """What outlives a process. Seconds."""

    at: float  # since 1970: the latest time that was credible
    doubted_s: float = 0.0  # how long a service has run meanwhile on a clock far ahead of it


class ExpiryClock:
    """Seconds since 1970: the machine's clock, but not when that has jumped ahead.

    A clock that is more than MAX_JUMP_S ahead of the time that services have seen pass is not believed until they have
    run on it for TRUST_AFTER_S: then it is right, and the service was off for long. Until then time goes on from what
    was seen, as fast as it passes. A clock that is behind is believed at once: with it less expires.
    """

    def __init__(
        self, clock: Callable[[], float], seen: SeenTime | None, *, running: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` gives the machine's seconds since 1970, `running` seconds that nothing sets.

        `seen` is what the last process has seen; None where there was none.
        """
        self._clock = clock
        self._running = running
        self._read_at = running()
        self.seen = seen or SeenTime(clock())

    def __call__(self) -> float:
        running, now = self._running(), self._clock()
        passed_s, self._read_at = running - self._read_at, running
        seen_at = self.seen.at + passed_s
        if now - seen_at <= MAX_JUMP_S or self.seen.doubted_s >= TRUST_AFTER_S:
            self.seen = SeenTime(max(now, seen_at))
            return now
        if not self.seen.doubted_s:
            logger.warning(
                "the clock is %.1f days ahead of what was seen last: until the service has run for %.0f h, nothing "
                "expires by it; if it is wrong, set it right", (now - seen_at) / 86_400, TRUST_AFTER_S / 3600
            )  # fmt: skip
        self.seen = SeenTime(seen_at, self.seen.doubted_s + passed_s)
        return seen_at
