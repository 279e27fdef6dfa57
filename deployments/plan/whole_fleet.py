"""All requests on all replicas of a large fleet, in parts that are simulated beside one another.

Dispatch compares every replica of a fleet for every request, so a part of a few replicas costs far less for each
request. A request has fewer replicas to choose from than in the whole: it waits a little longer.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from app.config import CacheConfig, SchedulerConfig
from deployments.plan.simulation import FleetSimulation, SimulatedRun
from deployments.plan.step_cost import MeasuredReplica
from deployments.plan.traces import Trace

MAX_PART = 16  # replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeFleet:
    """A fleet to simulate. It is sent to the processes that simulate its parts."""

    trace: Trace
    measured: MeasuredReplica
    scheduler: SchedulerConfig
    cache: CacheConfig
    dispatch: str
    num_replicas: int

    def simulate(self, *, num_processes: int) -> SimulatedRun:
        """Every request to its end."""
        whole = SimulatedRun()
        numbers = range(self.num_parts)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(num_processes, self.num_parts), mp_context=context) as processes:
            for part in processes.map(self.part, numbers):
                whole.add(part)
        whole.share = 1.0  # the sum of the parts', without its rounding
        return whole

    @property
    def num_parts(self) -> int:
        return -(-self.num_replicas // MAX_PART)

    def part(self, number: int) -> SimulatedRun:
        """One part, with its share of the requests, chosen at random."""
        first, last = (number * self.num_replicas // self.num_parts, (number + 1) * self.num_replicas // self.num_parts)
        fleet = FleetSimulation(
            [self.measured] * (last - first), self.scheduler, self.cache, dispatch=self.dispatch, seed=number + 1
        )  # fmt: skip
        run = fleet.run(self.trace.dealt(first / self.num_replicas, last / self.num_replicas))
        run.share = (last - first) / self.num_replicas
        return run
