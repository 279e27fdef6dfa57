"""When requests come: at random, in bursts, or as the workload says. The same seed gives the same times, scaled."""

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
    """One way for requests to come. `rate` is requests a second on average; None: whatever it is run at."""

    kind: Literal["poisson", "burst", "trace"]
    rate: float | None = None
    burst_size: int = 1

    @classmethod
    def parse(cls, text: str) -> Arrivals:
        """Read `poisson:8`, `burst:64@8` or `trace`. Raises BenchmarkError with what there is."""
        kind, _, rest = text.partition(":")
        if kind == "poisson":
            return cls("poisson", _rate(rest, text) if rest else None)
        if kind == "burst":
            size, at, rate = rest.partition("@")
            if not size.isdecimal() or int(size) < 1:
                raise BenchmarkError(f"--arrival {text}: a burst is of one request or more; {_FORMS}")
            return cls("burst", _rate(rate, text) if at else None, int(size))
        if text == "trace":
            return cls("trace")
        raise BenchmarkError(f"--arrival {text}: {_FORMS}")

    def needs_rate(self, workload: Workload) -> bool:
        """Whether a rate has to be given: a trace, or one burst for all, has no open rate."""
        if self.rate is not None or self.kind == "trace":
            return False
        return self.kind == "poisson" or self.burst_size < len(workload.requests)

    def arrange(self, workload: Workload, *, rate: float | None, load: float = 1.0, seed: int = 0) -> Workload:
        """The same requests in the same order, at `load` × the rate; a trace is played `load` times as fast.

        `rate` in requests a second stands in where the arrivals have none of their own.
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
    """Endless arrival times in seconds, independent of each other, `rate` a second on average."""
    source = random.Random(f"arrivals-{seed}")
    at_s = 0.0
    while True:
        at_s += source.expovariate(1.0) / rate  # the gap is exponential, with nothing added to it
        yield at_s


def bursts(size: int, rate: float) -> Iterator[float]:
    """Endless arrival times in seconds: `size` at once, then none until the mean rate is right again."""
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
        raise BenchmarkError(f"--arrival {whole}: the rate {text!r} is no number above 0; {_FORMS}")
    return rate
