"""Batches of prompts of about one length."""

from __future__ import annotations

from bisect import bisect_left

from app.config import BucketedConfig
from app.engine.sequence import Sequence
from app.engine.strategies.batches import WholeBatches


class Bucketed(WholeBatches):
    """As static, but only prompts of one length class share a batch; each class has its own timer.

    Bucket `n` holds the prompts of at most `bucket_boundaries[n]` tokens, the last one all that are longer.
    """

    def __init__(self, config: BucketedConfig) -> None:
        super().__init__(batch_size=config.batch_size, max_wait_s=config.max_wait_ms / 1e3)
        self._boundaries = config.bucket_boundaries

    def bucket_of(self, sequence: Sequence) -> int:
        return bisect_left(self._boundaries, sequence.num_prompt_tokens)

    def _batch_ended(self, latency_s: float) -> None:
        """Nothing to learn from it."""
