"""Batches whose size follows their latency."""

from __future__ import annotations

from app.config import AdaptiveConfig
from app.engine.strategies.batches import WholeBatches

_NEWEST_SHARE = 0.25  # of the moving average: about the last eight batches count
_TOO_FAST, _TOO_SLOW = 0.8, 1.2  # times the target


class Adaptive(WholeBatches):
    """As static, with a batch size that grows by one while batches are fast and shrinks by one while they are slow.

    It begins with batches of one sequence, and `batch_size` is the largest.
    """

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__(batch_size=1, max_wait_s=config.max_wait_ms / 1e3)
        self._largest = config.batch_size
        self._target_s = config.target_latency_ms / 1e3
        self._average_s: float | None = None

    def _batch_ended(self, latency_s: float) -> None:
        before = latency_s if self._average_s is None else self._average_s
        self._average_s = before + _NEWEST_SHARE * (latency_s - before)
        if self._average_s < _TOO_FAST * self._target_s:
            self.batch_size = min(self.batch_size + 1, self._largest)
        elif self._average_s > _TOO_SLOW * self._target_s:
            self.batch_size = max(self.batch_size - 1, 1)
