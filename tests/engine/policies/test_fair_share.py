"""Fair shares: Jain's index over windows, and no credit for idling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from app.engine.engine import Engine
from app.engine.policies import GENERATED_WEIGHT, PROMPT_WEIGHT, FairShare
from app.fair import FairShares
from tests.kit.engine import CountingRunner, build_fake_engine, make_request, run_to_end

POLITE = [f"polite-{n}" for n in range(9)]
WINDOW = 200


def jain(shares: Iterable[float]) -> float:
    """(sum x)² / (n · sum x²): 1 when all have the same, 1/n when one has everything (Jain et al., 1984)."""
    shares = list(shares)
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


class Traffic:
    """Tenants that keep sending; counts the tokens computed for each in each step."""

    def __init__(self, policy: str, **settings: int) -> None:
        self.runner = CountingRunner()
        limits = {"num_blocks": 400, "max_running": 20, "max_step_tokens": 64, "prefill_chunk_tokens": 16}
        self.engine: Engine = build_fake_engine(runner=self.runner, policy=policy, **(limits | settings))
        self.steps: list[Counter[str]] = []
        self._tenants: dict[str, str] = {}
        self._number = 0

    def send(self, tenant: str, *, num_prompt: int = 12, max_tokens: int = 12) -> None:
        name = str(self._number)
        self._number += 1
        self._tenants[name] = tenant
        prompt = tuple(2 + (self._number * 7 + i * i) % 48 for i in range(num_prompt))
        self.engine.add(make_request(prompt, request_id=name, tenant=tenant, max_tokens=max_tokens, cache_salt=name))

    def step(self) -> None:
        self.engine.step()
        computed: Counter[str] = Counter()
        for item in self.runner.batches[-1].scheduled:
            computed[self._tenants[item.request_id]] += len(item.token_ids)
        self.runner.batches.clear()
        self.steps.append(computed)

    def shares(self, steps: slice, tenants: Iterable[str]) -> list[int]:
        total = sum(self.steps[steps], Counter())
        return [total[tenant] for tenant in tenants]


def crowd(policy: str, *, num_steps: int) -> Traffic:
    """One tenant sends ten times as much as each of nine others, and those together more than can be served."""
    traffic = Traffic(policy)
    for step in range(num_steps):
        if step % 5 == 0:
            for tenant in POLITE:
                traffic.send(tenant)
            for _ in range(10):
                traffic.send("greedy")
        traffic.step()
    return traffic


def worst_window(traffic: Traffic, *, warm_up: int) -> float:
    tenants = ["greedy", *POLITE]
    starts = range(warm_up, len(traffic.steps) - WINDOW + 1)
    return min(jain(traffic.shares(slice(start, start + WINDOW), tenants)) for start in starts)


def test_one_tenant_at_ten_times_the_rate_gets_what_the_nine_others_get() -> None:
    assert worst_window(crowd("fair", num_steps=700), warm_up=100) >= 0.99


def test_first_come_first_served_would_not_do() -> None:
    assert worst_window(crowd("fcfs", num_steps=400), warm_up=100) < 0.6


def test_long_requests_are_charged_for_what_they_are() -> None:
    """Tenants with requests of different lengths get the same number of tokens, not of requests."""
    traffic = Traffic("fair", max_running=12)
    sizes = {"short": (4, 4), "prompt": (40, 4), "output": (4, 40)}
    waiting = dict.fromkeys(sizes, 0)
    for _ in range(900):
        for tenant, (num_prompt, max_tokens) in sizes.items():
            while waiting[tenant] < 40:
                traffic.send(tenant, num_prompt=num_prompt, max_tokens=max_tokens)
                waiting[tenant] += 1
        traffic.step()
        for tenant in sizes:
            waiting[tenant] = shares_of(traffic.engine).num_waiting(tenant)
    assert jain(shares_of(traffic.engine).served(tenant) for tenant in sizes) >= 0.995


@pytest.mark.parametrize("idle_steps", [50, 1000])
def test_a_tenant_that_returns_has_no_credit_however_long_it_was_idle(idle_steps: int) -> None:
    traffic = Traffic("fair")

    def keep_sending(*tenants: str) -> None:
        if len(traffic.steps) % 3 == 0:
            for tenant in tenants:
                for _ in range(4):
                    traffic.send(tenant)
        traffic.step()

    for _ in range(100):
        keep_sending("a", "b", "returns")
    for _ in range(idle_steps):
        keep_sending("a", "b")
    begin = len(traffic.steps)
    for _ in range(WINDOW):
        keep_sending("a", "b", "returns")
    a, b, returns = traffic.shares(slice(begin, begin + WINDOW), ["a", "b", "returns"])
    assert returns <= 1.1 * min(a, b)


def test_a_new_tenant_does_not_wait_for_the_backlog_of_others() -> None:
    traffic = Traffic("fair", max_running=2)
    for _ in range(50):
        traffic.send("greedy")
    for _ in range(30):
        traffic.step()
    traffic.send("polite")
    for _ in range(30):
        traffic.step()
    assert traffic.shares(slice(-30, None), ["polite"]) == [12 + 12 - 1]


def shares_of(engine: Engine) -> FairShares:
    policy = engine._scheduler._policy
    assert isinstance(policy, FairShare)
    return policy.shares


def test_a_tenant_is_not_charged_again_for_what_a_preemption_makes_us_compute_again() -> None:
    engine = build_fake_engine(policy="fair", num_blocks=8)
    requests = [make_request((n, 6, 7, 8, 5), max_tokens=14, tenant="a") for n in range(2, 6)]
    run_to_end(engine, *requests)
    assert engine.stats().total_preemptions > 0
    assert shares_of(engine).served("a") == 4 * (5 * PROMPT_WEIGHT + 14 * GENERATED_WEIGHT)


def test_a_tenant_is_not_charged_for_background_requests() -> None:
    engine = build_fake_engine(policy="fair")
    run_to_end(engine, make_request((5, 6, 7), max_tokens=2, tenant="a"))
    charged = shares_of(engine).served("a")
    assert charged == 3 * PROMPT_WEIGHT + 2 * GENERATED_WEIGHT
    run_to_end(engine, replace(make_request((7, 8, 9), max_tokens=6, tenant="a"), is_background=True))
    assert shares_of(engine).served("a") == charged


@pytest.mark.parametrize("waits", [True, False])
def test_a_new_tenant_begins_where_others_are(*, waits: bool) -> None:
    """Also where nothing waits: then where the last began that joined."""
    engine = build_fake_engine(policy="fair", max_running=1)
    run_to_end(engine, make_request((5, 6, 7), max_tokens=30, tenant="old"))
    served = shares_of(engine).served("old")
    for _ in range(2 if waits else 1):
        engine.add(make_request((5, 6, 8), max_tokens=30, tenant="old"))
    engine.step()
    assert shares_of(engine).num_waiting("old") == waits
    engine.add(make_request((5, 6, 9), tenant="new"))
    assert shares_of(engine).served("new") >= served > 60
