"""The ingress's end of the connection to one replica. A lost connection is reopened while the replica exists."""

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

# Limits for frames that serve no request: the largest burst in KiB (each frame is rounded up), and the rate in KiB per
# second. A healthy replica sends a few per second: heartbeats, reports after aborts, and tokens of abandoned attempts.
_MOST_IDLE_KIB, _IDLE_KIB_PER_S = 8192.0, 256.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverLimits:
    """How long a fleet waits for its replicas, and how often it retries a request."""

    place_timeout_s: float  # how long a request waits for an available replica
    silence_s: float  # time without a frame after which a replica counts as hung; four heartbeats are due in this time
    step_s: float  # duration of one step after which a replica counts as hung
    # How often a request may resume after losing its replica. Three losses are no coincidence: an update is failing, or
    # the request is crashing its replicas. Each retry costs a prefill and may cost another replica.
    max_resumes: int = 3

    drain_s: float = 120.0  # how long a replica that accepts no more requests may take to finish its requests

    @property
    def leave_after_s(self) -> float:
        """When a draining replica's requests are moved. The rest of `drain_s` is for transferring their KV memory."""
        return 0.75 * self.drain_s

    @property
    def heartbeat_s(self) -> float:
        return self.silence_s / 4


class ReplicaConnection:
    """Keeps a stream to one replica open and reports each loss of the stream. A `FrameReader` handles the frames."""

    def __init__(
        self,
        replica_id: str,
        make_reader: Callable[[], FrameReader],
        connect: Callable[[FrameReader], Awaitable[asyncio.Transport]],
        on_lost: Callable[[str, ReplicaLost], None],
        on_connected: Callable[[], None],
    ) -> None:
        """`connect` opens a stream for a reader. `on_connected` is called after each successful `connect`.

        `on_lost(replica_id, lost)` is called whenever a stream ends or cannot be opened.
        """
        self._replica_id = replica_id
        self._make_reader = make_reader
        self._connect = connect
        self._on_lost = on_lost
        self._on_connected = on_connected
        self._reader: FrameReader | None = None
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []  # messages to write at the end of this turn of the event loop
        self._keeping_open = asyncio.get_running_loop().create_task(self._keep_open())

    @property
    def is_open(self) -> bool:
        """Whether the stream is connected and the replica's first frame has arrived."""
        return self._transport is not None and self._reader is not None and self._reader.is_open

    def send(self, message: Message) -> None:
        """Send a message if a stream is open. Messages may be lost when the stream breaks.

        All messages from one turn of the event loop are written together, because a write may wake the replica's
        process, and this costs more than the rest of the work for a message.
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
        """Stop reading and reconnecting. `on_lost` is not called."""
        self._keeping_open.cancel()

    async def _keep_open(self) -> None:
        first_delay_s = 0.1
        loop, delay_s = asyncio.get_running_loop(), first_delay_s
        longest_delay_s = 5.0
        known = ""  # the last loss that was logged
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
        """Open and read one stream until it ends. Returns why it ended."""
        reader = self._reader = self._make_reader()
        holding = asyncio.get_running_loop().create_task(self._hold(reader))
        try:
            return await reader.ended()
        finally:
            reader.end(None)
            holding.cancel()

    async def _hold(self, reader: FrameReader) -> None:
        """Open a stream and keep it open until this task is cancelled."""
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
    """Counts the events of a fleet. `app.metrics.ModelMetrics` implements this protocol."""

    def frame_received(self, num_deltas: int) -> None:
        """Count a received frame that carries deltas for `num_deltas` requests."""

    def dispatched(self, reason: str) -> None:
        """Count a request that is sent to a replica. `reason` is the name of the policy that chose the replica."""

    def resumed(self, reason: str) -> None:
        """Count a request that resumes on another replica. `reason` is `ReplicaLost.reason`."""


async def connect(
    address: Address, ingress_id: str, reader: asyncio.Protocol, *, heartbeat_s: float
) -> asyncio.Transport:
    """Connect to the replica at `address`. `reader` receives its frames as bytes, at least one every `heartbeat_s`.

    Raises OSError or TimeoutError if the replica cannot be reached.
    """
    async with asyncio.timeout(5.0):
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: reader, address.host, address.port)
    transport.write(Hello(address.secret, ingress_id, heartbeat_s).line())
    return transport


class FrameReader(asyncio.Protocol):
    """Reads a stream of frames. Passes the reports to the registry, and the deltas to their requests."""

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
        """`in_flight` maps the id of each current attempt to its request in this process.

        `on_begun` is called after the first frame, and `on_ended` when the stream ends. `on_short` is called for each
        report that the replica is short of KV memory for its running requests. `on_view` receives each view, and
        `on_metrics` each answer to `AskMetrics`. Both return whether this process requested it.
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
        self.is_open = False  # between the first frame and the end of the stream
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._ended: asyncio.Future[ReplicaLost] = self._loop.create_future()
        self._silence_timer: asyncio.TimerHandle
        self._expect_frame_within(limits.silence_s)

    async def ended(self) -> ReplicaLost:
        """Wait until the stream ends. Returns why it ended."""
        return await self._ended

    def end(self, error: Exception | None) -> None:
        """End the stream and ignore later data. `error` is None if the replica closed the stream."""
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
                        continue  # the delta belongs to an abandoned attempt
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
            raise ReplicaLost(f"expected frame {self._next_number}, received frame {frame.number}", reason="gap")
        self._next_number += 1
        step_age_s = frame.report.step_age_s
        if step_age_s > self._limits.step_s:
            raise ReplicaLost(f"its step has been running for {step_age_s:.1f} s", reason="stuck")

    def _count_idle(self, kib: float) -> None:
        """Count a frame of this size that served no request. Raises ReplicaLost if there are too many such frames."""
        now = self._heard_at
        self._idle_kib = max(0.0, self._idle_kib - (now - self._idle_counted_at) * _IDLE_KIB_PER_S) + kib
        self._idle_counted_at = now
        if self._idle_kib > _MOST_IDLE_KIB:
            raise ReplicaLost("it sends too many frames without data for any request", reason="broken")

    def _expect_frame_within(self, wait_s: float) -> None:
        self._silence_timer = self._loop.call_later(wait_s, self._check_silence, self._loop.time() + wait_s)

    def _check_silence(self, due_at: float) -> None:
        """End the stream if no frame has arrived for `silence_s`. Otherwise sets the timer again."""
        now = self._loop.time()
        if now - due_at > 0.2:  # this process was busy or stopped, so there may be frames that it has not read
            self._heard_at = now
        silent_s = now - self._heard_at
        if silent_s >= self._limits.silence_s:
            self.end(ReplicaLost(f"it has been silent for {silent_s:.1f} s", reason="silent"))
        else:
            self._expect_frame_within(self._limits.silence_s - silent_s)
