"""How long to wait between attempts: twice as long each time, up to a bound, and never all at the same moment."""

from __future__ import annotations

import random

from app.config import WebhooksConfig


def pause_s(num_attempts: int, config: WebhooksConfig, rng: random.Random) -> float:
    """Seconds after so many failed attempts: between half of the whole pause and all of it."""
    whole = min(config.first_pause_s * 2.0 ** min(num_attempts - 1, 64), config.max_pause_s)
    return whole * rng.uniform(0.5, 1.0)
