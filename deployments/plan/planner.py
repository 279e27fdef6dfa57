"""Finds the settings and the fewest replicas that meet an SLO on a trace, by simulating the trace."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, get_args

import numpy as np
from pydantic import ValidationError

from app.config import CacheConfig, SchedulerConfig, StrategyConfig, choice_of
from app.errors import InvalidSetup
from deployments.plan.simulated_run import SimulatedRun
from deployments.plan.simulation import simulate
from deployments.plan.step_cost import MeasuredReplica
from deployments.plan.traces import Trace

# Settings are compared on this many requests, and the number of replicas is determined on the whole trace.
_NUM_COMPARED = 400
# In a larger fleet, only this many replicas are simulated, with a random share of the requests, so that a run takes at
# most a minute or two. In the real fleet, requests wait a little less, because there are more replicas to choose from.
_MIN_SIMULATED, _MAX_SIMULATED = 8, 32
_PRECISION = 0.03  # relative precision of the highest rate within the SLO
_FACTORS = (0.25, 0.5, 2, 4)  # multiples of the configured limits that are tried
# The policies that the search may choose. Any other configured policy is kept, because it was not chosen for speed.
_POLICIES = ("fcfs", "sjf")


class Target(NamedTuple):
    """A limit for a percentile of the TTFT, the ITL, or the latency of whole requests."""

    metric: str  # ttft, itl or latency
    percent: float
    limit_s: float

    def __str__(self) -> str:
        return f"{self.name}={in_words(self.limit_s)}"

    @property
    def name(self) -> str:
        return f"{self.metric}_p{f'{self.percent:g}'.replace('.', '')}"


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """A service level objective (SLO). It is met if all its targets are met."""

    targets: tuple[Target, ...]

    @classmethod
    def parse(cls, text: str) -> ServiceLevel:
        """Parse a text such as `ttft_p99=1s,itl_p99=100ms`. Raises InvalidSetup, which explains the format."""
        targets = []
        for part in text.split(","):
            found = re.fullmatch(r"\s*(ttft|itl|latency)_p(\d{2,3})\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*", part)
            if found is None or float(found[3]) == 0:
                raise InvalidSetup(
                    f"--slo: got {part.strip()!r}; must be like ttft_p99=1s,itl_p99=100ms: ttft, itl (between tokens) "
                    f"or latency (of whole requests), a percentile (p50, p95, p99, p999), and a time above 0 in s or ms"
                )
            percent = float(f"{found[2][:2]}.{found[2][2:] or 0}")
            targets.append(Target(found[1], percent, float(found[3]) * {"s": 1.0, "ms": 0.001}[found[4]]))
        return cls(tuple(targets))

    def is_met(self, run: SimulatedRun) -> bool:
        return all(run.percentile_s(each.metric, each.percent) <= each.limit_s for each in self.targets)

    def reached(self, run: SimulatedRun) -> str:
        """Return a readable list of the percentiles that a run reaches for all targets."""
        return ", ".join(
            f"{each.name}={in_words(run.percentile_s(each.metric, each.percent))}" for each in self.targets
        )

    def num_good(self, run: SimulatedRun) -> int:
        """Return the number of requests within all limits. For `itl`, a request's mean gap counts."""
        is_good = np.ones(int(run.is_served.sum()), dtype=bool)
        for target in self.targets:
            is_good &= run.per_request_s(target.metric) <= target.limit_s
        return int(is_good.sum())

    def good_per_s(self, run: SimulatedRun) -> float:
        """Return the whole fleet's goodput in requests per second."""
        return self.num_good(run) / run.seconds / run.share

    def __str__(self) -> str:
        return ",".join(map(str, self.targets))


def in_words(seconds: float) -> str:
    """Format a duration in seconds or milliseconds."""
    if math.isinf(seconds):
        return "never"
    return f"{seconds:.3g}s" if seconds >= 1 else f"{seconds * 1000:.3g}ms"


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """A simulated run of the planned fleet at a given load."""

    load: float  # as a fraction of the fleet's capacity
    rate: float  # requests that arrive per second
    run: SimulatedRun

    @property
    def power(self) -> float:
        """Kleinrock's power: requests per second, divided by their mean latency. It is highest at the knee."""
        served = self.run.per_request_s("latency")
        return self.run.requests_per_s / float(served.mean()) if len(served) else 0.0


@dataclass(frozen=True, slots=True)
class Split:
    """An alternative in which some of the planned replicas are prefill replicas, and its simulated run."""

    num_prefill: int
    run: SimulatedRun

    def pays(self, level: ServiceLevel, together: SimulatedRun) -> bool:
        """Return whether it meets the SLO, with at most 90% of `together`'s ITL p99 and at least 98% of its rate."""
        is_shorter = self.run.percentile_s("itl", 99) <= 0.9 * together.percentile_s("itl", 99)
        return level.is_met(self.run) and is_shorter and self.run.requests_per_s >= 0.98 * together.requests_per_s


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The best settings and number of replicas, with the simulated results."""

    scheduler: SchedulerConfig
    num_replicas: int
    rate_per_replica: float  # requests per second that a replica serves within the SLO
    full_rate_per_replica: float  # requests per second of a replica whose queue is never empty
    run: SimulatedRun  # of the trace
    curve: Sequence[LoadPoint]
    splits: Sequence[Split] = ()

    @cached_property
    def knee(self) -> LoadPoint:
        return max(self.curve, key=lambda point: point.power)

    @property
    def output_tokens_per_s(self) -> float:
        return self.run.output_tokens_per_s

    def cost_per_million_tokens(self, cost_per_hour: float) -> float:
        """Return the cost of a million output tokens on this trace. `cost_per_hour` is the price of one replica."""
        return cost_per_hour * self.num_replicas / 3600 / self.output_tokens_per_s * 1e6


class Planner:
    def __init__(
        self, trace: Trace, level: ServiceLevel, measured: MeasuredReplica, scheduler: SchedulerConfig,
        cache: CacheConfig, *, dispatch: str,
    ) -> None:  # fmt: skip
        self._trace = trace
        self._level = level
        self._measured = measured
        self._configured = scheduler
        self._cache = cache
        self._dispatch = dispatch
        self._sample = trace.first(_NUM_COMPARED)
        self._full_rates: dict[str, float] = {}  # by `SchedulerConfig.version`

    def plan(self) -> Plan:
        """Return the best settings, and the fewest replicas with which they meet the SLO. Takes minutes.

        Raises InvalidSetup if no settings meet the SLO. The message includes the best result.
        """
        scheduler, rate = self._best_settings()
        num_replicas, run = self._fewest_replicas(scheduler, rate)
        full_rate = self._full_rate(scheduler)
        loads = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.3)  # in the table, as fractions of the fleet's capacity
        curve = [self._at_load(scheduler, num_replicas, load, full_rate * num_replicas) for load in loads]
        return Plan(
            scheduler=scheduler, num_replicas=num_replicas, rate_per_replica=rate, full_rate_per_replica=full_rate,
            run=run, curve=curve, splits=self._splits(scheduler, num_replicas),
        )  # fmt: skip

    def _splits(self, scheduler: SchedulerConfig, num_replicas: int) -> list[Split]:
        """Simulate the fleet with a few numbers of prefill replicas. Empty if replicas cannot fetch KV memory."""
        if not self._measured.kv_bytes:
            return []
        numbers = {max(1, num_replicas // 4), num_replicas // 2, num_replicas - max(1, num_replicas // 4)}
        return [
            Split(number, self._simulated(self._trace, scheduler, num_replicas, number))
            for number in sorted(numbers)
            if 0 < number < num_replicas
        ]

    # -- settings

    def _best_settings(self) -> tuple[SchedulerConfig, float]:
        """Optimize one setting after another for the highest rate within the SLO. Also returns this rate."""
        best, best_rate = self._configured, self._highest_rate(self._configured, above=0.0)
        min_gain = 1.02  # a smaller gain is not worth a change
        for change in (_other_limits, _other_strategies, _other_policies):
            for candidate in change(best):
                rate = self._highest_rate(candidate, above=best_rate * min_gain)
                if rate > best_rate:
                    best, best_rate = candidate, rate
        if not best_rate:
            raise InvalidSetup(self._why_not())
        return best, best_rate

    def _highest_rate(self, scheduler: SchedulerConfig, *, above: float) -> float:
        """Return the requests per second that a replica serves within the SLO, or 0 if there are fewer than `above`."""
        full = self._full_rate(scheduler)
        low = above or full * _PRECISION
        if low > full or not self._holds(scheduler, low):
            return 0.0
        high = full
        while high - low > _PRECISION * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self._holds(scheduler, middle) else (low, middle)
        return low

    def _holds(self, scheduler: SchedulerConfig, rate: float) -> bool:
        return self._level.is_met(self._simulated(self._sample.at_rate(rate), scheduler))

    def _full_rate(self, scheduler: SchedulerConfig) -> float:
        if scheduler.version not in self._full_rates:
            found = full_rate(self._trace, self._measured, scheduler, self._cache)
            self._full_rates[scheduler.version] = found
        return self._full_rates[scheduler.version]

    def _why_not(self) -> str:
        alone = self._sample.at_rate(self._full_rate(self._configured) * _PRECISION)
        run = self._simulated(alone, self._configured)
        return (
            f"no settings meet --slo {self._level}: even a nearly idle replica ({alone.rate:.3g} requests/s) only "
            f"reaches {self._level.reached(run)}. Raise the limits, or use a faster machine or a smaller model"
        )

    # -- replicas

    def _fewest_replicas(self, scheduler: SchedulerConfig, rate: float) -> tuple[int, SimulatedRun]:
        max_replicas = 1024  # the limit of `replicas.num_replicas`
        guess = min(max_replicas, max(1, math.ceil(self._trace.rate / rate))) if self._trace.seconds else 1
        low, high = 0, guess  # `low` is always too few
        run = self.fleet(scheduler, high)
        while not self._level.is_met(run):
            if high == max_replicas:
                raise InvalidSetup(
                    f"{high:,} replicas do not meet --slo {self._level}: they reach {self._level.reached(run)}; one "
                    f"replica serves {rate:.3g} requests/s within the SLO, but the trace has bursts"
                )
            low, high = high, min(max_replicas, high + max(1, high // 4))
            run = self.fleet(scheduler, high)
        while high - low > 1:
            middle = max(low + 1, high - max(1, (high - low) // 4))
            found = self.fleet(scheduler, middle)
            if self._level.is_met(found):
                high, run = middle, found
            else:
                low = middle
        return high, run

    def fleet(self, scheduler: SchedulerConfig, num_replicas: int) -> SimulatedRun:
        """Simulate the whole trace on `num_replicas` replicas."""
        return self._simulated(self._trace, scheduler, num_replicas)

    def _at_load(self, scheduler: SchedulerConfig, num_replicas: int, load: float, full_rate: float) -> LoadPoint:
        num_in_curve = 1000  # requests per replica, for each load in the table
        trace, rate = self._trace.first(num_in_curve * num_replicas), load * full_rate
        return LoadPoint(load, rate, self._simulated(trace.at_rate(rate), scheduler, num_replicas))

    def _simulated(
        self, trace: Trace, scheduler: SchedulerConfig, num_replicas: int = 1, num_prefill: int | None = None
    ) -> SimulatedRun:
        num_simulated_requests = 100_000
        max_replicas = num_simulated_requests * num_replicas // len(trace.requests)
        return simulate(
            trace, self._measured, scheduler, self._cache, num_replicas=num_replicas, dispatch=self._dispatch,
            max_replicas=min(max(max_replicas, _MIN_SIMULATED), _MAX_SIMULATED), num_prefill=num_prefill,
        )  # fmt: skip


def full_rate(trace: Trace, measured: MeasuredReplica, scheduler: SchedulerConfig, cache: CacheConfig) -> float:
    """Return the requests per second that a replica serves if its queue is never empty."""
    all_wait = 1_000_000  # a `max_waiting` with which no request is refused
    patient = scheduler.model_copy(update={"max_waiting": all_wait})
    run = simulate(trace.first(_NUM_COMPARED).at_rate(math.inf), measured, patient, cache)
    return run.num_requests / run.seconds


def limits_to_measure(scheduler: SchedulerConfig) -> list[SchedulerConfig]:
    """Return settings whose measured steps cover the steps of all settings that the search will try."""
    tried = [scheduler, *_other_limits(scheduler)]
    few = [_changed(scheduler, max_running=number) for number in (1, 2, 4) if number < scheduler.max_running // 4]
    return [*tried, *filter(None, few)]


def _other_limits(scheduler: SchedulerConfig) -> Iterator[SchedulerConfig]:
    for name in ("max_running", "max_step_tokens", "prefill_chunk_tokens"):
        for factor in _FACTORS:
            changed = _changed(scheduler, **{name: max(1, int(getattr(scheduler, name) * factor))})
            if changed is not None:
                yield changed


def _other_strategies(scheduler: SchedulerConfig) -> Iterator[SchedulerConfig]:
    for name in map(choice_of, get_args(StrategyConfig)):
        if name != scheduler.strategy.name:
            changed = _changed(scheduler, strategy=name)
            if changed is not None:
                yield changed


def _other_policies(scheduler: SchedulerConfig) -> Iterator[SchedulerConfig]:
    if scheduler.policy.name in _POLICIES:
        for name in _POLICIES:
            changed = _changed(scheduler, policy=name)
            if changed is not None and name != scheduler.policy.name:
                yield changed


def _changed(scheduler: SchedulerConfig, **changes: object) -> SchedulerConfig | None:
    """Return changed settings, or None if they contradict each other."""
    try:
        return SchedulerConfig.model_validate(scheduler.model_dump() | changes)
    except ValidationError:
        return None
