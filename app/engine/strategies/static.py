"""Static and dynamic batching."""

from __future__ import annotations

from app.config import DynamicConfig, StaticConfig
from app.engine.strategies.batches import WholeBatches


class Static(WholeBatches):
    """When nothing runs and `batch_size` wait, or the oldest has waited `max_wait_ms`."""

    def __init__(self, config: StaticConfig) -> None:
        super().__init__(batch_size=config.batch_size, max_wait_s=config.max_wait_ms / 1e3)

    def _batch_ended(self, latency_s: float) -> None:
        """Nothing to learn from it."""


class Dynamic(WholeBatches):
    """As static, or when the waiting prompts have `max_batch_tokens`, which also bounds a batch."""

    def __init__(self, config: DynamicConfig) -> None:
        super().__init__(
            batch_size=config.batch_size,
            max_wait_s=config.max_wait_ms / 1e3,
            max_batch_tokens=config.max_batch_tokens,
        )

    def _batch_ended(self, latency_s: float) -> None:
        """Nothing to learn from it."""
