"""Runs a trace through a fleet in simulated time, with the real engine, scheduler and dispatch.

Only the clock and the model runner are simulated. The real code decides which requests share a step and to which
replica a request is sent.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from app.config import CacheConfig, SchedulerConfig
from app.engine.engine import Engine
from app.engine.observer import StepObserver
from app.engine.request import ALL_BLOCKS, Address, PrefixSource, Request, TokenDelta
from app.errors import Overloaded
from app.fleet.dispatch import PREFILL, Group, GroupChooser, group_of_rank, groups_of_roles, make_policy
from app.fleet.replica_registry import ReplicaRegistry
from deployments.plan.simulated_replica import (
    TOKEN_ID,
    Noise,
    SimulatedReplica,
)
from deployments.plan.simulated_run import SimulatedRun
from deployments.plan.step_cost import MeasuredReplica
from deployments.plan.traces import Trace, TracedRequest


@dataclass(frozen=True, slots=True)
class Control:
    """Changes the number of replicas while a trace is running. Calls `look` with the time every `every_s` seconds."""

    look: Callable[[float], None]
    every_s: float


class FleetSimulation:
    """Replicas behind ingresses. Requests arrive at random ingresses. Each simulation can run only one trace."""

    def __init__(
        self,
        replicas: Sequence[MeasuredReplica],
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        *,
        dispatch: str = "least_loaded",
        num_ingresses: int = 1,
        roles: Sequence[Group] = (),
        seed: int | None = 1,
        recorders: Mapping[int, StepObserver] | None = None,
    ) -> None:
        """`seed` is for dispatch and step time noise, or None for no noise. `recorders` is by replica number."""
        self._now = 0.0
        self._registries = [
            ReplicaRegistry(
                make_policy(dispatch, random.Random((seed or 0) + number)), GroupChooser(()),
                block_size=cache.block_size, clock=lambda: self._now, has_roles=bool(roles),
            )
            for number in range(num_ingresses)
        ]  # fmt: skip
        self._is_round_robin = dispatch == "round_robin"
        self._compares_loads = len(replicas) > 1 and not self._is_round_robin
        self._rng = random.Random(seed or 0)
        self._registry_of: list[ReplicaRegistry] = []  # by request number
        self._max_tokens: list[int] = []  # by request number
        self._split: dict[str, Request] = {}  # requests that will move to a decode replica

        def new(number: int) -> SimulatedReplica:
            return SimulatedReplica(
                f"replica-{number:04d}", scheduler, cache, replicas[number % len(replicas)],
                noise=None if seed is None else Noise(f"{seed} {number}"),
                recorder=(recorders or {}).get(number), tells_prefixes=self._compares_loads,
                group=group_of_rank(number, roles),
            )  # fmt: skip

        self._new = new
        self._new_numbers = count(len(replicas))
        self._replicas = {each.replica_id: each for each in map(new, range(len(replicas)))}
        for registry in self._registries:
            registry.set_replicas(list(self._replicas))
        for replica in self._replicas.values():
            replica.note_in(self._registries)
        # A heap with the trace's next request, and with turns of conversations whose previous turns have ended.
        self._arrivals: list[tuple[float, int, TracedRequest, bool]] = []
        self._following: dict[int, TracedRequest] = {}  # next turn, by the request number of the previous turn
        self._numbers = count()  # orders simultaneous events by creation
        self._events: list[
            tuple[float, int, SimulatedReplica | None, list[TokenDelta] | None]
        ] = []  # no replica for `_control`
        self._control: Control | None = None
        self._run = SimulatedRun()

    @property
    def engines(self) -> list[Engine]:
        """The engines of all replicas. Must not be modified."""
        return [each.engine for each in self._replicas.values()]

    def start_replica(self) -> str:
        """Add a replica that accepts requests, and return its id. The given measurements are reused in a cycle."""
        self._compares_loads = not self._is_round_robin
        replica = self._new(next(self._new_numbers))
        self._replicas[replica.replica_id] = replica
        for registry in self._registries:
            registry.set_replicas([*registry.replica_ids, replica.replica_id])
        replica.note_in(self._registries)
        return replica.replica_id

    def stop_replica(self, replica_id: str) -> None:
        """Stop sending requests to a replica. The replica finishes its current requests."""
        for registry in self._registries:
            registry.set_replicas([each for each in registry.replica_ids if each != replica_id])

    def forget_replica(self, replica_id: str) -> None:
        """Remove a stopped replica that has finished its requests."""
        self._count(self._replicas.pop(replica_id).engine)

    def engine(self, replica_id: str) -> Engine:
        """Return a replica's engine. Must not be modified."""
        return self._replicas[replica_id].engine

    def run(self, trace: Trace, control: Control | None = None) -> SimulatedRun:
        """Run all requests of a trace and their following turns until they end."""
        run, events, arrivals = self._run, self._events, self._arrivals
        if control is not None:
            self._control = control
            heapq.heappush(events, (0.0, next(self._numbers), None, None))
        firsts = iter(trace.requests)
        self._expect(next(firsts), is_first=True)
        while events or arrivals:
            if not arrivals or (events and events[0][0] <= arrivals[0][0]):
                self._handle(*heapq.heappop(events))
                continue
            at_s, _, traced, is_first = heapq.heappop(arrivals)
            self._arrive(traced, at_s)
            if is_first and (after := next(firsts, None)) is not None:
                self._expect(after, is_first=True)
        run.seconds = max(run.last_tokens_s, default=0.0)
        for engine in self.engines:
            self._count(engine)
        return run

    def _count(self, engine: Engine) -> None:
        stats = engine.stats()
        self._run.num_steps += stats.total_steps
        self._run.num_preemptions += stats.total_preemptions

    def _expect(self, traced: TracedRequest, *, is_first: bool, after_s: float = 0.0) -> None:
        heapq.heappush(self._arrivals, (after_s + traced.arrival_s, next(self._numbers), traced, is_first))

    def _look(self, at_s: float, control: Control) -> None:
        self._catch_all_up(at_s)
        self._now = at_s
        control.look(at_s)
        if self._events or self._arrivals:
            heapq.heappush(self._events, (at_s + control.every_s, next(self._numbers), None, None))

    def _catch_all_up(self, at_s: float) -> None:
        for each in self._replicas.values():
            if each.coming is not None and each.coming.ends_at[0] <= at_s:
                self._catch_up(each, at_s)

    def _arrive(self, traced: TracedRequest, at_s: float) -> None:
        if self._compares_loads:
            self._catch_all_up(at_s)
        self._now = at_s
        number = self._run.num_requests
        request = traced.request(number)
        self._run.arrive(at_s)
        registry = self._rng.choice(self._registries) if len(self._registries) > 1 else self._registries[0]
        self._registry_of.append(registry)
        self._max_tokens.append(request.sampling.max_tokens)
        if traced.next_turn is not None:
            self._following[number] = traced.next_turn
        try:
            replica = self._replicas[registry.place(request, registry.replica_ids).replica_id]
        except Overloaded:
            self._run.num_refused += 1
            return
        if traced.num_output_tokens < traced.max_tokens:
            end = traced.num_prompt_tokens + traced.num_output_tokens - 1
            replica.runner.end_positions[request.request_id] = end
        if replica.group == PREFILL:
            self._split[request.request_id] = request
        self._begin(replica, request, registry)

    def _begin(self, replica: SimulatedReplica, request: Request, registry: ReplicaRegistry) -> None:
        self._enter(replica, request)
        replica.begin(registry, request)

    def _enter(self, replica: SimulatedReplica, request: Request) -> None:
        replica.entering.append((request, self._now))
        if replica.coming is not None:
            self._stop_after_this_step(replica)
        elif not replica.is_computing:
            self._go_on(replica)

    def _handle(
        self, at_s: float, number: int, replica: SimulatedReplica | None, deltas: list[TokenDelta] | None
    ) -> None:
        """Handle the end of a step (with deltas), of decode steps or of a timer, or call the control."""
        if replica is None:
            assert self._control is not None, "only events of a control have no replica"
            self._look(at_s, self._control)
            return
        if replica.awaited != number:
            return  # stale, because a new request has replaced it with an earlier event
        self._now = at_s
        if replica.coming is not None:
            self._catch_up(replica, at_s)
            replica.coming = None
        if deltas is not None:
            for delta in deltas:
                self._deliver(replica, delta)
            replica.note_in(self._registries)
        replica.is_computing = False
        self._go_on(replica)

    def _catch_up(self, replica: SimulatedReplica, now: float) -> None:
        """Deliver the tokens of all decode steps that have ended by now. Reports only the last step to ingresses."""
        steps, began_at = replica.coming, replica.clock.now
        ended_at = replica.decode_until(now)
        if steps is None or not ended_at:
            return
        self._run.computing_s += ended_at[-1] - began_at
        numbers = [int(request_id) for request_id in steps.request_ids]
        self._run.note_steps(numbers, ended_at)
        for number, request_id in zip(numbers, steps.request_ids, strict=True):
            self._registry_of[number].progress(request_id, len(ended_at))
        self._now = ended_at[-1]
        replica.note_in(self._registries)

    def _stop_after_this_step(self, replica: SimulatedReplica) -> None:
        """Drop all decode steps after the current one, so that the scheduler can decide about a new request."""
        steps = replica.coming
        assert steps is not None, "only called while the replica is running decode steps"
        replica.runner.cut(steps, bisect_right(steps.ends_at, self._now) + 1)
        self._await(replica, steps.ends_at[-1], None)

    def _deliver(self, replica: SimulatedReplica, delta: TokenDelta) -> None:
        number = int(delta.request_id)
        if delta.token_ids:
            self._run.note(number, len(delta.token_ids), at_s=self._now)
            self._registry_of[number].progress(delta.request_id, len(delta.token_ids))
            replica.note_token(self._registry_of[number], delta.request_id)
            if (split := self._split.pop(delta.request_id, None)) is not None and delta.finish_reason is None:
                self._hand_over(replica, split, self._registry_of[number])
        if delta.finish_reason is not None:
            num_generated = self._run.num_tokens[number]
            self._run.num_failed += delta.error is not None
            replica.runner.end_positions.pop(delta.request_id, None)
            registry = self._registry_of[number]
            replica.end(registry, delta.request_id)
            registry.end(
                delta.request_id,
                max_tokens=self._max_tokens[number],
                num_generated=num_generated if delta.error is None else None,
            )
            if (following := self._following.pop(number, None)) is not None:
                self._expect(following, is_first=False, after_s=self._now)

    def _hand_over(self, before: SimulatedReplica, request: Request, registry: ReplicaRegistry) -> None:
        """Move a request to a decode replica, which fetches its KV memory, as `Fleet` does."""
        before.engine.abort(request.request_id)
        before.end(registry, request.request_id)
        at = PrefixSource(Address("", 0, ""), ALL_BLOCKS)
        request = replace(request, generated_token_ids=(TOKEN_ID,), prefix_at=at)
        try:
            replica = self._replicas[registry.place(request, registry.replica_ids).replica_id]
        except Overloaded:
            replica = before  # a simplification: a real request would wait for a slot on any replica
        end = before.runner.end_positions.pop(request.request_id, None)
        if end is not None:
            replica.runner.end_positions[request.request_id] = end
        self._begin(replica, request, registry)

    def _go_on(self, replica: SimulatedReplica) -> None:
        """Begin the replica's next step, or wait for the strategy's timer or for a new request."""
        replica.clock.now = self._now
        if replica.store is not None:
            replica.store.advance()
        replica.enter()
        idle_s = replica.engine.idle_s
        if idle_s is None:
            return
        if idle_s > 0:
            self._await(replica, self._now + idle_s, None)
            return
        replica.is_computing = True
        steps = replica.begin_decode_steps()
        if steps is not None:
            self._await(replica, steps.ends_at[-1], None)
            return
        deltas = replica.step()
        self._run.computing_s += replica.clock.now - self._now
        self._await(replica, replica.clock.now, deltas)

    def _await(self, replica: SimulatedReplica, at_s: float, deltas: list[TokenDelta] | None) -> None:
        """Schedule the replica's next event, which replaces its previous next event."""
        replica.awaited = next(self._numbers)
        heapq.heappush(self._events, (at_s, replica.awaited, replica, deltas))


def simulate(
    trace: Trace, measured: MeasuredReplica, scheduler: SchedulerConfig, cache: CacheConfig,
    *, num_replicas: int = 1, dispatch: str = "least_loaded", seed: int | None = 1,
    max_replicas: int | None = None, num_prefill: int | None = None,
) -> SimulatedRun:  # fmt: skip
    """Run a trace through a new fleet. Simulates at most `max_replicas` replicas, with their share of the requests."""
    num_simulated = min(num_replicas, max_replicas or num_replicas)
    share = num_simulated / num_replicas
    roles = groups_of_roles(prefill=num_prefill, decode=num_replicas - num_prefill) if num_prefill else ()
    fleet = FleetSimulation([measured] * num_simulated, scheduler, cache, dispatch=dispatch, seed=seed, roles=roles)
    run = fleet.run(trace if share == 1.0 else trace.thinned(share))
    run.share = share
    return run
