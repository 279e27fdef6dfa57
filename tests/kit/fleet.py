"""Replicas in this process: real engines and sessions, which can be killed, hung, slowed and filled."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, cast

from msgspec import structs

from app.engine.adapter_store import AdapterStore
from app.engine.async_engine import AsyncEngine
from app.engine.batch import StepBatch, StepResult
from app.engine.request import Adapter, FinishReason, Queued, Request
from app.engine.snapshot import EngineSnapshot
from app.engine.speculation.drafter import LookupDrafter
from app.errors import UnsupportedAdapter
from app.fleet import FailoverLimits, Fleet, Frame, FrameReader, IngressSession, ReplicaRegistry, report_of_engine
from app.fleet.dispatch import Group, GroupChooser, ReplicaReport, make_policy
from app.fleet.frames import (
    FRAME_VERSION,
    AbortRequest,
    AskMetrics,
    SubmitRequest,
    WatchEngine,
    encode,
    message_decoder,
)
from app.fleet.prefix_feed import PrefixFeed
from app.fleet.uncomputed_prompts import UncomputedPrompts
from tests.kit.engine import VOCAB_SIZE, CountingRunner, Outcome, build_fake_engine
from tests.waiting import until


class SteppedRunner(CountingRunner):
    """A CountingRunner whose steps take a little time, and which can be held in the middle of its work."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s
        self._hold: tuple[int, threading.Event] | None = None
        self.is_held = False
        self.is_broken = False
        self.deadly_token_id: int | None = None  # a replica that computes it dies
        self.on_deadly: Callable[[], object] = lambda: None

    def hold_before(self, step: int) -> None:
        """Compute nothing from that step on (the first is 0), until `go`."""
        self._hold = step, threading.Event()

    def go(self) -> None:
        """Hold nothing any more."""
        if self._hold is not None:
            (_, gone), self._hold = self._hold, None
            gone.set()

    def run(self, batch: StepBatch) -> StepResult:
        hold = self._hold
        if hold is not None and len(self.batches) >= hold[0]:
            self.is_held = True
            hold[1].wait()
            self.is_held = False
        time.sleep(self.step_s)
        if self.is_broken:
            raise RuntimeError("a broken device")
        if any(self.deadly_token_id in item.token_ids for item in batch.scheduled):
            self.on_deadly()
        result = super().run(batch)
        drawn = zip(result.token_ids, batch.sampled, strict=True)
        return result._replace(token_ids=[adapted_token(token, item.adapter) for token, item in drawn])


def adapted_token(token_id: int, adapter: object) -> int:
    """What is drawn with an adapter where `token_id` would be without one."""
    return token_id if adapter is None else 2 + (token_id - 2 + cast(int, adapter)) % (VOCAB_SIZE - 2)


class LocalReplica:
    """One engine, with a session for the one ingress there is."""

    def __init__(self, replica_id: str, *, step_s: float, max_requests: int, group: str = "") -> None:
        self.replica_id = replica_id
        self.runner = SteppedRunner(step_s)
        self.has_other_files = False  # than adapters were named with
        engine = build_fake_engine(
            runner=self.runner,
            num_blocks=400,
            drafter=LookupDrafter(only_predictions=True),
            adapters=AdapterStore(self._load_adapter, unload=lambda weights: None, max_loaded=4),
        )
        self.prefixes = PrefixFeed()
        self.prompts = UncomputedPrompts()
        engine.on_prefixes(self.prefixes.note)
        self.engine = AsyncEngine(engine, max_requests=max_requests)
        self.group = group
        self.weights = 0
        self.frame_version = FRAME_VERSION
        self.is_dead = False
        self.is_heard = asyncio.Event()  # else nothing comes through and nothing arrives
        self.is_heard.set()
        self.served: list[Request] = []
        self.aborted: list[str] = []
        self.stream: LocalStream | None = None
        self.is_watched: bool | None = None  # as it was told last
        self.sends_views = True
        self.metrics: list[bytes] = []  # its answers to one AskMetrics
        self.num_asked = 0
        self.known_fields: tuple[str, ...] | None = None  # in place of all that this version knows
        self.reported: dict[str, Any] = {}  # in place of what is so

    def _load_adapter(self, adapter: Adapter, make_room: Callable[[], None]) -> int:
        """What it adds to every token that is drawn."""
        if self.has_other_files:
            raise UnsupportedAdapter(f"the adapter {adapter.name} is another one here")
        make_room()
        return int(adapter.digest)

    def report(self) -> ReplicaReport:
        report = report_of_engine(self.engine, group=self.group, weights=self.weights)
        return structs.replace(report, sends_views=self.sends_views, **self.reported)

    async def adapter_of(self, request: Request) -> Any:
        return await self.engine.adapter_of(request)

    async def matcher_of(self, request: Request) -> Any:
        return await self.engine.matcher_of(request)

    def submit(self, request: Request, receiver: Any, matcher: Any = None, adapter: Any = None) -> Queued:
        self.served.append(request)
        return self.engine.submit(request, receiver, matcher, adapter)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.engine.abort(request_id)

    def kill(self) -> None:
        self.is_dead = True
        if self.stream is not None:
            self.stream.break_off(RuntimeError("the actor died"))

    def stop(self) -> None:
        self.runner.go()
        self.engine.shutdown()


class LocalStream(asyncio.Transport):
    """Carries bytes between one replica and one reader, while the replica is heard."""

    def __init__(self, replica: LocalReplica, reader: FrameReader, *, heartbeat_s: float) -> None:
        super().__init__()
        self._replica = replica
        self._reader = reader
        self._to_reader: asyncio.Queue[bytes] = asyncio.Queue()
        self._to_replica: asyncio.Queue[bytes] = asyncio.Queue()
        self._messages = message_decoder()
        self.is_writable = True
        self._session = IngressSession(
            self, replica, replica.report, prefixes=replica.prefixes.open(), prompts=replica.prompts,
            heartbeat_s=heartbeat_s,
        )  # fmt: skip
        self._carrying = [asyncio.ensure_future(self._carry_frames()), asyncio.ensure_future(self._carry_messages())]

    def send(self, frame: Frame) -> None:
        if self._replica.known_fields is not None:
            frame = structs.replace(frame, known_fields=self._replica.known_fields)
        self._to_reader.put_nowait(bytes([self._replica.frame_version]) + encode(frame)[1:])

    def write(self, data: Any) -> None:
        self._to_replica.put_nowait(bytes(data))

    def close(self) -> None:
        self.break_off(None)

    def break_off(self, error: Exception | None) -> None:
        self.is_writable = False
        for each in self._carrying:
            each.cancel()
        self._session.close()
        self._reader.connection_lost(error)

    async def _carry_frames(self) -> None:
        while True:
            data = await self._to_reader.get()
            await self._replica.is_heard.wait()
            self._reader.data_received(data)

    async def _carry_messages(self) -> None:
        while True:
            data = await self._to_replica.get()
            await self._replica.is_heard.wait()
            for message in self._messages.feed(data):
                match message:
                    case SubmitRequest():
                        self._session.submit(message.request, num_prefill_tokens=message.num_prefill_tokens)
                    case AbortRequest():
                        self._session.abort(message.request_id)
                    case WatchEngine():
                        self._replica.is_watched = message.is_watched
                    case AskMetrics():
                        self._replica.num_asked += 1
                        for answer in self._replica.metrics:
                            self._session.send_metrics(answer)

    def show(self, view: EngineSnapshot) -> None:
        self._session.show(view)

    def send_metrics(self, metrics: bytes) -> None:
        self._session.send_metrics(metrics)


class LocalTransport:
    """`ReplicaTransport` without a socket: bytes go from the session to the reader and back."""

    def __init__(self, registry: ReplicaRegistry, replicas: list[LocalReplica]) -> None:
        self.registry = registry
        self.replicas = {replica.replica_id: replica for replica in replicas}
        self.present = set(self.replicas)
        self.has_replica = asyncio.Event()
        self.has_replica.set()
        self.num_waking = 0  # requests that wait for a replica to start

    async def wake(self) -> None:
        self.num_waking += 1
        try:
            await self.has_replica.wait()
        finally:
            self.num_waking -= 1

    async def connect(self, replica_id: str, reader: FrameReader, *, heartbeat_s: float) -> LocalStream:
        replica = self.replicas[replica_id]
        if replica.is_dead:
            raise RuntimeError("the actor died")
        replica.stream = LocalStream(replica, reader, heartbeat_s=heartbeat_s)
        return replica.stream

    def leave(self, replica_id: str) -> None:
        """It takes no more requests and ends what it has."""
        self.present.discard(replica_id)
        if not self.present:
            self.has_replica.clear()
        self.registry.set_replicas(self.present)

    def join(self, replica_id: str) -> None:
        """It takes requests from now on."""
        self.present.add(replica_id)
        self.has_replica.set()
        self.registry.set_replicas(self.present)


class Counts:
    """What a fleet tells its metrics."""

    def __init__(self) -> None:
        self.placed: Counter[str] = Counter()
        self.resumes: Counter[str] = Counter()
        self.num_frames = 0

    def dispatched(self, reason: str) -> None:
        self.placed[reason] += 1

    def resumed(self, reason: str) -> None:
        self.resumes[reason] += 1

    def frame_received(self, num_deltas: int) -> None:
        self.num_frames += 1


class LocalFleet:
    """A fleet over such replicas. Use it inside an event loop, `async with`.

    Its timeouts are long where a test sets none: on a busy machine every replica may be slow.
    """

    def __init__(
        self,
        num_replicas: int,
        *,
        dispatch: Any = "least_loaded",
        step_s: float = 0.001,
        max_requests: int = 100,
        max_resumes: int = 3,
        silence_s: float = 60.0,
        stuck_s: float = 60.0,
        groups: tuple[Group, ...] = (),
        place_timeout_s: float = 5.0,
        drain_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        names = [group.name for group in groups]
        self._step_s = step_s
        self._max_requests = max_requests
        self.replicas = [self._replica(n, names[n % len(names)] if names else "") for n in range(num_replicas)]
        self.registry = ReplicaRegistry(
            make_policy(dispatch, random.Random(1)), GroupChooser(groups), block_size=4, clock=time.monotonic
        )
        self.counts = Counts()
        self.tasks: list[asyncio.Task[None]] = []  # of a test; they end with the block
        self.transport = LocalTransport(self.registry, self.replicas)
        self._limits = FailoverLimits(
            max_resumes=max_resumes,
            place_timeout_s=place_timeout_s,
            silence_s=silence_s,
            step_s=stuck_s,
            drain_s=drain_s,
        )
        self._clock = clock

    async def __aenter__(self) -> LocalFleet:
        self.fleet = Fleet(self.transport, self.registry, self._limits, self.counts, clock=self._clock)
        self.registry.set_replicas(self.transport.present)
        await until(lambda: len(self.registry.reports) == len(self.replicas))
        return self

    def _replica(self, number: int, group: str = "") -> LocalReplica:
        return LocalReplica(f"r{number}", step_s=self._step_s, max_requests=self._max_requests, group=group)

    def join_another(self) -> LocalReplica:
        """A new replica, which takes requests from now on."""
        replica = self._replica(len(self.replicas))
        self.replicas.append(replica)
        self.transport.replicas[replica.replica_id] = replica
        self.transport.join(replica.replica_id)
        return replica

    async def answer(self, request: Request) -> Outcome:
        """What the caller of a request hears."""
        outcome = Outcome()
        async with aclosing(self.fleet.generate(request)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                assert delta.request_id == request.request_id
                outcome.book([delta])
        return outcome

    def start(self, requests: Iterable[Request]) -> list[asyncio.Task[Outcome]]:
        """The answers to these requests, which begin now."""
        return [asyncio.create_task(self.answer(request)) for request in requests]

    def suspects(self) -> list[str]:
        return [each for each in self.registry.replica_ids if self.registry.is_suspect(each)]

    def hold(self, *replicas: LocalReplica, before: int = 5) -> None:
        """These replicas will stop in the middle of their work, before that step, and stay there until they may go."""
        for replica in replicas:
            replica.runner.hold_before(before)

    async def held(self, *replicas: LocalReplica) -> None:
        """They have come to that step."""
        await until(lambda: all(replica.runner.is_held for replica in replicas))

    def go(self) -> None:
        """Hold no replica any more."""
        for replica in self.replicas:
            replica.runner.go()

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        self.fleet.close()
        for replica in self.replicas:
            await asyncio.to_thread(replica.stop)


async def check(requests: Iterable[Request], answers: Iterable[Awaitable[Outcome]]) -> None:
    """Every request has its tokens and its end."""
    for request, outcome in zip(requests, await asyncio.gather(*answers), strict=True):
        outcome.check(request)
        assert outcome.reasons[request.request_id] in (FinishReason.STOP, FinishReason.LENGTH)


def make_report(**fields: Any) -> ReplicaReport:
    """The report of an idle replica, with these fields changed."""
    usual: dict[str, Any] = {
        "group": "", "num_requests": 0, "num_background": 0, "num_unpreemptible_background": 0, "max_requests": 10,
        "max_running": 8, "num_waiting_tokens": 0, "num_kv_tokens": 4096, "tokens_per_s": 100.0, "ended_per_s": 4.0,
        "step_age_s": 0.0,
    }  # fmt: skip
    return ReplicaReport(**{**usual, **fields})
