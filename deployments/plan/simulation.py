"""Runs a trace through a fleet in simulated time, with the real engine, scheduler and dispatch.

Only the clock and the model runner are simulated. The contents of a step and the replica of a request are decided by
the real code.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

from app.build import assemble
from app.config import CacheConfig, ReplicasConfig, RolesConfig, SchedulerConfig
from app.engine.batch import StepBatch, StepResult
from app.engine.block_pool import Prefix
from app.engine.block_store import BlockStore, Fetch
from app.engine.engine import Engine
from app.engine.model_runner import ModelRunner
from app.engine.observer import StepObserver
from app.engine.request import ALL_BLOCKS, Address, PrefixSource, Request, TokenDelta
from app.engine.scheduler import Scheduler
from app.engine.sequence import EngineSequence
from app.engine.stats import StoreStats
from app.errors import Overloaded
from app.fleet import FailoverLimits, report_of
from app.fleet.dispatch import PREFILL, GroupChooser, ReplicaReport, group_of_rank, groups_of_roles, make_policy
from app.fleet.prefix_feed import PrefixFeed
from app.fleet.replica_registry import ReplicaRegistry
from app.fleet.uncomputed_prompts import UncomputedPrompts
from deployments.plan.simulated_run import SimulatedRun
from deployments.plan.step_cost import MeasuredReplica, StepCost, StepShape
from deployments.plan.traces import Trace, TracedRequest

HEARTBEAT_S = FailoverLimits(place_timeout_s=1, silence_s=ReplicasConfig().silence_timeout_s, step_s=1).heartbeat_s
FETCHED_BYTES_PER_S = 0.7e9  # speed of a fetch from another replica, measured on one machine (docs/results/features.md)
TOKEN_ID = 0  # the token that each step draws for a request that does not end


@dataclass(slots=True)
class SimulatedClock:
    """A clock in seconds that the model runner of one replica advances."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class _Noise:
    """Random numbers from 0 to 1. Numbers that were drawn too early can be given back."""

    def __init__(self, seed: str) -> None:
        self._rng = random.Random(seed)
        self._returned: list[float] = []  # numbers that were given back; the next one is last

    def draw(self) -> float:
        return self._returned.pop() if self._returned else self._rng.random()

    def give_back(self, drawn: Sequence[float]) -> None:
        """Take back the numbers that were drawn last, in the order in which they were drawn."""
        self._returned.extend(reversed(drawn))


class TimedRunner(ModelRunner):
    """A model runner that computes nothing. It advances the clock by the time of a step, and draws the end tokens."""

    def __init__(self, cost: StepCost, clock: SimulatedClock, *, eos_token_id: int, noise: _Noise | None) -> None:
        """`noise` chooses the measured ratio of a step's time to its mean. None: every step takes its mean time."""
        self._cost = cost
        self._clock = clock
        self._eos_token_id = eos_token_id
        self._noise = noise
        self.end_positions: dict[str, int] = {}  # end token's position, by id of requests that end before their limit

    def run(self, batch: StepBatch) -> StepResult:
        """Advance the clock, and return the tokens of the step: `TOKEN_ID`, or the end token of an ending request."""
        cost, size = self._cost, StepShape.of(batch)
        self._clock.now += cost.seconds(size) if self._noise is None else cost.drawn_seconds(size, self._noise.draw())
        ends, eos = self.end_positions, self._eos_token_id
        return StepResult([eos if item.end == ends.get(item.request_id) else TOKEN_ID for item in batch.sampled])

    def decode_steps(self, running: Sequence[EngineSequence], number: int) -> DecodeSteps:
        """Return up to `number` next steps of these sequences. Stops before a step that draws an end token."""
        ends = [self.end_positions.get(each.request.request_id) for each in running]
        left = [end - each.num_tokens for end, each in zip(ends, running, strict=True) if end is not None]
        number = min([number, *left])
        context, now = sum(each.num_computed_tokens for each in running), self._clock.now
        ends_at, drawn = [], []
        for step in range(number):
            size = StepShape(len(running), len(running), context + (step + 1) * len(running), 0)
            if self._noise is None:
                now += self._cost.seconds(size)
            else:
                drawn.append(self._noise.draw())
                now += self._cost.drawn_seconds(size, drawn[-1])
            ends_at.append(now)
        return DecodeSteps([each.request.request_id for each in running], ends_at, drawn)

    def cut(self, steps: DecodeSteps, number: int) -> None:
        """Keep only the first `number` of steps that are not computed yet."""
        if self._noise is not None:
            self._noise.give_back(steps.drawn[number:])
            del steps.drawn[number:]
        del steps.ends_at[number:]


class _PeerStore(BlockStore):
    """The KV memory of other replicas. A fetch takes the measured time, and finds all of its blocks."""

    namespace = b"simulated"

    def __init__(self, clock: SimulatedClock, block_s: float) -> None:
        self._clock = clock
        self._block_s = block_s
        self._under_way: list[tuple[float, Fetch]] = []  # running fetches and their end times, in the order of the ends

    def lookup(self, names: Iterable[bytes], request: Request, *, num_before: int) -> int:
        at = request.prefix_at
        return 0 if at is None else sum(1 for _ in islice(names, max(0, at.num_blocks - num_before)))

    def expected_s(self, num_blocks: int, request: Request) -> float:
        return self._block_s * num_blocks

    def begin(self, fetch: Fetch) -> None:
        begins_at = max([self._clock.now, *(ends_at for ends_at, _ in self._under_way[-1:])])
        self._under_way.append((begins_at + self._block_s * len(fetch.blocks), fetch))

    def advance(self) -> None:
        """Finish the fetches that are due."""
        while self._under_way and self._under_way[0][0] <= self._clock.now:
            _, fetch = self._under_way.pop(0)
            fetch.num_filled, fetch.is_done = len(fetch.blocks), True

    def offer(self, prefix: Prefix) -> None:
        """Do nothing, because no blocks are stored."""

    def stats(self) -> StoreStats:
        return StoreStats()

    def settle(self, timeout_s: float) -> None:
        """Do nothing, because simulated engines do not sleep."""

    def close(self) -> None:
        """Do nothing."""


class SimulatedScheduler(Scheduler):
    """A scheduler that can compute many steps at once, if each step only adds one token to every running sequence."""

    def num_decode_steps(self) -> int:
        """Return the number of next steps without scheduling decisions, if no drawn token ends a sequence.

        0: the next step may need a decision, or a sequence reaches its limit in the next step.
        """
        has_waiting = len(self._waiting) or len(self.fetches)
        is_plain = not (has_waiting or self._ended or self._policy.counts_steps or self.drafter)
        running = self.running
        if not (is_plain and running) or self._deadlines.next_at is not None or not all(map(_decodes_plainly, running)):
            return 0
        number = min(each.request.sampling.max_tokens - each.num_generated_tokens for each in running) - 1
        while number > 0 and not self.pool.can_allocate(
            sum(max(0, self._running.num_missing_blocks(each, number)) for each in running)
        ):
            number //= 2
        return max(0, number)

    def decode(self, ends_at: Sequence[float]) -> list[float]:
        """Compute the steps that end at these times, and return the duration of each step.

        Has the same effects as `schedule` and `update` for each step, except for `take_decision`. Blocks are allocated,
        and cached when they are full, in the order of the steps.
        """
        size, num_steps, running = self.pool.block_size, len(ends_at), self.running
        changes: list[tuple[int, bool, int]] = []  # step, whether the change is after the step, index of the sequence
        for place, sequence in enumerate(running):
            computed = sequence.num_computed_tokens
            sequence.generated_token_ids.extend([TOKEN_ID] * num_steps)
            changes += [(step, False, place) for step in range(-computed % size, num_steps, size)]
            changes += [(step, True, place) for step in range(-(computed + 1) % size, num_steps, size)]
        for step, is_full, place in sorted(changes):
            sequence = running[place]
            if is_full:
                self._results.cache_full_blocks(sequence, sequence.num_computed_tokens + step + 1)
            elif self._running.num_missing_blocks(sequence, step + 1) > 0:
                self._running.extend(sequence, step + 1)
        for sequence in running:
            sequence.num_computed_tokens += num_steps
        self._totals.generated_tokens += len(running) * num_steps
        took_s = []
        for at in ends_at:
            self._count_step(at, began_at=self._last_step_at, num_tokens=len(running), num_ended=0)
            took_s.append(self.last_step_s)
        return took_s


def _decodes_plainly(sequence: EngineSequence) -> bool:
    return (
        sequence.is_decoding
        and sequence.has_plain_sampling
        and sequence.matcher is None
        and not sequence.wants_logprobs
    )


class SimulatedEngine(Engine):
    """An engine with a simulated scheduler."""

    def __init__(self, *, scheduler: SimulatedScheduler, **parts: Any) -> None:
        super().__init__(scheduler=scheduler, **parts)
        self._deciding = scheduler

    def num_decode_steps(self) -> int:
        """See `SimulatedScheduler.num_decode_steps`. Returns 0 if each step is recorded or may change the limits."""
        is_only_measured = len(self._observers) == 1
        return self._deciding.num_decode_steps() if is_only_measured else 0

    def decode(self, ends_at: Sequence[float]) -> None:
        """See `SimulatedScheduler.decode`. No model runs."""
        for seconds in self._deciding.decode(ends_at):
            self._measurements.note_step(seconds, num_tokens=len(self.running), num_sequences=len(self.running))


@dataclass(slots=True)
class DecodeSteps:
    """Future steps that add one token to each running sequence and need no scheduling decision."""

    request_ids: Sequence[str]
    ends_at: list[float]
    drawn: list[float]  # the noise of each step


class _Replica:
    """One engine, the requests that have arrived during its current step, and the connections to ingresses."""

    def __init__(
        self, replica_id: str, scheduler: SchedulerConfig, cache: CacheConfig, measured: MeasuredReplica,
        *, noise: _Noise | None, recorder: StepObserver | None, tells_prefixes: bool, group: str = "",
    ) -> None:  # fmt: skip
        self.replica_id = replica_id
        self.group = group
        self.clock = SimulatedClock()
        self.store = _PeerStore(self.clock, measured.kv_bytes / FETCHED_BYTES_PER_S) if group else None
        self.is_computing = False
        self.awaited = -1  # number of the replica's next event; its events with other numbers are stale
        self.entering: list[tuple[Request, float]] = []
        self.coming: DecodeSteps | None = None  # the steps that the replica computes now, one after the other
        self.runner = TimedRunner(
            measured.cost, self.clock, eos_token_id=(*measured.facts.eos_token_ids, -1)[0], noise=noise
        )
        engine = assemble(
            scheduler, cache, num_blocks=measured.num_blocks, runner=self.runner, facts=measured.facts,
            clock=self.clock, recorder=recorder, scheduler_class=SimulatedScheduler, engine_class=SimulatedEngine,
            store=self.store,
        )  # fmt: skip
        assert isinstance(engine, SimulatedEngine), "of that class"
        self.engine = engine
        self.prefixes = PrefixFeed()
        if tells_prefixes:
            engine.on_prefixes(self.prefixes.note)
        self.prompts = UncomputedPrompts()
        self._sessions: dict[ReplicaRegistry, _Session] = {}
        self._stats = engine.stats()  # at the end of the last step
        self._num_new = 0  # requests that have arrived since the last step
        self._max_requests = scheduler.max_requests

    def enter(self) -> None:
        """Add the requests that have arrived during the step, as the engine's thread does between two steps."""
        for request, arrived_at in self.entering:
            self.engine.add_checked(request, arrived_at=arrived_at)
        self.entering.clear()

    def begin_decode_steps(self) -> DecodeSteps | None:
        """Begin the next steps, if several steps need no scheduling decision. Returns None if they do."""
        number = self.engine.num_decode_steps()
        if number > 1:
            steps = self.runner.decode_steps(self.engine.running, number)
            if steps.ends_at:
                self.coming = steps
        return self.coming

    def decode_until(self, now: float) -> list[float]:
        """Compute the steps that have ended by now, and return their end times."""
        steps = self.coming
        assert steps is not None, "the replica has begun decode steps"
        number = bisect_right(steps.ends_at, now)
        ended_at = steps.ends_at[:number]
        if number:
            self.engine.decode(ended_at)
            self.clock.now = ended_at[-1]
            del steps.ends_at[:number], steps.drawn[:number]
        return ended_at

    def step(self) -> list[TokenDelta]:
        """Compute a step, and advance the clock to its end."""
        began_at = self.clock.now
        deltas = self.engine.step()
        empty_step_s = 1e-5  # the clock must advance even after a step that computes nothing
        if self.clock.now == began_at:
            self.clock.now += empty_step_s
        return deltas

    def note_in(self, registries: Sequence[ReplicaRegistry], *, to_all: bool = False) -> None:
        """Send a step's frames to the ingresses with requests or news (or `to_all`), and heartbeats to the others."""
        self._stats, self._num_new = self.engine.stats(), len(self.entering)
        for registry in registries:
            session = self._session(registry)
            if to_all or session.has_news or session.num_open or self.clock.now - session.told_at >= HEARTBEAT_S:
                session.tell()

    def begin(self, registry: ReplicaRegistry, request: Request) -> None:
        """Count a request that an ingress has sent."""
        session = self._session(registry)
        session.num_open += 1
        self._num_new += 1
        session.prompts.add(request.request_id, registry.num_prefill_tokens(request.request_id))

    def end(self, registry: ReplicaRegistry, request_id: str) -> None:
        """Stop counting a request."""
        session = self._sessions.get(registry)
        if session is not None:  # the ingress has not restarted
            session.prompts.end(request_id)
            session.num_open -= 1
            session.has_news = True

    def note_token(self, registry: ReplicaRegistry, request_id: str) -> None:
        """Count the prompt of a request as computed."""
        session = self._sessions.get(registry)
        if session is not None:
            session.prompts.end(request_id)

    def forget(self, registry: ReplicaRegistry) -> None:
        """Close the connection to an ingress."""
        self._sessions.pop(registry).close()

    def _session(self, registry: ReplicaRegistry) -> _Session:
        return self._sessions.get(registry) or self._sessions.setdefault(registry, _Session(self, registry))

    def report(self, num_prompt_tokens_of_others: int) -> ReplicaReport:
        """Return the current report. The engine's numbers are from the end of the last step."""
        num_requests = self._stats.num_running + self._stats.num_waiting + self._num_new
        return report_of(
            self._stats, num_requests=num_requests, group=self.group, max_requests=self._max_requests, step_age_s=0.0,
            num_prompt_tokens_of_others=num_prompt_tokens_of_others,
        )  # fmt: skip


class _Session:
    """The connection of one replica to one ingress. See `IngressSession`."""

    def __init__(self, replica: _Replica, registry: ReplicaRegistry) -> None:
        self._replica = replica
        self._registry = registry
        self._prefixes = replica.prefixes.open()
        self.prompts = replica.prompts.open(self.tell)
        self.num_open = 0  # unfinished requests of the ingress
        self.has_news = True
        self.told_at = 0.0

    def tell(self) -> None:
        """Send a frame without tokens."""
        self.has_news, self.told_at = False, self._replica.clock.now
        report = self._replica.report(self.prompts.take())
        self._registry.note(self._replica.replica_id, report, self._prefixes.take())

    def close(self) -> None:
        """Stop counting the ingress's prompts and prefixes."""
        self._prefixes.close()
        self.prompts.close()


@dataclass(frozen=True, slots=True)
class Control:
    """Changes the number of replicas while a trace runs. `look` is called with the time, every `every_s` seconds."""

    look: Callable[[float], None]
    every_s: float


class FleetSimulation:
    """Replicas behind ingresses, for one run. A request takes a random ingress; replicas report to all ingresses."""

    def __init__(
        self,
        replicas: Sequence[MeasuredReplica],
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        *,
        dispatch: str = "least_loaded",
        num_ingresses: int = 1,
        roles: RolesConfig | None = None,
        seed: int | None = 1,
        recorders: Mapping[int, StepObserver] | None = None,
    ) -> None:
        """`seed`: for dispatch and the noise of step times; None: no noise. `recorders`: by the number of a replica."""
        self._now = 0.0
        self._registries = [
            ReplicaRegistry(
                make_policy(dispatch, random.Random((seed or 0) + number)), GroupChooser(()),
                block_size=cache.block_size, clock=lambda: self._now, has_roles=roles is not None,
            )
            for number in range(num_ingresses)
        ]  # fmt: skip
        self._is_round_robin = dispatch == "round_robin"
        self._compares_loads = len(replicas) > 1 and not self._is_round_robin
        self._rng = random.Random(seed or 0)
        self._registry_of: list[ReplicaRegistry] = []  # by the number of the request
        self._max_tokens: list[int] = []  # by the number of the request
        groups = [] if roles is None else groups_of_roles(prefill=roles.prefill, decode=roles.decode)
        self._split: dict[str, Request] = {}  # requests that move to a decode replica after their prefill

        def new(number: int) -> _Replica:
            return _Replica(
                f"replica-{number:04d}", scheduler, cache, replicas[number % len(replicas)],
                noise=None if seed is None else _Noise(f"{seed} {number}"),
                recorder=(recorders or {}).get(number), tells_prefixes=self._compares_loads,
                group=group_of_rank(number, groups),
            )  # fmt: skip

        self._new = new
        self._new_numbers = count(len(replicas))
        self._replicas = {each.replica_id: each for each in map(new, range(len(replicas)))}
        for registry in self._registries:
            registry.set_replicas(list(self._replicas))
        for replica in self._replicas.values():
            replica.note_in(self._registries)
        # Heap of the trace's next request, and of later turns whose previous turns have ended.
        self._arrivals: list[tuple[float, int, TracedRequest, bool]] = []
        self._following: dict[int, TracedRequest] = {}  # the next turn, by the number of the request that it follows
        self._numbers = count()  # orders simultaneous events by their creation
        self._events: list[tuple[float, int, _Replica | None, list[TokenDelta] | None]] = []  # no replica: `_control`
        self._control: Control | None = None
        self._run = SimulatedRun()

    @property
    def engines(self) -> list[Engine]:
        """The engines of all replicas, for reading."""
        return [each.engine for each in self._replicas.values()]

    def start_replica(self) -> str:
        """Add a replica that takes requests from now on. It has the measurements of the first replicas in turn."""
        self._compares_loads = not self._is_round_robin
        replica = self._new(next(self._new_numbers))
        self._replicas[replica.replica_id] = replica
        for registry in self._registries:
            registry.set_replicas([*registry.replica_ids, replica.replica_id])
        replica.note_in(self._registries)
        return replica.replica_id

    def stop_replica(self, replica_id: str) -> None:
        """Stop sending requests to a replica. The replica finishes its requests."""
        for registry in self._registries:
            registry.set_replicas([each for each in registry.replica_ids if each != replica_id])

    def forget_replica(self, replica_id: str) -> None:
        """Remove a stopped replica that has finished its requests."""
        self._count(self._replicas.pop(replica_id).engine)

    def engine(self, replica_id: str) -> Engine:
        """Return the engine of one replica, for reading."""
        return self._replicas[replica_id].engine

    def run(self, trace: Trace, control: Control | None = None) -> SimulatedRun:
        """Run all requests of a trace, and the turns that follow them, to their end."""
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

    def _begin(self, replica: _Replica, request: Request, registry: ReplicaRegistry) -> None:
        """Send a request from an ingress to a replica."""
        self._enter(replica, request)
        replica.begin(registry, request)

    def _enter(self, replica: _Replica, request: Request) -> None:
        replica.entering.append((request, self._now))
        if replica.coming is not None:
            self._stop_after_this_step(replica)
        elif not replica.is_computing:
            self._go_on(replica)

    def _handle(self, at_s: float, number: int, replica: _Replica | None, deltas: list[TokenDelta] | None) -> None:
        """Handle an event: the end of a step (with deltas), of decode steps or of a timer; or an event of a control."""
        if replica is None:
            assert self._control is not None, "only a control has events without a replica"
            self._look(at_s, self._control)
            return
        if replica.awaited != number:
            return  # stale: a new request has replaced this event by an earlier one
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

    def _catch_up(self, replica: _Replica, now: float) -> None:
        """Deliver the tokens of the decode steps that have ended by now, and report the end of the last of them."""
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

    def _stop_after_this_step(self, replica: _Replica) -> None:
        """End the decode steps after the current step, so that the scheduler can decide about a new request."""
        steps = replica.coming
        assert steps is not None, "the replica computes decode steps"
        replica.runner.cut(steps, bisect_right(steps.ends_at, self._now) + 1)
        self._await(replica, steps.ends_at[-1], None)

    def _deliver(self, replica: _Replica, delta: TokenDelta) -> None:
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

    def _hand_over(self, before: _Replica, request: Request, registry: ReplicaRegistry) -> None:
        """Move a request to a decode replica, which fetches its KV memory, as `Fleet` does."""
        before.engine.abort(request.request_id)
        before.end(registry, request.request_id)
        at = PrefixSource(Address("", 0, ""), ALL_BLOCKS)
        request = replace(request, generated_token_ids=(TOKEN_ID,), prefix_at=at)
        try:
            replica = self._replicas[registry.place(request, registry.replica_ids).replica_id]
        except Overloaded:
            replica = before  # the simulated request waits on its replica; a real one waits for room on any replica
        end = before.runner.end_positions.pop(request.request_id, None)
        if end is not None:
            replica.runner.end_positions[request.request_id] = end
        self._begin(replica, request, registry)

    def _go_on(self, replica: _Replica) -> None:
        """Begin the next step, or wait for the strategy's timer or a request."""
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

    def _await(self, replica: _Replica, at_s: float, deltas: list[TokenDelta] | None) -> None:
        """Set the replica's next event, which replaces the event that was awaited before."""
        replica.awaited = next(self._numbers)
        heapq.heappush(self._events, (at_s, replica.awaited, replica, deltas))


def simulate(
    trace: Trace, measured: MeasuredReplica, scheduler: SchedulerConfig, cache: CacheConfig,
    *, num_replicas: int = 1, dispatch: str = "least_loaded", seed: int | None = 1,
    max_replicas: int | None = None, roles: RolesConfig | None = None,
) -> SimulatedRun:  # fmt: skip
    """Run a trace through a new fleet. At most `max_replicas` are simulated, with their share of the requests."""
    num_simulated = min(num_replicas, max_replicas or num_replicas)
    share = num_simulated / num_replicas
    fleet = FleetSimulation([measured] * num_simulated, scheduler, cache, dispatch=dispatch, seed=seed, roles=roles)
    run = fleet.run(trace if share == 1.0 else trace.thinned(share))
    run.share = share
    return run
