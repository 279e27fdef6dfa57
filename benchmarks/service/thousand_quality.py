"""How well a large fleet is used, in simulated time: four parts of `thousand`."""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import msgspec
import numpy as np

from app.config import SchedulerConfig
from app.engine.adapter_store import HeldAdapter
from app.engine.request import Adapter, Request
from app.fleet import ReplicaRegistry, replica_registry
from app.fleet.dispatch import GroupChooser, ReplicaReport, make_policy
from benchmarks.harness.command import tell
from benchmarks.service import prefixes
from deployments.plan.simulation import FleetSimulation
from deployments.plan.traces import Trace, TracedRequest

HOT_TOKENS = 1_000
# Made up: so many loaded by one replica, and the seconds that one load takes.
NUM_ADAPTERS, MAX_LOADED, ADAPTER_LOAD_S = 200, 8, 0.3
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


# ---------------------------------------------------------------------- adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapted(TracedRequest):
    """A request with an adapter."""

    adapter: Adapter

    def request(self, number: int) -> Request:
        return replace(TracedRequest.request(self, number), adapter=self.adapter)


@dataclass(slots=True)
class _Adapters:
    """Those that one replica has loaded. They are loaded one at a time, and the longest unused makes room."""

    loaded_at: dict[str, float] = field(default_factory=dict)  # by digest, the longest unused first
    running: Counter[str] = field(default_factory=Counter)
    busy_until: float = 0.0

    def use(self, digest: str, now: float) -> float:
        """When the adapter is there. It stays until the request that uses it has ended."""
        at = self.loaded_at.pop(digest, None)
        if at is None:
            at = self.busy_until = max(now, self.busy_until) + ADAPTER_LOAD_S
            idle = [each for each in self.loaded_at if not self.running[each]]
            if len(self.loaded_at) >= MAX_LOADED and idle:
                del self.loaded_at[idle[0]]
        self.loaded_at[digest] = at
        self.running[digest] += 1
        return at


class _AdaptedFleet(FleetSimulation):
    """Replicas that load adapters, and report which they have."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._adapters = {each: _Adapters() for each in self._replicas}
        self.num_loads = self.num_found = 0
        for registry in self._registries:
            setattr(registry, "note", self._with_adapters(registry.note))  # noqa: B010
        for each in self._replicas.values():
            setattr(each, "enter", self._entered(each))  # noqa: B010
            each.note_in(self._registries)

    def _with_adapters(self, note: Callable[..., None]) -> Callable[..., None]:
        def noted(replica_id: str, report: ReplicaReport, *prefixes: Any) -> None:
            loaded = self._adapters[replica_id].loaded_at.items()
            there = tuple(digest for digest, at in loaded if at <= self._now)
            note(replica_id, msgspec.structs.replace(report, adapters=there), *prefixes)

        return noted

    def _entered(self, replica: Any) -> Callable[[], None]:
        """As the replica does, and each request holds its adapter until its end."""

        def entered() -> None:
            running = self._adapters[replica.replica_id].running
            for request, arrived_at in replica.entering:
                digest = request.adapter.digest
                release = partial(running.subtract, (digest,))
                replica.engine.add_checked(request, arrived_at=arrived_at, adapter=HeldAdapter(None, release))
            replica.entering.clear()

        return entered

    def _enter(self, replica: Any, request: Request) -> None:
        assert request.adapter is not None, "each conversation has one"
        adapters, digest = self._adapters[replica.replica_id], request.adapter.digest
        is_there = adapters.loaded_at.get(digest, inf) <= self._now
        self.num_found += is_there
        self.num_loads += digest not in adapters.loaded_at
        ready_at = adapters.use(digest, self._now)
        if is_there:
            super()._enter(replica, request)
        else:
            entering: Any = _Entering(replica, request)
            heapq.heappush(self._arrivals, (ready_at, next(self._numbers), entering, False))

    def _arrive(self, traced: TracedRequest | _Entering, at_s: float) -> None:
        if isinstance(traced, _Entering):
            self._now = at_s
            super()._enter(traced.replica, traced.request)
        else:
            super()._arrive(traced, at_s)


@dataclass(frozen=True, slots=True)
class _Entering:
    """A request whose adapter is loaded now."""

    replica: Any
    request: Request


def adapter_figures(num_replicas: int, given: argparse.Namespace) -> dict[str, Any]:
    """Over the same conversations without adapters, by the number of ingresses."""
    rate, num_turns = given.load * num_replicas * _turns_per_s(given.seed), num_replicas * given.turns
    figures: dict[str, Any] = {}
    for number in given.ingresses:
        of_fleet = _fleet_fields(num_replicas, number, given.seed)
        trace = _conversations(num_turns, rate, given.seed)
        without = FleetSimulation(**of_fleet).run(trace).per_request_s("ttft") * 1e3
        fleet = _AdaptedFleet(**of_fleet)
        run = fleet.run(_adapted(trace, random.Random(given.seed)))
        times = run.per_request_s("ttft") * 1e3
        found = figures[f"{number} ingresses"] = {
            "loads_per_s": round(fleet.num_loads / run.seconds, 2),
            "found_loaded": round(fleet.num_found / num_turns, 4),
            "ttft_mean_ms": round(float(times.mean()), 1),
            "ttft_p99_ms": round(float(np.percentile(times, 99)), 1),
            "ttft_mean_over_without": round(float(times.mean() / without.mean()), 2),
            "ttft_p99_over_without": round(float(np.percentile(times, 99) / np.percentile(without, 99)), 2),
        }
        tell(f"{num_replicas} replicas, {number} ingresses, {NUM_ADAPTERS} adapters: {found}")
    return figures


def _adapted(trace: Trace, rng: random.Random) -> Trace:
    """Each conversation has an adapter; the n-th is asked for 1/n as often as the first."""
    adapters = [Adapter(name=f"adapter-{number}", path="", digest=f"{number}") for number in range(NUM_ADAPTERS)]
    weights = [1 / (number + 1) for number in range(NUM_ADAPTERS)]
    firsts = [_with_adapter(each, rng.choices(adapters, weights)[0]) for each in trace.requests]
    return Trace(trace.name, tuple(firsts))


def _with_adapter(traced: TracedRequest, adapter: Adapter) -> _Adapted:
    turns: list[TracedRequest] = []
    turn: TracedRequest | None = traced
    while turn is not None:
        turns.append(turn)
        turn = turn.next_turn
    linked: _Adapted | None = None
    for each in reversed(turns):
        values = {name.name: getattr(each, name.name) for name in fields(TracedRequest)}
        linked = _Adapted(**values | {"next_turn": linked}, adapter=adapter)
    assert linked is not None, "a conversation has a turn"
    return linked
