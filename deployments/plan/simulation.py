"""A trace through a fleet in simulated time: the real engine, scheduler and dispatch, and a model that only counts.

Only the clock and the model runner stand in for the real ones. Nothing here decides what a step holds or where a
request goes.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from app.assembly import assemble
from app.config import CacheConfig, SchedulerConfig
from app.engine.batch import Batch, StepResult
from app.engine.request import Request, TokenDelta
from app.engine.trace.recorder import Recorder
from app.errors import Overloaded
from app.fleet import report_of
from app.fleet.dispatch import GroupChooser, make_policy
from app.fleet.replica_registry import ReplicaRegistry
from deployments.plan.step_cost import MeasuredReplica, StepCost, StepShape
from deployments.plan.traces import Trace, TracedRequest

_EMPTY_STEP_S = 1e-5  # a step that computes nothing takes time, too: the clock must move on


@dataclass(slots=True)
class SimulatedClock:
    """Seconds, moved on by the model runner of one replica."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class TimedRunner:
    """A model runner that computes nothing: it moves the clock on by a step's time and ends requests at their end."""

    def __init__(
        self, cost: StepCost, clock: SimulatedClock, *, eos_token_id: int, noise: random.Random | None
    ) -> None:
        """`noise` draws from what the fit has left over; None: every step takes its mean time."""
        self._cost = cost
        self._clock = clock
        self._eos_token_id = eos_token_id
        self._noise = noise
        self.end_positions: dict[str, int] = {}  # of requests that end before their limit, by id: of the end token

    def run(self, batch: Batch) -> StepResult:
        """The step's tokens: 0, or the end token where a request ends."""
        cost, size = self._cost, StepShape.of(batch)
        self._clock.now += cost.seconds(size) if self._noise is None else cost.drawn_seconds(size, self._noise)
        ends, eos = self.end_positions, self._eos_token_id
        return StepResult([eos if item.end == ends.get(item.request_id) else 0 for item in batch.sampled])


class _Replica:
    """One engine, the requests that came while it computes a step, and that step's end."""

    def __init__(
        self, replica_id: str, scheduler: SchedulerConfig, cache: CacheConfig, measured: MeasuredReplica,
        *, noise: random.Random | None, recorder: Recorder | None,
    ) -> None:  # fmt: skip
        self.replica_id = replica_id
        self.clock = SimulatedClock()
        self.is_computing = False
        self.wakes_at: float | None = None  # when the strategy's timer ends
        self.entering: list[tuple[Request, float]] = []
        self.runner = TimedRunner(
            measured.cost, self.clock, eos_token_id=(*measured.facts.eos_token_ids, -1)[0], noise=noise
        )
        self.engine = assemble(
            scheduler, cache, num_blocks=measured.num_blocks, runner=self.runner, facts=measured.facts,
            clock=self.clock, recorder=recorder,
        )  # fmt: skip
        self._max_requests = scheduler.max_requests

    def enter(self) -> None:
        """Hand over what came during the step, as the engine's thread does between two steps."""
        for request, arrived_at in self.entering:
            self.engine.add_checked(request, arrived_at=arrived_at)
        self.entering.clear()

    def step(self) -> list[TokenDelta]:
        """Compute a step; afterwards the clock shows its end."""
        began_at = self.clock.now
        deltas = self.engine.step()
        if self.clock.now == began_at:
            self.clock.now += _EMPTY_STEP_S
        return deltas

    def note_in(self, registry: ReplicaRegistry) -> None:
        """Report, as with every frame."""
        report = report_of(self.engine.stats(), group="", max_requests=self._max_requests, step_age_s=0.0)
        registry.note(self.replica_id, report)


@dataclass(slots=True)
class Timeline:
    """What a client sees of one request, in seconds of the simulation."""

    arrival_s: float
    first_token_s: float = -1.0  # below 0: none came
    last_token_s: float = -1.0
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def mean_itl_s(self) -> float:
        return (self.last_token_s - self.first_token_s) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0


@dataclass(slots=True)
class SimulatedRun:
    """What became of every request."""

    timelines: list[Timeline]
    gaps_s: array[float] = field(default_factory=lambda: array("f"))  # between one token and the next, of all requests
    num_refused: int = 0
    num_failed: int = 0  # their deadline was missed
    num_steps: int = 0
    num_preemptions: int = 0
    computing_s: float = 0.0  # of all replicas together
    seconds: float = 0.0  # from the first arrival to the last token
    share: float = 1.0  # of the fleet and its requests that was simulated; all counts are of this share

    def note(self, number: int, num_tokens: int, *, at_s: float) -> None:
        """Tokens of a request have come, or the end of one without."""
        if not num_tokens:
            return
        timeline = self.timelines[number]
        if timeline.num_tokens:
            self.gaps_s.append(at_s - timeline.last_token_s)
        else:
            timeline.first_token_s = at_s
        timeline.last_token_s = at_s
        timeline.num_tokens += num_tokens

    @property
    def num_output_tokens(self) -> int:
        return sum(each.num_tokens for each in self.timelines)

    @property
    def output_tokens_per_s(self) -> float:
        """Of the whole fleet."""
        return self.num_output_tokens / self.seconds / self.share

    @property
    def requests_per_s(self) -> float:
        """That were served by the whole fleet."""
        return sum(each.num_tokens > 0 for each in self.timelines) / self.seconds / self.share

    def times_s(self, metric: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """All samples of `ttft`, `itl` or `latency`."""
        if metric == "itl":
            return np.array(self.gaps_s, dtype=np.float64)
        served = [each for each in self.timelines if each.num_tokens]
        times = [each.ttft_s if metric == "ttft" else each.last_token_s - each.arrival_s for each in served]
        return np.array(times, dtype=np.float64)

    def percentile_s(self, metric: str, percent: float) -> float:
        """Infinite where no request was served, or one was refused and would lie above this percentile."""
        times = self.times_s(metric)
        if metric == "itl":
            return float(np.percentile(times, percent)) if len(times) else 0.0
        num_lost = self.num_refused + self.num_failed
        if not len(times) or num_lost / (num_lost + len(times)) > 1 - percent / 100:
            return float("inf")
        return float(np.percentile(times, percent))


class FleetSimulation:
    """Replicas behind one ingress. One use."""

    def __init__(
        self,
        measured: MeasuredReplica,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        *,
        num_replicas: int = 1,
        dispatch: str = "least_loaded",
        seed: int | None = 1,
        recorders: Mapping[int, Recorder] | None = None,
    ) -> None:
        """`seed` of dispatch and of the steps' noise; None: no noise. `recorders` by the number of a replica."""
        self._now = 0.0
        self._registry = ReplicaRegistry(
            make_policy(dispatch, random.Random(seed or 0)), GroupChooser(()), block_size=cache.block_size,
            clock=lambda: self._now,
        )  # fmt: skip
        self._replicas = {
            f"replica-{number:04d}": _Replica(
                f"replica-{number:04d}", scheduler, cache, measured,
                noise=None if seed is None else random.Random(f"{seed} {number}"),
                recorder=(recorders or {}).get(number),
            )
            for number in range(num_replicas)
        }  # fmt: skip
        self._registry.set_replicas(list(self._replicas))
        for replica in self._replicas.values():
            replica.note_in(self._registry)
        self._numbers = count()  # of events at the same time: in the order in which they were made
        self._events: list[tuple[float, int, _Replica, list[TokenDelta] | None]] = []
        self._run = SimulatedRun([])

    def run(self, trace: Trace) -> SimulatedRun:
        """All requests to their end."""
        run, events = self._run, self._events
        for number, traced in enumerate(trace.requests):
            while events and events[0][0] <= traced.arrival_s:
                self._handle(*heapq.heappop(events))
            self._now = traced.arrival_s
            run.timelines.append(Timeline(traced.arrival_s))
            self._arrive(traced, traced.request(number))
        while events:
            self._handle(*heapq.heappop(events))
        run.seconds = max((each.last_token_s for each in run.timelines), default=0.0)
        stats = [replica.engine.stats() for replica in self._replicas.values()]
        run.num_steps = sum(each.total_steps for each in stats)
        run.num_preemptions = sum(each.total_preemptions for each in stats)
        return run

    def _arrive(self, traced: TracedRequest, request: Request) -> None:
        try:
            replica = self._replicas[self._registry.place(request, self._registry.replica_ids)]
        except Overloaded:
            self._run.num_refused += 1
            return
        if traced.num_output_tokens < traced.max_tokens:
            end = traced.num_prompt_tokens + traced.num_output_tokens - 1
            replica.runner.end_positions[request.request_id] = end
        replica.entering.append((request, self._now))
        if not replica.is_computing:
            self._go_on(replica)

    def _handle(self, at_s: float, _: int, replica: _Replica, deltas: list[TokenDelta] | None) -> None:
        """The end of a step with its deltas, or of a strategy's timer."""
        self._now = at_s
        if deltas is not None:
            replica.is_computing = False
            for delta in deltas:
                self._deliver(replica, delta)
            replica.note_in(self._registry)
        elif replica.is_computing or replica.wakes_at != at_s:
            return  # a request came before, and with it an earlier step
        self._go_on(replica)

    def _deliver(self, replica: _Replica, delta: TokenDelta) -> None:
        number = int(delta.request_id)
        if delta.token_ids:
            self._run.note(number, len(delta.token_ids), at_s=self._now)
            self._registry.progress(delta.request_id, len(delta.token_ids))
        if delta.finish_reason is not None:
            num_generated = self._run.timelines[number].num_tokens
            self._run.num_failed += delta.error is not None
            replica.runner.end_positions.pop(delta.request_id, None)
            self._registry.end(delta.request_id, num_generated=num_generated if delta.error is None else None)

    def _go_on(self, replica: _Replica) -> None:
        """Begin the next step, or wait for the strategy's timer or a request."""
        replica.clock.now = self._now
        replica.enter()
        idle_s = replica.engine.idle_s
        if idle_s is None:
            return
        if idle_s > 0:
            replica.wakes_at = self._now + idle_s
            heapq.heappush(self._events, (replica.wakes_at, next(self._numbers), replica, None))
            return
        replica.is_computing = True
        deltas = replica.step()
        self._run.computing_s += replica.clock.now - self._now
        heapq.heappush(self._events, (replica.clock.now, next(self._numbers), replica, deltas))


def simulate(
    trace: Trace, measured: MeasuredReplica, scheduler: SchedulerConfig, cache: CacheConfig,
    *, num_replicas: int = 1, dispatch: str = "least_loaded", seed: int | None = 1,
    max_replicas: int | None = None,
) -> SimulatedRun:  # fmt: skip
    """The trace through a new fleet. Of one with more than `max_replicas`, so many and their share of the requests."""
    num_simulated = min(num_replicas, max_replicas or num_replicas)
    share = num_simulated / num_replicas
    fleet = FleetSimulation(measured, scheduler, cache, num_replicas=num_simulated, dispatch=dispatch, seed=seed)
    run = fleet.run(trace if share == 1.0 else trace.thinned(share))
    run.share = share
    return run
