"""A replica in simulated time: the real engine and scheduler with a model runner that only advances a clock."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from app.build import assemble
from app.config import CacheConfig, ReplicasConfig, SchedulerConfig
from app.engine.batch import StepBatch, StepResult
from app.engine.block_store import BlockStore, Fetch
from app.engine.engine import Engine
from app.engine.model_runner import ModelRunner
from app.engine.observer import StepObserver
from app.engine.prefix import Prefix
from app.engine.request import Request, TokenDelta
from app.engine.scheduler import Scheduler
from app.engine.sequence import EngineSequence
from app.engine.stats import StoreStats
from app.fleet import FailoverLimits, report_of
from app.fleet.dispatch import ReplicaReport
from app.fleet.prefix_feed import PrefixFeed
from app.fleet.replica_registry import ReplicaRegistry
from app.fleet.uncomputed_prompts import UncomputedPrompts
from deployments.plan.step_cost import MeasuredReplica, StepCost, StepShape

HEARTBEAT_S = FailoverLimits(place_timeout_s=1, silence_s=ReplicasConfig().silence_timeout_s, step_s=1).heartbeat_s
FETCHED_BYTES_PER_S = 0.7e9  # speed of fetches between replicas, measured on one machine
TOKEN_ID = 0  # generated for all requests until they end


@dataclass(slots=True)
class SimulatedClock:
    """A replica's clock in seconds. The replica's model runner advances it."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Noise:
    """Random numbers from 0 to 1. Unused numbers can be given back and drawn again, so that a run is reproducible."""

    def __init__(self, seed: str) -> None:
        self._rng = random.Random(seed)
        self._returned: list[float] = []  # in reverse order

    def draw(self) -> float:
        return self._returned.pop() if self._returned else self._rng.random()

    def give_back(self, drawn: Sequence[float]) -> None:
        """Accept the numbers that were drawn last, in the order in which they were drawn."""
        self._returned.extend(reversed(drawn))


class TimedRunner(ModelRunner):
    """A model runner that only advances the clock by each step's time, and ends requests at their end positions."""

    def __init__(self, cost: StepCost, clock: SimulatedClock, *, eos_token_id: int, noise: Noise | None) -> None:
        """`noise` selects a measured deviation from the mean time for each step, or None for no deviation."""
        self._cost = cost
        self._clock = clock
        self._eos_token_id = eos_token_id
        self._noise = noise
        self.end_positions: dict[str, int] = {}  # by id, for requests that end before their limit

    def run(self, batch: StepBatch) -> StepResult:
        """Advance the clock. Generates `TOKEN_ID`, or the end token at a request's end position."""
        cost, size = self._cost, StepShape.of(batch)
        self._clock.now += cost.seconds(size) if self._noise is None else cost.drawn_seconds(size, self._noise.draw())
        ends, eos = self.end_positions, self._eos_token_id
        return StepResult([eos if item.end == ends.get(item.request_id) else TOKEN_ID for item in batch.sampled])

    def decode_steps(self, running: Sequence[EngineSequence], number: int) -> DecodeSteps:
        """Return up to `number` of the sequences' next steps, excluding steps that generate an end token."""
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
        """Keep only the first `number` of these future steps, and give back the noise of the remaining steps."""
        if self._noise is not None:
            self._noise.give_back(steps.drawn[number:])
            del steps.drawn[number:]
        del steps.ends_at[number:]


class _PeerStore(BlockStore):
    """The KV memory of other replicas. A fetch finds all of its blocks, at the measured speed."""

    namespace = b"simulated"

    def __init__(self, clock: SimulatedClock, block_s: float) -> None:
        self._clock = clock
        self._block_s = block_s
        self._under_way: list[tuple[float, Fetch]] = []  # (end time, fetch), in the order of end times

    def lookup(self, names: Iterable[bytes], request: Request, *, num_before: int) -> int:
        at = request.prefix_at
        return 0 if at is None else sum(1 for _ in islice(names, max(0, at.num_blocks - num_before)))

    def expected_s(self, num_blocks: int, request: Request) -> float:
        return self._block_s * num_blocks

    def begin(self, fetch: Fetch) -> None:
        begins_at = max([self._clock.now, *(ends_at for ends_at, _ in self._under_way[-1:])])
        self._under_way.append((begins_at + self._block_s * len(fetch.blocks), fetch))

    def advance(self) -> None:
        """Finish the fetches that have ended by now."""
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
    """A scheduler that can skip over many steps if they only add a token to every running sequence."""

    def num_decode_steps(self) -> int:
        """Return how many of the next steps need no scheduling decision, unless an end token is generated.

        Returns 0 if the next step may need a decision, or if a sequence reaches its limit in the next step.
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
        """Run the steps that end at these times. Returns the duration of each step.

        Has the same effects as calling `schedule` and `update` for each step, but creates no batches. Blocks are
        allocated, and cached when full, in the order of the steps.
        """
        size, num_steps, running = self.pool.block_size, len(ends_at), self.running
        changes: list[tuple[int, bool, int]] = []  # (step, whether after it, index of the sequence)
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
            self.throughput.note_step(at, began_at=self.throughput.last_step_at, num_tokens=len(running), num_ended=0)
            took_s.append(self.throughput.last_step_s)
        self._totals.steps += num_steps
        return took_s


def _decodes_plainly(sequence: EngineSequence) -> bool:
    return (
        sequence.is_decoding
        and sequence.has_plain_sampling
        and sequence.matcher is None
        and not sequence.wants_logprobs
    )


class SimulatedEngine(Engine):
    """An engine that can skip over decode steps. See `SimulatedScheduler`."""

    def __init__(self, *, scheduler: SimulatedScheduler, **parts: Any) -> None:
        super().__init__(scheduler=scheduler, **parts)
        self._deciding = scheduler

    def num_decode_steps(self) -> int:
        """Like `SimulatedScheduler.num_decode_steps`, but returns 0 if another observer needs each step."""
        is_only_measured = len(self._observers) == 1
        return self._deciding.num_decode_steps() if is_only_measured else 0

    def decode(self, ends_at: Sequence[float]) -> None:
        """Run the steps that end at these times without the model runner. See `SimulatedScheduler.decode`."""
        for seconds in self._deciding.decode(ends_at):
            self._measurements.note_step(seconds, num_tokens=len(self.running), num_sequences=len(self.running))


@dataclass(slots=True)
class DecodeSteps:
    """Future steps that add a token to each running sequence and need no scheduling decision."""

    request_ids: Sequence[str]
    ends_at: list[float]
    drawn: list[float]  # the noise of each step


class SimulatedReplica:
    """An engine, the requests that arrived during its current step, and its connections to ingresses."""

    def __init__(
        self, replica_id: str, scheduler: SchedulerConfig, cache: CacheConfig, measured: MeasuredReplica,
        *, noise: Noise | None, recorder: StepObserver | None, tells_prefixes: bool, group: str = "",
    ) -> None:  # fmt: skip
        self.replica_id = replica_id
        self.group = group
        self.clock = SimulatedClock()
        self.store = _PeerStore(self.clock, measured.kv_bytes / FETCHED_BYTES_PER_S) if group else None
        self.is_computing = False
        self.awaited = -1  # number of its next event; its other events are stale
        self.entering: list[tuple[Request, float]] = []
        self.coming: DecodeSteps | None = None  # decode steps in progress
        self.runner = TimedRunner(
            measured.cost, self.clock, eos_token_id=(*measured.model_info.eos_token_ids, -1)[0], noise=noise
        )
        engine = assemble(
            scheduler, cache, num_blocks=measured.num_blocks, runner=self.runner, model_info=measured.model_info,
            clock=self.clock, recorder=recorder, scheduler_class=SimulatedScheduler, engine_class=SimulatedEngine,
            store=self.store,
        )  # fmt: skip
        assert isinstance(engine, SimulatedEngine), "`assemble` returns an engine of `engine_class`"
        self.engine = engine
        self.prefixes = PrefixFeed()
        if tells_prefixes:
            engine.on_prefixes(self.prefixes.note)
        self.prompts = UncomputedPrompts()
        self._sessions: dict[ReplicaRegistry, _Session] = {}
        self._stats = engine.stats()  # at the end of the last step
        self._num_new = 0  # requests that have arrived since
        self._max_requests = scheduler.max_requests

    def enter(self) -> None:
        """Add the requests that arrived during the step to the engine, as the engine's thread does between steps."""
        for request, arrived_at in self.entering:
            self.engine.add_checked(request, arrived_at=arrived_at)
        self.entering.clear()

    def begin_decode_steps(self) -> DecodeSteps | None:
        """Begin the next steps if several of them need no scheduling decision. Otherwise returns None."""
        number = self.engine.num_decode_steps()
        if number > 1:
            steps = self.runner.decode_steps(self.engine.running, number)
            if steps.ends_at:
                self.coming = steps
        return self.coming

    def decode_until(self, now: float) -> list[float]:
        """Run the decode steps that have ended by now. Returns their end times."""
        steps = self.coming
        assert steps is not None, "`begin_decode_steps` must have returned steps"
        number = bisect_right(steps.ends_at, now)
        ended_at = steps.ends_at[:number]
        if number:
            self.engine.decode(ended_at)
            self.clock.now = ended_at[-1]
            del steps.ends_at[:number], steps.drawn[:number]
        return ended_at

    def step(self) -> list[TokenDelta]:
        """Run a step and advance the clock to its end."""
        began_at = self.clock.now
        deltas = self.engine.step()
        empty_step_s = 1e-5  # the clock must advance even if a step computes nothing
        if self.clock.now == began_at:
            self.clock.now += empty_step_s
        return deltas

    def note_in(self, registries: Sequence[ReplicaRegistry], *, to_all: bool = False) -> None:
        """Report to ingresses with requests or news (or `to_all`), and to other ingresses if a heartbeat is due."""
        self._stats, self._num_new = self.engine.stats(), len(self.entering)
        for registry in registries:
            session = self._session(registry)
            if to_all or session.has_news or session.num_open or self.clock.now - session.told_at >= HEARTBEAT_S:
                session.tell()

    def begin(self, registry: ReplicaRegistry, request: Request) -> None:
        """Count an ingress's new request and its uncomputed prompt."""
        session = self._session(registry)
        session.num_open += 1
        self._num_new += 1
        session.prompts.add(request.request_id, registry.num_prefill_tokens(request.request_id))

    def end(self, registry: ReplicaRegistry, request_id: str) -> None:
        """Stop counting a request that has ended or moved."""
        session = self._sessions.get(registry)
        if session is not None:  # the ingress has not restarted
            session.prompts.end(request_id)
            session.num_open -= 1
            session.has_news = True

    def note_token(self, registry: ReplicaRegistry, request_id: str) -> None:
        """Count a request's prompt as computed."""
        session = self._sessions.get(registry)
        if session is not None:
            session.prompts.end(request_id)

    def forget(self, registry: ReplicaRegistry) -> None:
        """Close the connection to an ingress. Raises KeyError if there is none."""
        self._sessions.pop(registry).close()

    def _session(self, registry: ReplicaRegistry) -> _Session:
        return self._sessions.get(registry) or self._sessions.setdefault(registry, _Session(self, registry))

    def report(self, num_prompt_tokens_of_others: int) -> ReplicaReport:
        """Return a report with the engine's statistics from the end of the last step, as in a real replica."""
        num_requests = self._stats.num_running + self._stats.num_waiting + self._num_new
        return report_of(
            self._stats, num_requests=num_requests, group=self.group, max_requests=self._max_requests, step_age_s=0.0,
            num_prompt_tokens_of_others=num_prompt_tokens_of_others,
        )  # fmt: skip


class _Session:
    """The connection between a replica and an ingress. See `IngressSession`."""

    def __init__(self, replica: SimulatedReplica, registry: ReplicaRegistry) -> None:
        self._replica = replica
        self._registry = registry
        self._prefixes = replica.prefixes.open()
        self.prompts = replica.prompts.open(self.tell)
        self.num_open = 0  # the ingress's unfinished requests
        self.has_news = True
        self.told_at = 0.0

    def tell(self) -> None:
        """Report the replica's load and new prefixes to the ingress."""
        self.has_news, self.told_at = False, self._replica.clock.now
        report = self._replica.report(self.prompts.take())
        self._registry.note(self._replica.replica_id, report, self._prefixes.take())

    def close(self) -> None:
        """Stop collecting prompts and prefixes for the ingress."""
        self._prefixes.close()
        self.prompts.close()
