"""The ingress's end of the connection to one replica, opened again for as long as the replica is there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Protocol

from app.engine.request import Address
from app.engine.snapshot import EngineSnapshot
from app.errors import described
from app.fleet.frame_server import Hello
from app.fleet.frames import Frame, InvalidFrame, Message, encode, frame_decoder
from app.fleet.in_flight import InFlightRequest, ReplicaLost
from app.fleet.replica_registry import ReplicaRegistry

logger = logging.getLogger(__name__)

# Frames that bring no request anything, in KiB, each rounded up: so many at once, and so many a second. A replica sends
# a few a second: heartbeats, reports after aborts, and tokens of attempts that were given up a moment before.
_MOST_IDLE_KIB, _IDLE_KIB_PER_S = 8192.0, 256.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverLimits:
    """How long a fleet waits for its replicas, and how often it tries. Seconds."""

    place_timeout_s: float  # for any replica to be there
    silence_s: float  # without any frame, after which a replica counts as hung; heartbeats come four times as often
    step_s: float  # that one step may take, likewise
    # How often a request goes on elsewhere when its replica is lost. Three losses under one request are not chance any
    # more but an update that goes wrong or the request's own fault, and each next try costs a replica and the prompt's
    # time.
    max_resumes: int = 3

    drain_s: float = 120.0  # that a replica which takes no more requests may finish those it has

    @property
    def leave_after_s(self) -> float:
        """When the requests of such a replica go on elsewhere: the rest is for taking their KV memory along."""
        return 0.75 * self.drain_s

    @property
    def heartbeat_s(self) -> float:
        return self.silence_s / 4


class ReplicaConnection:
    """Keeps a stream to one replica open. Its owner gets every loss; frames go where the reader puts them."""

    def __init__(
        self,
        replica_id: str,
        make_reader: Callable[[], FrameReader],
        connect: Callable[[FrameReader], Awaitable[asyncio.Transport]],
        on_lost: Callable[[str, ReplicaLost], None],
        on_connected: Callable[[], None],
    ) -> None:
        """`connect` opens a stream for a reader; `on_connected` is called when it has.

        `on_lost(replica_id, lost)` is called whenever the stream ends: frames may be missing from then on.
        """
        self._replica_id = replica_id
        self._make_reader = make_reader
        self._connect = connect
        self._on_lost = on_lost
        self._on_connected = on_connected
        self._reader: FrameReader | None = None
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []  # messages of this turn of the event loop
        self._keeping_open = asyncio.get_running_loop().create_task(self._keep_open())

    @property
    def is_open(self) -> bool:
        """Whether the replica takes messages now."""
        return self._transport is not None and self._reader is not None and self._reader.is_open

    def send(self, message: Message) -> None:
        """Send a message, while there is a stream. What is sent on a stream that breaks may be lost with it.

        All messages of one turn of the event loop are written at once: to write may wake the replica's process, which
        takes longer than all else that is done for a message.
        """
        if self._transport is None:
            return
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(encode(message))

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self._transport is not None:
            self._transport.write(b"".join(outgoing))

    def close(self) -> None:
        """Read no more. `on_lost` is not called."""
        self._keeping_open.cancel()

    async def _keep_open(self) -> None:
        first_delay_s = 0.1
        loop, delay_s = asyncio.get_running_loop(), first_delay_s
        longest_delay_s = 5.0
        known = ""  # what is in the log
        while True:
            began_at = loop.time()
            lost = await self._read_stream()
            if str(lost) != known:
                known = str(lost)
                logger.warning("replica %s: %s", self._replica_id, lost)
            self._on_lost(self._replica_id, lost)
            lasted_s = loop.time() - began_at
            if lasted_s > 2 * longest_delay_s:
                delay_s, known = first_delay_s, ""
            else:
                delay_s = min(2 * delay_s, longest_delay_s)
            await asyncio.sleep(delay_s)

    async def _read_stream(self) -> ReplicaLost:
        """Read one stream to its end; returns why it ended."""
        reader = self._reader = self._make_reader()
        holding = asyncio.get_running_loop().create_task(self._hold(reader))
        try:
            return await reader.ended()
        finally:
            reader.end(None)
            holding.cancel()

    async def _hold(self, reader: FrameReader) -> None:
        """Open a stream and hold it until this is cancelled."""
        try:
            transport = self._transport = await self._connect(reader)
        except Exception as error:
            reader.end(error)
            return
        self._on_connected()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._transport = None
            transport.close()


class FleetMetrics(Protocol):
    """Counts what a fleet does. Implemented by `app.metrics.ModelMetrics`."""

    def frame_received(self, num_deltas: int) -> None:
        """A frame has come, with news of so many requests."""

    def dispatched(self, reason: str) -> None:
        """A request was sent to a replica; `reason` is the name of the policy that chose it."""

    def resumed(self, reason: str) -> None:
        """A request goes on at another replica; `reason` is that of the ReplicaLost."""


async def connect(
    address: Address, ingress_id: str, reader: asyncio.Protocol, *, heartbeat_s: float
) -> asyncio.Transport:
    """Connect to the replica at `address`. Its frames come to `reader` as bytes, at least every `heartbeat_s`.

    Raises OSError or TimeoutError when the replica cannot be reached.
    """
    async with asyncio.timeout(5.0):
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: reader, address.host, address.port)
    transport.write(Hello(address.secret, ingress_id, heartbeat_s).line())
    return transport


class FrameReader(asyncio.Protocol):
    """One stream of frames: reports go to the registry, deltas to their requests, as their bytes arrive."""

    def __init__(
        self,
        replica_id: str,
        registry: ReplicaRegistry,
        in_flight: Mapping[str, InFlightRequest],
        metrics: FleetMetrics,
        limits: FailoverLimits,
        *,
        on_begun: Callable[[], object] = lambda: None,
        on_ended: Callable[[], object] = lambda: None,
        on_view: Callable[[EngineSnapshot], bool] = lambda view: False,
        on_metrics: Callable[[bytes], bool] = lambda metrics: False,
        on_short: Callable[[], object] = lambda: None,
    ) -> None:
        """`in_flight` are the requests of this process by the id of their current attempt.

        `on_begun` is called at the first frame, with which the replica says that it serves requests, `on_ended` when
        the stream has ended, `on_short` for each report with too little free KV memory for what runs. `on_view` is
        called for each view that comes, `on_metrics` for each answer to AskMetrics; both return whether it was asked
        for.
        """
        self._replica_id = replica_id
        self._registry = registry
        self._in_flight = in_flight
        self._metrics = metrics
        self._limits = limits
        self._on_begun = on_begun
        self._on_ended = on_ended
        self._on_view = on_view
        self._on_metrics = on_metrics
        self._on_short = on_short
        self._decoder = frame_decoder()
        self._next_number = 0
        self._idle_kib, self._idle_counted_at = 0.0, -inf
        self.is_open = False  # the first frame has come and the stream has not ended
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._ended: asyncio.Future[ReplicaLost] = self._loop.create_future()
        self._silence_timer: asyncio.TimerHandle
        self._expect_frame_within(limits.silence_s)

    async def ended(self) -> ReplicaLost:
        """Wait for the end of the stream; returns why it ended."""
        return await self._ended

    def end(self, error: Exception | None) -> None:
        """Nothing that arrives from now on counts. None: the replica has closed the stream."""
        if self._ended.done():
            return
        if error is None:
            error = ReplicaLost("its stream ended", reason="ended")
        elif not isinstance(error, ReplicaLost):
            error = ReplicaLost(f"its stream broke: {described(error)}", reason="broken")
        self.is_open = False
        self._on_ended()
        self._silence_timer.cancel()
        self._ended.set_result(error)

    def data_received(self, data: bytes) -> None:
        if self._ended.done():
            return
        is_first = self._next_number == 0
        self._heard_at = self._loop.time()
        try:
            frames = self._decoder.feed(data)
            num_kib = len(data) / 1024 / len(frames) if frames else 0.0
            for frame in frames:
                self._check(frame)
                if frame.number == 0:
                    self._registry.note_fields(self._replica_id, frame.known_fields)
                self._registry.note(self._replica_id, frame.report, frame.prefixes)
                if frame.report.is_short_of_memory:
                    self._on_short()
                self._metrics.frame_received(len(frame.deltas))
                brings_something = frame.number == 0
                for delta in frame.deltas:
                    request = self._in_flight.get(delta.request_id)
                    if request is None or request.has_ended:
                        continue  # of an attempt that was given up
                    request.put(delta)
                    brings_something = True
                    if delta.token_ids:
                        self._registry.progress(delta.request_id, len(delta.token_ids))
                if frame.view is not None:
                    brings_something |= self._on_view(frame.view)
                if frame.metrics is not None:
                    brings_something |= self._on_metrics(frame.metrics)
                if not brings_something:
                    self._count_idle(1 + num_kib)
        except InvalidFrame as error:
            self.end(ReplicaLost(f"its stream broke: {error}", reason="broken"))
        except Exception as error:
            self.end(error)
        if is_first and self._next_number and not self._ended.done():
            self.is_open = True
            self._on_begun()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(exc)

    def _check(self, frame: Frame) -> None:
        if frame.number != self._next_number:
            raise ReplicaLost(f"frame {self._next_number} is missing, {frame.number} came", reason="gap")
        self._next_number += 1
        step_age_s = frame.report.step_age_s
        if step_age_s > self._limits.step_s:
            raise ReplicaLost(f"its step has been running for {step_age_s:.1f} s", reason="stuck")

    def _count_idle(self, kib: float) -> None:
        """A frame of this size has brought no request anything. Raises ReplicaLost when there are too many."""
        now = self._heard_at
        self._idle_kib = max(0.0, self._idle_kib - (now - self._idle_counted_at) * _IDLE_KIB_PER_S) + kib
        self._idle_counted_at = now
        if self._idle_kib > _MOST_IDLE_KIB:
            raise ReplicaLost("it sends too many frames that bring nothing", reason="broken")

    def _expect_frame_within(self, wait_s: float) -> None:
        self._silence_timer = self._loop.call_later(wait_s, self._check_silence, self._loop.time() + wait_s)

    def _check_silence(self, due_at: float) -> None:
        """Called `silence_s` after the last frame that was known when the timer was set."""
        now = self._loop.time()
        if now - due_at > 0.2:  # this process was busy or stopped, so frames may have arrived that it has not read yet
            self._heard_at = now
        silent_s = now - self._heard_at
        if silent_s >= self._limits.silence_s:
            self.end(ReplicaLost(f"silent for {silent_s:.1f} s", reason="silent"))
        else:
            self._expect_frame_within(self._limits.silence_s - silent_s)
