"""Would a forecast of arrivals help autoscaling? The rule of `app.fleet.autoscaling` with forecasts beside it.

    python -m benchmarks.service.autoscaling --trace conv.csv [--shape day] [--start-s 60]

Simulates a fleet for an hour (the trace as it is) or for a day: for each of its hours the trace from a random place of
it, thinned to a day's shape: least at night, most at noon, with a level that differs from day to day. The day before is
history. Requests of all replicas wait in one queue; each holds a slot for a time in proportion to its tokens. The
number of replicas follows the rule with Serve's delays, every two seconds; a new replica takes requests after
--start-s.

* reactive: `desired_replicas`, as served
* naive: at least the replicas for the work that arrived in the last minute: no forecast, to tell apart what that adds
* trend: the same for the work that a line through the last ten minutes predicts
* seasonal: the same for yesterday's work at that time, scaled by today's last 15 minutes to yesterday's; a day only
* perfect: the same for the work that will come, known in advance: about what a forecast could save

Forecasts know the length of every request when it arrives, which a service does not. Each rule has levers:
`target_tokens`, as a share of what a full replica has to do; the share of slots that forecast work may fill. Printed
are, for each rule, the fewest replica-hours with which at most --late of the requests get their first token after
--ttft-s.
"""

from __future__ import annotations

import argparse
import heapq
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.config import AutoscalingConfig
from app.fleet.autoscaling import AutoscalingLoad, desired_replicas
from benchmarks.harness.command import BenchmarkError, command_parser, positive, run_command, tell
from benchmarks.harness.figures import table
from deployments.plan.traces import Trace, read_trace

TICK_S = 2.0  # between two decisions, as replicas report
_UPSCALE_DELAY_S, _DOWNSCALE_DELAY_S = (
    10.0,
    120.0,
)  # as served: deployments/serve/autoscaling.py, app/config/replicas.py
_HOUR_S, _DAY_S = 3600.0, 86_400.0
_PROMPT_TOKEN_S, _OUTPUT_TOKEN_S = 0.0002, 0.03  # that a request holds its slot
_COPIES_WITHIN_S = 30.0
_BIN_S = 10.0  # of the history of arrivals
_NIGHT = 0.2  # of noon's arrivals
_LEVEL_SPREAD = 0.15  # of the logarithm of a day's level
_FILLS = tuple(number / 20 for number in range(6, 33))  # of `target_tokens`, where there is no forecast
_FILLS_BESIDE = (0.6, 0.8, 1.0, 1.2, 1.5, 2.0)  # where there is one: as many trials with the next line
_WARM_UP_S, _WARM_UP_UTILISATION = 300.0, 0.6
_UTILISATIONS = (0.6, 0.7, 0.8, 0.9)  # of slots by forecast work

FloatArray = np.ndarray[tuple[int], np.dtype[np.float64]]
Forecast = Callable[[float], float]  # the slots that will be held by work that arrives, at a time in seconds


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in the order of their arrival; times in seconds from the start of what is simulated, below 0 before."""

    at_s: FloatArray
    held_s: FloatArray  # for which each holds a slot
    prompt_s: FloatArray  # of these before its first token
    num_tokens: FloatArray
    seconds: float


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the replicas are like."""

    num_slots: int
    start_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """One rule with its levers."""

    replica_s: float
    late_share: float


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """All rules over their levers.

    Raises:
        BenchmarkError: no setting of a rule keeps the promise.
    """
    trace, fleet = read_trace(given.trace), Fleet(given.slots, given.start_s, given.ttft_s)
    rng = np.random.default_rng(given.seed)
    load = hour(trace, given.copies, rng) if given.shape == "hour" else day(trace, given.copies, rng)
    rows = []
    for name, forecast in forecasts(load, horizon_s=given.start_s + _UPSCALE_DELAY_S).items():
        if given.shape == "day" or name != "seasonal":
            predicted = None if forecast is None else [forecast(now_s) for now_s in _ticks(load)]
            found = [
                (fill, utilisation, outcome(load, fleet, fill=fill, predicted=predicted, utilisation=utilisation))
                for fill in (_FILLS if forecast is None else _FILLS_BESIDE)
                for utilisation in ([1.0] if forecast is None else _UTILISATIONS)
            ]
            rows.append(_cheapest(name, found, given.late))
            tell(f"{name}: {rows[-1]}")
    least = rows[0]["replica_s"]
    print(table(
        ["rule", "replica-hours", "of reactive", "late", "target_tokens", "utilisation"],
        [[row["rule"], f"{row['replica_s'] / 3600:.1f}", f"{row['replica_s'] / least:.3f}", f"{row['late_share']:.2%}",
          f"{row['fill']:g}", "–" if row["utilisation"] == 1.0 else f"{row['utilisation']:g}"] for row in rows],
    ))  # fmt: skip
    return {"num_requests": int((load.at_s >= 0).sum()), "rows": rows}


def _cheapest(name: str, found: Sequence[tuple[float, float, Outcome]], late: float) -> dict[str, Any]:
    kept = [each for each in found if each[2].late_share <= late]
    if not kept:
        least = min(each[2].late_share for each in found)
        raise BenchmarkError(f"{name}: at least {least:.2%} of the requests are late; --late {late:g} is not reached")
    fill, utilisation, best = min(kept, key=lambda each: each[2].replica_s)
    return {"rule": name, "fill": fill, "utilisation": utilisation, "replica_s": best.replica_s,
            "late_share": best.late_share}  # fmt: skip


# ---------------------------------------------------------------------- load


def hour(trace: Trace, num_copies: int, rng: np.random.Generator) -> Load:
    """The trace as it is, or each of its requests several times within half a minute."""
    at_s = np.array([each.arrival_s for each in trace.requests])
    return _load(np.arange(len(at_s)), at_s, trace, num_copies, rng)


def day(trace: Trace, num_copies: int, rng: np.random.Generator) -> Load:
    """A day, and the day before it as history."""
    arrivals = np.array([each.arrival_s for each in trace.requests])
    levels = np.exp(rng.normal(0, _LEVEL_SPREAD, 2))
    levels /= levels.max()
    places, times = [], []
    for number in range(48):
        shifted = (arrivals + rng.uniform(0, trace.seconds)) % trace.seconds * (_HOUR_S / trace.seconds)
        order = np.argsort(shifted)
        at_s = shifted[order] + number * _HOUR_S
        share = _NIGHT + (1 - _NIGHT) * (0.5 - 0.5 * np.cos(2 * np.pi * at_s / _DAY_S))
        kept = rng.random(len(at_s)) < share * levels[number // 24]
        places.append(order[kept])
        times.append(at_s[kept] - _DAY_S)
    return _load(np.concatenate(places), np.concatenate(times), trace, num_copies, rng)


def _load(
    places: np.ndarray[tuple[int], np.dtype[np.int64]], at_s: FloatArray, trace: Trace, num_copies: int,
    rng: np.random.Generator,
) -> Load:  # fmt: skip
    """Requests of the trace by their places in it, each so many times from its time on."""
    if num_copies > 1:
        places, at_s = np.repeat(places, num_copies), np.repeat(at_s, num_copies)
        at_s = at_s + rng.uniform(0, _COPIES_WITHIN_S, len(at_s))
        order = np.argsort(at_s)
        places, at_s = places[order], at_s[order]
    prompts = np.array([each.num_prompt_tokens for each in trace.requests], dtype=np.float64)[places]
    outputs = np.array([each.num_output_tokens for each in trace.requests], dtype=np.float64)[places]
    prompt_s = prompts * _PROMPT_TOKEN_S
    return Load(at_s, prompt_s + outputs * _OUTPUT_TOKEN_S, prompt_s, prompts + outputs, float(at_s[-1]))


# ---------------------------------------------------------------------- forecasts


def forecasts(load: Load, *, horizon_s: float) -> dict[str, Forecast | None]:
    """By name; None for the rule alone. Each looks `horizon_s` ahead and, but for `perfect`, only at what has come."""
    first_s = min(0.0, math.floor(load.at_s[0] / _BIN_S) * _BIN_S)
    num_bins = math.ceil((load.seconds + horizon_s - first_s) / _BIN_S) + 1
    work = np.bincount(((load.at_s - first_s) / _BIN_S).astype(int), weights=load.held_s, minlength=num_bins) / _BIN_S
    sums = np.concatenate([[0.0], np.cumsum(work)])

    def mean(from_s: float, to_s: float) -> float:
        """Slots that the work needs which arrives between two times; whole bins."""
        begin, end = (min(num_bins, max(0, round((each - first_s) / _BIN_S))) for each in (from_s, to_s))
        return float(sums[end] - sums[begin]) / (end - begin) if end > begin else 0.0

    def naive(now_s: float) -> float:
        return mean(now_s - 60.0, now_s)

    def trend(now_s: float) -> float:
        ages = np.arange(10, 0, -1) * 60.0
        slope, level = np.polyfit(30.0 - ages, [mean(now_s - age, now_s - age + 60.0) for age in ages], 1)
        return max(0.0, float(level + slope * horizon_s))

    def seasonal(now_s: float) -> float:
        yesterday, then = now_s - _DAY_S, now_s - _DAY_S + horizon_s
        before = mean(yesterday - 900.0, yesterday)
        return mean(then - 300.0, then + 300.0) * (mean(now_s - 900.0, now_s) / before if before else 1.0)

    def perfect(now_s: float) -> float:
        return mean(now_s + horizon_s - 30.0, now_s + horizon_s + 30.0)

    return {"reactive": None, "naive": naive, "trend": trend, "seasonal": seasonal, "perfect": perfect}


# ---------------------------------------------------------------------- simulation


def outcome(
    load: Load, fleet: Fleet, *, fill: float, predicted: Sequence[float] | None, utilisation: float
) -> Outcome:  # fmt: skip
    """The fleet over all requests from 0 s on. `predicted`: slots, by a forecast at each tick."""
    target_tokens = max(1, round(fill * fleet.num_slots * float(load.num_tokens.mean()) / 2))
    config = AutoscalingConfig(min_replicas=1, max_replicas=1024, target_tokens=target_tokens)
    queue, scaler = _Queue(load, fleet), _Scaler(fleet, num_replicas=_at_first(load, fleet))
    replica_s = 0.0
    for tick, now_s in enumerate(_ticks(load)):
        queue.advance(now_s, scaler.num_ready(now_s) * fleet.num_slots)
        replica_s += TICK_S * max(scaler.target, math.ceil(queue.num_running / fleet.num_slots))
        wanted = desired_replicas(queue.seen_by(scaler, now_s), config)
        if predicted is not None:
            wanted = max(wanted, math.ceil(predicted[tick] / (utilisation * fleet.num_slots)))
        scaler.decide(wanted, now_s)
    return Outcome(replica_s, (queue.num_late + queue.num_waiting) / max(1, queue.num_arrived))


def _at_first(load: Load, fleet: Fleet) -> int:
    """Replicas that are there from the start: enough for the first five minutes, so that no rule begins behind."""
    soon = (load.at_s >= 0) & (load.at_s < _WARM_UP_S)
    return math.ceil(float(load.held_s[soon].sum()) / _WARM_UP_S / fleet.num_slots / _WARM_UP_UTILISATION)


def _ticks(load: Load) -> Iterator[float]:
    return (number * TICK_S for number in range(1, math.ceil(load.seconds / TICK_S) + 1))


class _Scaler:
    """How many replicas there are: Serve's delays, and the time that a replica takes to start."""

    def __init__(self, fleet: Fleet, *, num_replicas: int) -> None:
        self._fleet = fleet
        self._ready_at = [0.0] * num_replicas  # of each, rising
        self._asked_since: tuple[int, float] | None = None  # for more (1) or fewer (-1), and since when

    @property
    def target(self) -> int:
        return len(self._ready_at)

    def num_ready(self, now_s: float) -> int:
        return sum(each <= now_s for each in self._ready_at)

    def decide(self, wanted: int, now_s: float) -> None:
        direction = (wanted > self.target) - (wanted < self.target)
        if self._asked_since is None or self._asked_since[0] != direction:
            self._asked_since = (direction, now_s)
        delay_s = _UPSCALE_DELAY_S if direction > 0 else _DOWNSCALE_DELAY_S
        if direction and now_s - self._asked_since[1] >= delay_s:
            new = [now_s + self._fleet.start_s] * (wanted - self.target)
            self._ready_at = (self._ready_at + new)[:wanted]  # those that are still starting go first
            self._asked_since = None


class _Queue:
    """One queue before all slots."""

    def __init__(self, load: Load, fleet: Fleet) -> None:
        first = int(np.searchsorted(load.at_s, 0.0))
        columns = (load.at_s, load.held_s, load.prompt_s, load.num_tokens)
        self._coming = zip(*(column[first:].tolist() for column in columns), strict=True)
        self._next = next(self._coming, None)
        self._waiting: deque[tuple[float, float, float, float]] = deque()
        self._waiting_tokens = 0.0
        self._ends: list[tuple[float, float]] = []  # of running requests: when, and tokens computed in a second
        self._speed = 0.0  # tokens that the running requests compute in a second
        self._at_end = 0.0  # the sum of end times that speed
        self._ttft_s = fleet.ttft_s
        self._num_slots = fleet.num_slots
        self.num_arrived = self.num_late = 0

    @property
    def num_running(self) -> int:
        return len(self._ends)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def advance(self, now_s: float, num_slots: int) -> None:
        """All arrivals and ends up to now, with so many slots."""
        self._start_waiting(now_s - TICK_S, num_slots)
        while True:
            arrival_s = self._next[0] if self._next is not None else math.inf
            end_s = self._ends[0][0] if self._ends else math.inf
            if min(arrival_s, end_s) > now_s:
                return
            if end_s <= arrival_s:
                _, speed = heapq.heappop(self._ends)
                self._speed -= speed
                self._at_end -= speed * end_s
                self._start_waiting(end_s, num_slots)
            else:
                assert self._next is not None, "an arrival is before infinity"
                self._waiting.append(self._next)
                self._waiting_tokens += self._next[3]
                self.num_arrived += 1
                self._next = next(self._coming, None)
                self._start_waiting(arrival_s, num_slots)

    def _start_waiting(self, now_s: float, num_slots: int) -> None:
        while self._waiting and len(self._ends) < num_slots:
            at_s, held_s, prompt_s, num_tokens = self._waiting.popleft()
            speed = num_tokens / held_s
            heapq.heappush(self._ends, (now_s + held_s, speed))
            self._speed += speed
            self._at_end += speed * (now_s + held_s)
            self._waiting_tokens -= num_tokens
            self.num_late += now_s - at_s + prompt_s > self._ttft_s

    def seen_by(self, scaler: _Scaler, now_s: float) -> AutoscalingLoad:
        """What replicas would report. KV memory is left out: it is not short here."""
        num_ready = scaler.num_ready(now_s)
        return AutoscalingLoad(
            target=scaler.target, num_running=num_ready, num_reporting=num_ready,
            num_outstanding_tokens=max(0.0, self._at_end - self._speed * now_s) + self._waiting_tokens,
            num_replica_requests=self.num_running + self.num_waiting, kv_use=0.0, num_queued=0,
            num_slots=self._num_slots,
        )  # fmt: skip


# ---------------------------------------------------------------------- options


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return share


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= _HOUR_S:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most {_HOUR_S:g}")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("service.autoscaling", __doc__)
    parser.add_argument("--trace", required=True, metavar="FILE", help="a CSV with Azure's columns, or a workload file")
    parser.add_argument("--shape", choices=("hour", "day"), default="hour", help="the trace as it is, or a day of it")
    parser.add_argument("--slots", type=positive, default=4, metavar="N", help="requests that one replica computes (4)")
    parser.add_argument("--start-s", type=_seconds, default=60.0, metavar="S", help="a new replica takes to start (60)")
    parser.add_argument("--ttft-s", type=_seconds, default=2.0, metavar="S", help="a later first token is late (2)")
    parser.add_argument("--late", type=_share, default=0.01, metavar="SHARE", help="requests that may be late (0.01)")
    parser.add_argument("--copies", type=positive, default=1, metavar="N", help="of each request, within 30 s (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the day and the copies")
    return parser


if __name__ == "__main__":
    sys.exit(main())
