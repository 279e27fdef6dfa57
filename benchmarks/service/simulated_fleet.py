"""A fleet of replicas and ingresses in simulated time, by the real rules of `app.fleet.dispatch`. No model, no clock.

A replica batches at every step: each running request that decodes gets a token, prompts get chunks of what is left of
the step's budget, and a step takes `base_s` and `token_s` for each token. KV memory bounds only what stays cached.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from app.engine.throughput import Throughput
from app.fleet.dispatch import DispatchPolicy, Ledger, OutputLengths, PrefixIndex, ReplicaReport, RequestSize

_MAX_STEP_TOKENS = 512
_CHUNK_TOKENS = 256
_BLOCK_SIZE = 16
_MAX_REQUESTS = 10**9  # a replica refuses none


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """How many requests a replica computes at once, and the seconds of a step: for itself, and for each token."""

    max_running: int = 32
    base_s: float = 0.010
    token_s: float = 0.0001

    def step_s(self, num_tokens: int) -> float:
        return self.base_s + self.token_s * num_tokens

    def slowed(self, factor: float) -> Capability:
        return replace(self, base_s=self.base_s * factor, token_s=self.token_s * factor)


@dataclass(slots=True, kw_only=True)
class Job:
    """One request: what is asked, what only the simulation knows, and what has become of it."""

    request_id: str
    prompt: Sequence[int]
    reply: Sequence[int]
    max_tokens: int
    arrival_s: float
    next_turn: Job | None = None  # of a conversation
    pause_s: float = 0.0  # between the end of this turn and the next
    replica_id: str = ""
    num_cached: int = 0
    num_computed: int = 0
    num_generated: int = 0
    first_token_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def is_prompt_computed(self) -> bool:
        return self.num_computed >= len(self.prompt)


@dataclass(frozen=True, slots=True)
class Step:
    """What a replica has just computed."""

    progressed: list[Job]  # each by one token
    ended: list[Job]


class SimulatedReplica:
    """One replica: continuous batching, first come first served, with a prefix cache."""

    def __init__(self, replica_id: str, capability: Capability, *, kv_tokens: int) -> None:
        self.replica_id = replica_id
        self._capability = capability
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._chunks: dict[str, int] = {}  # prompt tokens in the current step, by request id
        self._kv_tokens = kv_tokens
        self._cache = PrefixIndex(block_size=_BLOCK_SIZE, max_tokens=kv_tokens)
        self._pace = Throughput()
        self.is_computing = False

    def add(self, job: Job) -> None:
        self._waiting.append(job)

    def start_step(self) -> float:
        """Begin a step; how long it takes, 0 when there is nothing to compute."""
        while self._waiting and len(self._running) < self._capability.max_running:
            self._admit(self._waiting.popleft())
        num_decoding = sum(job.is_prompt_computed for job in self._running)
        budget = _MAX_STEP_TOKENS - num_decoding
        self._chunks = {}
        for job in self._running:
            chunk = min(budget, _CHUNK_TOKENS, len(job.prompt) - job.num_computed)
            if chunk > 0:
                self._chunks[job.request_id] = chunk
                budget -= chunk
        num_tokens = _MAX_STEP_TOKENS - budget
        self.is_computing = num_tokens > 0
        if not self.is_computing:
            return 0.0
        seconds = self._capability.step_s(num_tokens)
        self._pace.note_step(seconds, num_tokens=num_tokens, num_ended=0)
        return seconds

    def end_step(self, now: float) -> Step:
        """Book what the step has computed."""
        progressed = []
        for job in self._running:
            if not job.is_prompt_computed:
                job.num_computed += self._chunks.get(job.request_id, 0)
                if not job.is_prompt_computed:
                    continue
                job.first_token_s = now
                self._cache.add(self.replica_id, job.prompt)
            job.num_generated += 1
            progressed.append(job)
        ended = [job for job in progressed if job.num_generated == len(job.reply)]
        for job in ended:
            self._running.remove(job)
            self._cache.add(self.replica_id, (*job.prompt, *job.reply))
        return Step(progressed, ended)

    def report(self) -> ReplicaReport:
        jobs = [*self._running, *self._waiting]
        return ReplicaReport(
            group="",
            num_requests=len(jobs),
            num_background=0,
            num_staying_background=0,
            max_requests=_MAX_REQUESTS,
            max_running=self._capability.max_running,
            num_waiting_tokens=sum(len(job.prompt) - job.num_computed for job in jobs),
            num_kv_tokens=self._kv_tokens,
            tokens_per_s=self._pace.tokens_per_s_at(self._capability.max_running),
            ended_per_s=0.0,
            step_age_s=0.0,
        )

    def _admit(self, job: Job) -> None:
        self._running.append(job)
        cached = self._cache.match(job.prompt).get(self.replica_id, 0)
        job.num_cached = job.num_computed = min(cached, len(job.prompt) - 1)  # the last one must give logits


class SimulatedIngress:
    """What an ingress knows and does about dispatch, as `ReplicaRegistry` does it: replies are cached unknown to it."""

    def __init__(self, policy: DispatchPolicy, replica_ids: Sequence[str], *, kv_tokens: int) -> None:
        self._policy = policy
        self._replica_ids = replica_ids
        self._ledger = Ledger()
        self._lengths = OutputLengths()
        self._index = PrefixIndex(block_size=_BLOCK_SIZE, max_tokens=kv_tokens)

    def num_cached(self, prompt: Sequence[int]) -> Mapping[str, int]:
        """How much of a prompt each replica should have, by its id."""
        return self._index.match(prompt)

    def place(self, job: Job, now: float) -> str:
        cached = self.num_cached(job.prompt)
        size = RequestSize(
            num_prompt_tokens=len(job.prompt), num_expected_tokens=self._lengths.expected_tokens(job.max_tokens)
        )
        candidates = self._ledger.candidates(self._replica_ids, now=now, num_cached_tokens=cached)
        replica_id = self._policy.decide(candidates, size).order[0]
        self._ledger.place(
            job.request_id,
            replica_id,
            num_prompt_tokens=max(1, len(job.prompt) - cached.get(replica_id, 0)),
            num_expected_tokens=size.num_expected_tokens,
        )
        self._index.add(replica_id, job.prompt)
        return replica_id

    def progress(self, job: Job) -> None:
        self._ledger.progress(job.request_id, 1)

    def end(self, job: Job) -> None:
        self._ledger.end(job.request_id)
        self._lengths.learn(job.max_tokens, job.num_generated)

    def correct(self, replica_id: str, report: ReplicaReport, now: float) -> None:
        self._ledger.note(replica_id, report, now=now)


@dataclass(order=True, slots=True)
class _Event:
    at_s: float
    number: int  # equal times in the order in which they were put
    job: Job | None = field(compare=False, default=None)  # that arrives
    replica: SimulatedReplica | None = field(compare=False, default=None)  # that ends a step


class SimulatedFleet:
    """Replicas behind ingresses, each request through a random one; frames tell every ingress at every step."""

    def __init__(
        self, replicas: Sequence[SimulatedReplica], ingresses: Sequence[SimulatedIngress], rng: random.Random
    ) -> None:
        self._replicas = {replica.replica_id: replica for replica in replicas}
        self._ingresses = ingresses
        self._rng = rng
        self._ingress_of: dict[str, SimulatedIngress] = {}  # by request id
        self._events: list[_Event] = []
        self._numbers = count()
        self._served: list[Job] = []

    def run(self, jobs: Sequence[Job]) -> list[Job]:
        """All requests to their end, those that follow from others too, in the order in which they ended."""
        for job in jobs:
            self._put(job.arrival_s, job=job)
        while self._events:
            event = heapq.heappop(self._events)
            if event.job is not None:
                self._arrive(event.job, event.at_s)
            if event.replica is not None:
                self._end_step(event.replica, event.at_s)
        return self._served

    def _arrive(self, job: Job, now: float) -> None:
        ingress = self._ingress_of[job.request_id] = self._rng.choice(self._ingresses)
        job.replica_id = ingress.place(job, now)
        replica = self._replicas[job.replica_id]
        replica.add(job)
        if not replica.is_computing:
            self._start_step(replica, now)

    def _end_step(self, replica: SimulatedReplica, now: float) -> None:
        step = replica.end_step(now)
        for job in step.progressed:
            self._ingress_of[job.request_id].progress(job)
        for job in step.ended:
            self._ingress_of.pop(job.request_id).end(job)
            self._served.append(job)
            if job.next_turn is not None:
                job.next_turn.arrival_s = now + job.pause_s
                self._put(job.next_turn.arrival_s, job=job.next_turn)
        report = replica.report()
        for ingress in self._ingresses:
            ingress.correct(replica.replica_id, report, now)
        self._start_step(replica, now)

    def _start_step(self, replica: SimulatedReplica, now: float) -> None:
        seconds = replica.start_step()
        if replica.is_computing:
            self._put(now + seconds, replica=replica)

    def _put(self, at_s: float, *, job: Job | None = None, replica: SimulatedReplica | None = None) -> None:
        heapq.heappush(self._events, _Event(at_s, next(self._numbers), job, replica))
