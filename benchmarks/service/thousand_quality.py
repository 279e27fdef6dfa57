"""Measures dispatch in a large fleet in simulated time: the parts quality, newcomer, hot and adapters of `thousand`."""

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
from functools import cache, partial
from itertools import pairwise, takewhile
from math import exp, inf
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from app.config import SchedulerConfig
from app.engine.adapter_store import HeldAdapter
from app.engine.request import Adapter, Request
from app.fleet import ReplicaRegistry, replica_registry
from app.fleet.dispatch import GroupChooser, ReplicaReport, make_policy
from benchmarks.harness.command import tell
from benchmarks.service import prefixes
from deployments.plan.simulation import Control, FleetSimulation
from deployments.plan.traces import Trace, TracedRequest

HOT_TOKENS = 1_000
# Made-up values: adapters in all, adapters loaded by one replica at most, and seconds of one load.
NUM_ADAPTERS, MAX_LOADED, ADAPTER_LOAD_S = 200, 8, 0.3
_DISPATCH = "prefix_affinity"
_SINCE_S = (0, 1, 2, 5, 10, 1_000)  # bounds of intervals after the start of an ingress
_TURN_S = 7.0  # approximate time between two turns of a conversation: a pause of 5 s and the answer


def quality_figures(num_replicas: int, given: argparse.Namespace, *, hot_tokens: int = 0) -> dict[str, Any]:
    """Compare each number of ingresses with a perfect dispatcher. `hot_tokens`: see `prefixes.conversations`."""
    load = Load.of(num_replicas, given, hot_tokens)
    with looking_at_all():
        best = _served(load, num_replicas, 1, given.seed)
    figures: dict[str, Any] = {"turns_per_s": round(load.turns_per_s, 1), "perfect": best}
    tell(f"{num_replicas} replicas, perfect: {best}")
    for number in given.ingresses:
        found = _served(load, num_replicas, number, given.seed)
        found |= {
            f"{name}_over_perfect": round(found[name] / best[name], 3) for name in ("ttft_mean_ms", "ttft_p99_ms")
        }
        figures[f"{number} ingresses"] = found
        tell(f"{num_replicas} replicas, {number} ingresses: {found}")
    return figures


@contextmanager
def looking_at_all() -> Iterator[None]:
    """Make every replica of a large fleet a candidate for each request."""
    usual = replica_registry.SMALL_FLEET
    replica_registry.SMALL_FLEET = sys.maxsize
    try:
        yield
    finally:
        replica_registry.SMALL_FLEET = usual


@dataclass(frozen=True, slots=True)
class Load:
    """Conversations with a constant mean rate of turns from the first second to the last."""

    turns_per_s: float
    seconds: float
    conversations: Trace

    @classmethod
    def of(cls, num_replicas: int, given: argparse.Namespace, hot_tokens: int = 0) -> Load:
        """Return a load of `given.load` times the rate that `num_replicas` replicas can compute."""
        rate, seconds = given.load * num_replicas * _turns_per_s(given.seed, hot_tokens), given.seconds
        begins_s = list(takewhile(lambda at_s: at_s < seconds, _begins_s(rate, random.Random(given.seed))))
        # More turns than these conversations need on average: many conversations may be short.
        num_turns = round(1.2 * prefixes.MEAN_TURNS * len(begins_s)) + 100
        trace = prefixes.conversations(num_turns, 1.0, random.Random(given.seed), given.seed, hot_tokens=hot_tokens)
        pairs = zip(trace.requests, begins_s, strict=False)
        return cls(rate, seconds, Trace(trace.name, tuple(replace(each, arrival_s=at_s) for each, at_s in pairs)))


def _begins_s(turns_per_s: float, rng: random.Random) -> Iterator[float]:
    """Yield the times at which conversations begin.

    In the beginning all turns are first turns, so conversations begin at the rate of turns. The rate falls as running
    conversations add turns, one every `_TURN_S`.
    """
    at_s, part = 0.0, 1 / prefixes.MEAN_TURNS
    while True:
        at_s += rng.expovariate(turns_per_s * (part + (1 - part) * exp(-at_s / _TURN_S)))
        yield at_s


@cache
def _turns_per_s(seed: int, hot_tokens: int = 0) -> float:
    """Return the turns a second that one replica can compute, the mean of four replicas whose slots are always full."""
    num_replicas, num_turns = 4, 2_400
    trace = prefixes.conversations(num_turns, 1e6, random.Random(seed), seed, hot_tokens=hot_tokens, mean_pause_s=1e-6)
    run = FleetSimulation(**fleet_fields(num_replicas, 1, seed)).run(trace)
    # Leave out the first quarter, when nothing is cached, and the last, when slots are empty.
    first, last = np.percentile(run.last_tokens_s, (25, 75))
    return num_turns / 2 / float(last - first) / num_replicas


class CutFleet(FleetSimulation):
    """A fleet that receives no request after `until_s` seconds."""

    def __init__(self, *, until_s: float, **more: Any) -> None:
        super().__init__(**more)
        self._until_s = until_s

    def _expect(self, traced: TracedRequest, *, is_first: bool, after_s: float = 0.0) -> None:
        if after_s + traced.arrival_s < self._until_s:
            super()._expect(traced, is_first=is_first, after_s=after_s)


def _served(load: Load, num_replicas: int, num_ingresses: int, seed: int) -> dict[str, float]:
    """Return the figures of requests after the first third of the time, in which replicas fill their caches."""
    fleet = CutFleet(until_s=load.seconds, **fleet_fields(num_replicas, num_ingresses, seed))
    began, begins_s = time.process_time(), load.seconds / 3
    looks: list[NDArray[np.int64]] = []
    control = Control(lambda at_s: looks.append(_counted(fleet)), every_s=begins_s)
    run = fleet.run(load.conversations, control)
    is_later = np.asarray(run.arrivals_s) >= begins_s
    times, gaps = run.per_request_s("ttft") * 1e3, run.per_request_s("itl") * 1e3
    prompts, cached, computed = looks[3] - looks[1]
    return {
        "turns_per_s": round(float(is_later.sum()) / (load.seconds - begins_s), 1),
        "ttft_mean_ms": round(float(times[is_later].mean()), 2),
        "ttft_p99_ms": round(float(np.percentile(times[is_later], 99)), 2),
        "itl_mean_ms": round(float(gaps[is_later].mean()), 2),
        "refused": run.num_refused,
        "found": round(float(cached.sum() / prompts.sum()), 4),
        "busiest_over_mean": round(float(computed.max() / computed.mean()), 2),
        "idlest_over_mean": round(float(computed.min() / computed.mean()), 2),
        "computed_in_s": round(time.process_time() - began, 1),
    }


def _counted(fleet: FleetSimulation) -> NDArray[np.int64]:
    """Return prompt tokens, cached prompt tokens and computed tokens until now: [3, num_replicas]."""
    stats = [engine.stats() for engine in fleet.engines]
    prompts, cached = ([getattr(s, f"total_{name}_tokens") for s in stats] for name in ("prompt", "cached"))
    computed = [s.total_prompt_tokens - s.total_cached_tokens + s.total_generated_tokens for s in stats]
    return np.array([prompts, cached, computed], dtype=np.int64)


def fleet_fields(num_replicas: int, num_ingresses: int, seed: int) -> dict[str, Any]:
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


class _GrowingFleet(CutFleet):
    """A fleet where one more ingress starts after `grows_at` requests and gets its share of the later requests."""

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
    """Return the figures by seconds since the start of the new ingress."""
    load = Load.of(num_replicas, given)
    grows_at = round(load.turns_per_s * load.seconds / 2)
    of_fleet = fleet_fields(num_replicas, given.ingresses[0], given.seed)
    fleet = _GrowingFleet(grows_at=grows_at, until_s=load.seconds, **of_fleet)
    run = fleet.run(load.conversations)
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
    """The adapters of one replica. They are loaded one at a time; the least recently used idle one is evicted."""

    loaded_at: dict[str, float] = field(default_factory=dict)  # by digest, the least recently used first
    running: Counter[str] = field(default_factory=Counter)
    busy_until: float = 0.0

    def use(self, digest: str, now: float) -> float:
        """Use an adapter, loading it if needed, and return when it is ready. It stays loaded until the request ends."""
        at = self.loaded_at.pop(digest, None)
        if at is None:
            at = self.busy_until = max(now, self.busy_until) + ADAPTER_LOAD_S
            idle = [each for each in self.loaded_at if not self.running[each]]
            if len(self.loaded_at) >= MAX_LOADED and idle:
                del self.loaded_at[idle[0]]
        self.loaded_at[digest] = at
        self.running[digest] += 1
        return at


class _AdaptedFleet(CutFleet):
    """A fleet of replicas that load adapters and report the loaded ones."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._adapters = {each: _Adapters() for each in self._replicas}
        self.num_loads = self.num_found = 0
        for registry in self._registries:
            setattr(registry, "note", self._with_adapters(registry.note))  # noqa: B010
        for each in self._replicas.values():
            setattr(each, "enter", self._entered(each))  # noqa: B010
            each.note_in(self._registries, to_all=True)

    def _with_adapters(self, note: Callable[..., None]) -> Callable[..., None]:
        def noted(replica_id: str, report: ReplicaReport, *prefixes: Any) -> None:
            loaded = self._adapters[replica_id].loaded_at.items()
            there = tuple(digest for digest, at in loaded if at <= self._now)
            note(replica_id, msgspec.structs.replace(report, adapters=there), *prefixes)

        return noted

    def _entered(self, replica: Any) -> Callable[[], None]:
        """Return the `enter` of a replica, changed so that each request holds its adapter until it ends."""

        def entered() -> None:
            running = self._adapters[replica.replica_id].running
            for request, arrived_at in replica.entering:
                digest = request.adapter.digest
                release = partial(running.subtract, (digest,))
                replica.engine.add_checked(request, arrived_at=arrived_at, adapter=HeldAdapter(None, release))
            replica.entering.clear()

        return entered

    def _enter(self, replica: Any, request: Request) -> None:
        assert request.adapter is not None, "each conversation has an adapter"
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
    """A request that waits for the load of its adapter."""

    replica: Any
    request: Request


def adapter_figures(num_replicas: int, given: argparse.Namespace) -> dict[str, Any]:
    """Compare conversations with and without adapters, by the number of ingresses."""
    load = Load.of(num_replicas, given)
    figures: dict[str, Any] = {}
    for number in given.ingresses:
        of_fleet: dict[str, Any] = {"until_s": load.seconds, **fleet_fields(num_replicas, number, given.seed)}
        without = CutFleet(**of_fleet).run(load.conversations).per_request_s("ttft") * 1e3
        fleet = _AdaptedFleet(**of_fleet)
        run = fleet.run(_adapted(load.conversations, random.Random(given.seed)))
        times = run.per_request_s("ttft") * 1e3
        found = figures[f"{number} ingresses"] = {
            "loads_per_s": round(fleet.num_loads / run.seconds, 2),
            "found_loaded": round(fleet.num_found / run.num_requests, 4),
            "ttft_mean_ms": round(float(times.mean()), 1),
            "ttft_p99_ms": round(float(np.percentile(times, 99)), 1),
            "ttft_mean_over_without": round(float(times.mean() / without.mean()), 2),
            "ttft_p99_over_without": round(float(np.percentile(times, 99) / np.percentile(without, 99)), 2),
        }
        tell(f"{num_replicas} replicas, {number} ingresses, {NUM_ADAPTERS} adapters: {found}")
    return figures


def _adapted(trace: Trace, rng: random.Random) -> Trace:
    """Give each conversation an adapter; the n-th adapter is requested 1/n as often as the first."""
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
