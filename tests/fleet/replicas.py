"""Replicas in this process: real engines and outboxes, which can be killed, hung, slowed and filled."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from app.engine.async_engine import AsyncEngine
from app.engine.batch import Batch, StepResult
from app.engine.request import Request
from app.fleet import (
    FailoverLimits,
    Fleet,
    Frame,
    FrameReader,
    LivenessTimeouts,
    Outbox,
    ReplicaLost,
    ReplicaRegistry,
    report_of,
)
from app.fleet.dispatch import Group, GroupChooser, ReplicaReport, make_policy
from app.fleet.frames import encode
from tests.fakes import CountingRunner, build_fake_engine
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

    def run(self, batch: Batch) -> StepResult:
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
        return super().run(batch)


class LocalReplica:
    """One engine with the outbox of the one ingress there is."""

    def __init__(self, replica_id: str, *, step_s: float, max_requests: int, group: str = "") -> None:
        self.replica_id = replica_id
        self.runner = SteppedRunner(step_s)
        self.engine = AsyncEngine(build_fake_engine(runner=self.runner, num_blocks=400), max_requests=max_requests)
        self.group = group
        self.is_dead = False
        self.is_heard = asyncio.Event()  # else nothing comes through and nothing arrives
        self.is_heard.set()
        self.died = asyncio.Event()
        self.served: list[Request] = []
        self.aborted: list[str] = []
        self.outbox = Outbox(self._report, orphaned_after_s=60.0, on_orphaned=lambda: None)

    def _report(self) -> ReplicaReport:
        engine = self.engine
        return report_of(
            engine.stats(), group=self.group, max_requests=engine.max_requests, step_age_s=engine.step_age_s
        )

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.engine.abort(request_id)

    def kill(self) -> None:
        self.is_dead = True
        self.died.set()

    def stop(self) -> None:
        self.runner.go()
        self.engine.shutdown()


class LocalStream(asyncio.BaseTransport):
    """Carries the frames of one replica to one reader as bytes, while the replica is heard."""

    def __init__(self, replica: LocalReplica, reader: FrameReader) -> None:
        super().__init__()
        self._replica = replica
        self._reader = reader
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()
        self._carrying = asyncio.ensure_future(self._carry())

    @property
    def is_writable(self) -> bool:
        return True

    def send(self, frame: Frame) -> None:
        self._frames.put_nowait(encode(frame))

    def close(self) -> None:
        self._replica.outbox.detach(self)
        self._carrying.cancel()
        self._reader.connection_lost(None)

    async def _carry(self) -> None:
        while True:
            data = await self._frames.get()
            if self._replica.is_dead:
                self._reader.connection_lost(RuntimeError("the actor died"))
                return
            await self._replica.is_heard.wait()
            self._reader.data_received(data)


class LocalTransport:
    """`ReplicaTransport` without a socket: bytes go from the outbox to the reader."""

    def __init__(self, registry: ReplicaRegistry, replicas: list[LocalReplica]) -> None:
        self.registry = registry
        self.replicas = {replica.replica_id: replica for replica in replicas}
        self.present = set(self.replicas)
        self.has_replica = asyncio.Event()
        self.has_replica.set()
        self.is_sent = asyncio.Event()  # else requests stay between the order and the replica
        self.is_sent.set()

    async def serve(self, request: Request) -> None:
        await self.has_replica.wait()
        replica = self.replicas[self.registry.order(request.request_id, sorted(self.present))[0]]
        await self.is_sent.wait()
        self.registry.placed(request.request_id, replica.replica_id)
        await replica.is_heard.wait()
        if replica.is_dead:
            raise ReplicaLost("the actor died", reason="call_failed")
        replica.served.append(request)
        carrying = asyncio.ensure_future(
            replica.outbox.serve(request, lambda r: replica.engine.submit(r, replica.outbox), replica.abort)
        )
        dying = asyncio.ensure_future(replica.died.wait())
        try:
            await asyncio.wait({carrying, dying}, return_when=asyncio.FIRST_COMPLETED)
            if dying.done():
                raise ReplicaLost("the actor died", reason="call_failed")
            carrying.result()
        finally:
            dying.cancel()
            carrying.cancel()
            await asyncio.gather(carrying, dying, return_exceptions=True)

    async def connect(self, replica_id: str, reader: FrameReader, *, heartbeat_s: float) -> LocalStream:
        replica = self.replicas[replica_id]
        if replica.is_dead:
            raise RuntimeError("the actor died")
        stream = LocalStream(replica, reader)
        replica.outbox.attach(stream, heartbeat_s=heartbeat_s)
        return stream

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
            liveness=LivenessTimeouts(silence_s=silence_s, step_s=stuck_s),
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
