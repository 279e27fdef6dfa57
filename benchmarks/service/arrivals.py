"""Arrival times: Poisson, bursts, or the times of the workload. One seed gives one pattern, scaled by the rate."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.workload import TimedRequest, Workload

_FORMS = "write poisson, poisson:RATE, burst:N, burst:N@RATE or trace (RATE in requests a second)"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process. `rate` is the mean in requests a second; None takes the rate given to `arrange`."""

    kind: Literal["poisson", "burst", "trace"]
    rate: float | None = None
    burst_size: int = 1

    @classmethod
    def parse(cls, text: str) -> Arrivals:
        """Parse `poisson:8`, `burst:64@8` or `trace`. Raises BenchmarkError with the valid forms otherwise."""
        kind, _, rest = text.partition(":")
        if kind == "poisson":
            return cls("poisson", _rate(rest, text) if rest else None)
        if kind == "burst":
            size, at, rate = rest.partition("@")
            if not size.isdecimal() or int(size) < 1:
                raise BenchmarkError(f"--arrival {text}: a burst has at least one request; {_FORMS}")
            return cls("burst", _rate(rate, text) if at else None, int(size))
        if text == "trace":
            return cls("trace")
        raise BenchmarkError(f"--arrival {text}: {_FORMS}")

    def needs_rate(self, workload: Workload) -> bool:
        """Whether `arrange` needs a rate: a trace does not, nor does one burst that holds all requests."""
        if self.rate is not None or self.kind == "trace":
            return False
        return self.kind == "poisson" or self.burst_size < len(workload.requests)

    def arrange(self, workload: Workload, *, rate: float | None, load: float = 1.0, seed: int = 0) -> Workload:
        """Return the requests in their order with new times, at `load` × the rate; a trace plays `load` times as fast.

        `rate`, in requests a second, is used if the arrivals have no rate of their own.
        """
        if self.kind == "trace":
            return _at(workload, (timed.arrival_s / load for timed in workload.requests))
        own_rate = rate if self.rate is None else self.rate
        if own_rate is None:
            assert not self.needs_rate(workload), "arrivals without a rate"
            return _at(workload, (0.0 for _ in workload.requests))
        if self.kind == "poisson":
            return _at(workload, poisson(own_rate * load, seed=seed))
        return _at(workload, bursts(self.burst_size, own_rate * load))


def poisson(rate: float, *, seed: int) -> Iterator[float]:
    """Yield endless arrival times in seconds: independent arrivals, `rate` a second on average."""
    source = random.Random(f"arrivals-{seed}")
    at_s = 0.0
    while True:
        at_s += source.expovariate(1.0) / rate  # a Poisson process has exponential gaps
        yield at_s


def bursts(size: int, rate: float) -> Iterator[float]:
    """Yield endless arrival times in seconds: `size` at once, then a gap that restores the mean rate."""
    number = 0
    while True:
        yield number // size * size / rate
        number += 1


def _at(workload: Workload, times_s: Iterator[float]) -> Workload:
    requests: list[TimedRequest] = [
        replace(timed, arrival_s=at_s) for timed, at_s in zip(workload.requests, times_s, strict=False)
    ]
    return Workload(tuple(requests))


def _rate(text: str, whole: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not (math.isfinite(rate) and rate > 0):
        raise BenchmarkError(f"--arrival {whole}: the rate {text!r} is not a number above 0; {_FORMS}")
    return rate
