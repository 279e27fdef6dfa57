"""Every strategy with every policy: the same requests get the same tokens, whatever happens around them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from app.engine.request import FinishReason, Request
from tests.fakes import FakeClock, Outcome, TimedRunner, build_fake_engine, expected_tokens, make_request, run_to_end

pytestmark = pytest.mark.usefixtures("small_lengths")

STRATEGIES: list[Any] = [
    {"name": "static", "batch_size": 6, "max_wait_ms": 30},
    {"name": "dynamic", "batch_size": 6, "max_batch_tokens": 40, "max_wait_ms": 30},
    {"name": "bucketed", "batch_size": 6, "max_wait_ms": 30},
    {"name": "sorted", "batch_size": 6, "max_wait_ms": 30},
    {"name": "adaptive", "max_wait_ms": 30, "target_latency_ms": 200},
    {"name": "continuous"},
    {"name": "hybrid", "prefill_share": 0.25},
]
SELECTIVE: list[Any] = [{"name": name, "selective": True} for name in ("continuous", "hybrid")]
POLICIES = ["fcfs", "sjf", "priority", "fair", "deadline"]
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
@pytest.mark.parametrize(
    "strategy", STRATEGIES + SELECTIVE, ids=lambda strategy: strategy["name"] + "-selective" * ("selective" in strategy)
)
def test_the_tokens_are_the_same_under_every_strategy_and_policy(strategy: Any, policy: str) -> None:
    clock, requests = FakeClock(), workload()
    engine = build_fake_engine(
        runner=TimedRunner(clock), clock=clock, num_blocks=14, max_running=6, max_waiting=100,
        strategy=strategy, policy=policy,
    )  # fmt: skip
    outcome = Outcome()
    for start in range(0, NUM_REQUESTS, 16):  # they come in four waves, the later ones while others run
        for request in requests[start : start + 16]:
            engine.add(request)
        for _ in range(10):
            clock.advance(engine.idle_s or 0.0)
            outcome.book(engine.step())
    rest = run_to_end(engine, clock=clock)
    for request in requests:
        name = request.request_id
        token_ids = outcome.token_ids.get(name, []) + rest.token_ids.get(name, [])
        assert token_ids == expected_tokens(request.prompt_token_ids, request.sampling.max_tokens)
        assert (outcome.reasons | rest.reasons)[name] is FinishReason.LENGTH
    assert engine.stats().total_preemptions > 0
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
