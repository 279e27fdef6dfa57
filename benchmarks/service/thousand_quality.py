"""How well a large fleet is used, in simulated time: the parts `quality`, `newcomer` and `hot` of `thousand`."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from app.config import SchedulerConfig
from app.fleet import ReplicaRegistry, replica_registry
from app.fleet.dispatch import GroupChooser, make_policy
from benchmarks.harness.command import tell
from benchmarks.service import prefixes
from deployments.plan.simulation import FleetSimulation
from deployments.plan.traces import Trace, TracedRequest

HOT_TOKENS = 1_000
_DISPATCH = "prefix_affinity"
_SINCE_S = (0, 1, 2, 5, 10, 1_000)  # seconds since an ingress has started, from one to the next


def quality_figures(num_replicas: int, given: argparse.Namespace, *, hot_tokens: int = 0) -> dict[str, Any]:
    """Of each number of ingresses, over the perfect dispatcher. `hot_tokens`: see `prefixes.conversations`."""
    rate = given.load * num_replicas * _turns_per_s(given.seed, hot_tokens)
    num_turns = num_replicas * given.turns
    with looking_at_all():
        best = _served(num_replicas, 1, rate, num_turns, given.seed, hot_tokens)
    figures: dict[str, Any] = {"turns_per_s": round(rate, 1), "perfect": best}
    for number in given.ingresses:
        found = _served(num_replicas, number, rate, num_turns, given.seed, hot_tokens)
        found |= {
            f"{name}_over_perfect": round(found[name] / best[name], 3) for name in ("ttft_mean_ms", "ttft_p99_ms")
        }
        figures[f"{number} ingresses"] = found
        tell(f"{num_replicas} replicas, {number} ingresses: {found}")
    return figures


@contextmanager
def looking_at_all() -> Iterator[None]:
    """Every replica of a large fleet is a candidate for each request."""
    usual = replica_registry.SMALL_FLEET
    replica_registry.SMALL_FLEET = sys.maxsize
    try:
        yield
    finally:
        replica_registry.SMALL_FLEET = usual


def _turns_per_s(seed: int, hot_tokens: int = 0) -> float:
    """What one replica can compute: of four that always have work."""
    num_replicas, num_turns = 4, 800
    trace = _conversations(num_turns, 1e6 * prefixes.MEAN_TURNS, seed, hot_tokens)
    run = FleetSimulation(**_fleet_fields(num_replicas, 1, seed)).run(trace)
    return num_turns / run.seconds / num_replicas


def _served(
    num_replicas: int, num_ingresses: int, rate: float, num_turns: int, seed: int, hot_tokens: int
) -> dict[str, float]:
    fleet = FleetSimulation(**_fleet_fields(num_replicas, num_ingresses, seed))
    began = time.perf_counter()
    run = fleet.run(_conversations(num_turns, rate, seed, hot_tokens))
    stats = [engine.stats() for engine in fleet.engines]
    times = run.per_request_s("ttft") * 1e3
    computed = [s.total_prompt_tokens - s.total_cached_tokens + s.total_generated_tokens for s in stats]
    return {
        "ttft_mean_ms": round(float(times.mean()), 2),
        "ttft_p99_ms": round(float(np.percentile(times, 99)), 2),
        "refused": run.num_refused,
        "found": round(sum(s.total_cached_tokens for s in stats) / sum(s.total_prompt_tokens for s in stats), 4),
        "busiest_over_mean": round(max(computed) * num_replicas / sum(computed), 2),
        "computed_in_s": round(time.perf_counter() - began, 1),
    }


def _conversations(num_turns: int, rate: float, seed: int, hot_tokens: int = 0) -> Trace:
    """`rate`: turns in a second."""
    rng = random.Random(seed)
    return prefixes.conversations(num_turns, rate / prefixes.MEAN_TURNS, rng, seed, hot_tokens=hot_tokens)


def _fleet_fields(num_replicas: int, num_ingresses: int, seed: int) -> dict[str, Any]:
    return {
        "replicas": [prefixes.MEASURED] * num_replicas,
        "scheduler": SchedulerConfig(max_running=32, max_waiting=1_000_000),
        "cache": prefixes.CACHE, "dispatch": _DISPATCH, "num_ingresses": num_ingresses, "seed": seed,
    }  # fmt: skip


# ---------------------------------------------------------------------- a new ingress


class _Arrival(NamedTuple):
    at_s: float
    is_through_new: bool
    expected_cached: int  # tokens of the prompt
    num_prompt_tokens: int


class _GrowingFleet(FleetSimulation):
    """One more ingress starts after so many requests, and gets its part of the others."""

    def __init__(self, *, grows_at: int, **more: Any) -> None:
        super().__init__(**more)
        self._grows_at = grows_at
        self.grown_at_s = 0.0
        self.arrivals: list[_Arrival] = []

    def _arrive(self, traced: TracedRequest, at_s: float) -> None:
        if self._run.num_requests == self._grows_at:
            self._grow(at_s)
        super()._arrive(traced, at_s)
        registry = self._registry_of[-1]
        assert registry.last_decision is not None, "no replica refuses"
        cached = registry.last_decision.candidates[0].num_cached_tokens
        is_through_new = bool(self.grown_at_s) and registry is self._registries[-1]
        self.arrivals.append(_Arrival(at_s, is_through_new, cached, traced.num_prompt_tokens))

    def _grow(self, at_s: float) -> None:
        self.grown_at_s = self._now = at_s
        policy = make_policy(_DISPATCH, random.Random(len(self._registries)))
        clock = self._registries[0]._clock
        new = ReplicaRegistry(policy, GroupChooser(()), block_size=prefixes.CACHE.block_size, clock=clock)
        new.set_replicas(list(self._replicas))
        self._registries.append(new)
        for each in self._replicas.values():
            each.note_in(self._registries)


def newcomer_figures(num_replicas: int, given: argparse.Namespace) -> dict[str, Any]:
    """By seconds since the new ingress has started."""
    rate, num_turns = given.load * num_replicas * _turns_per_s(given.seed), num_replicas * given.turns
    fleet = _GrowingFleet(grows_at=num_turns // 2, **_fleet_fields(num_replicas, given.ingresses[0], given.seed))
    run = fleet.run(_conversations(num_turns, rate, given.seed))
    times = run.per_request_s("ttft") * 1e3
    figures: dict[str, Any] = {}
    for begin, end in pairwise(_SINCE_S):
        of_all = [
            (each, float(ms))
            for each, ms in zip(fleet.arrivals, times, strict=True)
            if begin <= each.at_s - fleet.grown_at_s < end
        ]
        figures[f"{begin} to {end} s"] = {
            name: _of_some([each for each in of_all if each[0].is_through_new == is_new])
            for name, is_new in (("new", True), ("others", False))
        }
        tell(f"{num_replicas} replicas, {begin} to {end} s after the start: {figures[f'{begin} to {end} s']}")
    return figures


def _of_some(arrivals: Sequence[tuple[_Arrival, float]]) -> dict[str, float]:
    if not arrivals:
        return {"requests": 0}
    times = np.array([ms for _, ms in arrivals])
    prompts = sum(each.num_prompt_tokens for each, _ in arrivals)
    return {
        "requests": len(arrivals),
        "ttft_mean_ms": round(float(times.mean()), 1),
        "ttft_p99_ms": round(float(np.percentile(times, 99)), 1),
        "expected_cached": round(sum(each.expected_cached for each, _ in arrivals) / prompts, 3),
    }
