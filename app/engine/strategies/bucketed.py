"""Batches of prompts of about one length."""

from __future__ import annotations

from bisect import bisect_left

from app.config import BucketedConfig
from app.engine.sequence import Sequence
from app.engine.strategies.batches import WholeBatches

# In prompt tokens: each class holds prompts of up to twice the length of the one before, so that a batch takes at most
# twice as long as its shortest prompt needs, and a dozen classes cover every context length.
BUCKET_BOUNDARIES = (64, 128, 256, 512, 1024, 2048)


class Bucketed(WholeBatches):
    """As static, but only prompts of one length class share a batch; each class has its own timer.

    Bucket `n` holds the prompts of at most `BUCKET_BOUNDARIES[n]` tokens, the last one all that are longer.
    """

    def __init__(self, config: BucketedConfig) -> None:
        super().__init__(batch_size=config.batch_size, max_wait_s=config.max_wait_ms / 1e3)

    def bucket_of(self, sequence: Sequence) -> int:
        return bisect_left(BUCKET_BOUNDARIES, sequence.num_prompt_tokens)

    def _batch_ended(self, latency_s: float) -> None:
        """Nothing to learn from it."""
