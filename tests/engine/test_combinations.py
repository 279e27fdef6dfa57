"""Every strategy with every policy: the same requests get the same tokens, whatever happens around them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from app.engine.request import FinishReason, Request
from tests.kit.engine import POLICIES, TimedEngine, make_request

pytestmark = pytest.mark.usefixtures("small_lengths")

STRATEGIES: list[Any] = [
    {"name": "static", "max_wait_ms": 30},
    {"name": "dynamic", "max_wait_ms": 30},
    {"name": "bucketed", "max_wait_ms": 30},
    {"name": "sorted", "max_wait_ms": 30},
    {"name": "adaptive", "max_wait_ms": 30, "target_latency_ms": 200},
    {"name": "continuous"},
    {"name": "hybrid", "prefill_share": 0.25},
]
NUM_REQUESTS = 64


def workload() -> list[Request]:
    draw = random.Random(7)
    return [
        make_request(
            tuple(draw.randrange(2, 50) for _ in range(draw.randint(1, 16))),
            request_id=f"request-{number}",
            max_tokens=draw.randint(4, 24),
            priority=draw.randint(-2, 2),
            tenant=draw.choice("abc"),
            deadline_s=draw.choice([None, 10_000.0, 20_000.0]),
        )
        if number % 5
        else replace(
            make_request((2, 2 + number % 40), request_id=f"request-{number}", max_tokens=12), is_background=True
        )
        for number in range(NUM_REQUESTS)
    ]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy["name"])
def test_the_tokens_are_the_same_under_every_strategy_and_policy(strategy: Any, policy: str) -> None:
    requests, limits = workload(), {"num_blocks": 14, "max_running": 6, "max_waiting": 100}
    timed = TimedEngine(strategy=strategy, policy=policy, **limits)
    for start in range(0, NUM_REQUESTS, 16):  # they come in four waves, the later ones while others run
        timed.add(*requests[start : start + 16])
        for _ in range(10):
            timed.clock.advance(timed.engine.idle_s or 0.0)
            timed.step()
    timed.finish().check(*requests)
    assert set(timed.outcome.reasons.values()) == {FinishReason.LENGTH}
    assert timed.stats.total_preemptions > 0
    assert timed.stats.num_free_blocks == timed.stats.num_blocks
