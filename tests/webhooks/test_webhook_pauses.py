"""Pauses double up to a bound and are spread."""

from __future__ import annotations

import random

from app.config import WebhooksConfig
from app.webhooks import pause_s


def test_pauses_double_up_to_a_bound() -> None:
    config = WebhooksConfig(first_pause_s=5, max_pause_s=100)
    rng = random.Random(1)
    for num_attempts, whole in ((1, 5), (2, 10), (3, 20), (5, 80), (6, 100), (100, 100), (10_000, 100)):
        pauses = [pause_s(num_attempts, config, rng) for _ in range(200)]
        assert whole / 2 <= min(pauses) < whole * 0.6
        assert whole * 0.9 < max(pauses) <= whole


def test_a_receiver_that_is_down_for_an_hour_hears_of_it_within_the_next() -> None:
    config, rng = WebhooksConfig(), random.Random(1)
    at, num_attempts = 0.0, 1
    while at < 3600:
        at += pause_s(num_attempts, config, rng)
        num_attempts += 1
    assert at < 2 * 3600
    assert num_attempts < 15
