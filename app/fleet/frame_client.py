"""The ingress's end of one connection to a replica: the reader of its frames."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from app.engine.snapshot import EngineSnapshot
from app.errors import described
from app.fleet.frame_server import Address, Hello
from app.fleet.frames import Frame, frame_decoder
from app.fleet.in_flight import InFlightRequest, ReplicaLost
from app.fleet.replica_registry import ReplicaRegistry

_CONNECT_TIMEOUT_S = 5.0
# A timer that is itself this late says that this process was busy or stopped, not that the replica is silent.
_LATE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessTimeouts:
    """When a replica counts as hung. Seconds."""

    silence_s: float  # without any frame; heartbeats come four times as often
    step_s: float  # that one step may take

    @property
    def heartbeat_s(self) -> float:
        return self.silence_s / 4


class FrameMetrics(Protocol):
    """Counts frames."""

    def frame_received(self, num_deltas: int) -> None:
        """A frame has come, with news of so many requests."""


async def connect(
    address: Address, ingress_id: str, reader: asyncio.Protocol, *, heartbeat_s: float
) -> asyncio.Transport:
    """Connect to the replica at `address`. Its frames come to `reader` as bytes, at least every `heartbeat_s`.

    Raises OSError or TimeoutError when the replica cannot be reached.
    """
    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
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
        metrics: FrameMetrics,
        timeouts: LivenessTimeouts,
        *,
        on_begun: Callable[[], object] = lambda: None,
        on_view: Callable[[EngineSnapshot], object] = lambda view: None,
    ) -> None:
        """`in_flight` are the requests of this process by the id of their current attempt.

        `on_begun` is called at the first frame, with which the replica says that it serves requests, `on_view` for each
        view that comes.
        """
        self._replica_id = replica_id
        self._registry = registry
        self._in_flight = in_flight
        self._metrics = metrics
        self._timeouts = timeouts
        self._on_begun = on_begun
        self._on_view = on_view
        self._decoder = frame_decoder()
        self._next_number = 0
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._ended: asyncio.Future[ReplicaLost] = self._loop.create_future()
        self._silence_timer: asyncio.TimerHandle
        self._expect_frame_within(timeouts.silence_s)

    @property
    def is_open(self) -> bool:
        """Whether the first frame has come and the stream has not ended."""
        return self._next_number > 0 and not self._ended.done()

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
        self._silence_timer.cancel()
        self._ended.set_result(error)

    def data_received(self, data: bytes) -> None:
        if self._ended.done():
            return
        is_first = self._next_number == 0
        self._heard_at = self._loop.time()
        try:
            for frame in self._decoder.feed(data):
                self._check(frame)
                self._registry.note(self._replica_id, frame.report)
                self._metrics.frame_received(len(frame.deltas))
                for delta in frame.deltas:
                    request = self._in_flight.get(delta.request_id)
                    if request is None or request.has_ended:
                        continue  # of an attempt that was given up
                    request.put(delta)
                    if delta.token_ids:
                        self._registry.progress(delta.request_id, len(delta.token_ids))
                if frame.view is not None:
                    self._on_view(frame.view)
        except Exception as error:
            self.end(error)
        if is_first and self.is_open:
            self._on_begun()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(exc)

    def _check(self, frame: Frame) -> None:
        """Raise ReplicaLost when frames are missing before this one, or the replica hangs."""
        if frame.number != self._next_number:
            raise ReplicaLost(f"frame {self._next_number} is missing, {frame.number} came", reason="gap")
        self._next_number += 1
        step_age_s = frame.report.step_age_s
        if step_age_s > self._timeouts.step_s:
            raise ReplicaLost(f"its step has been running for {step_age_s:.1f} s", reason="stuck")

    def _expect_frame_within(self, wait_s: float) -> None:
        self._silence_timer = self._loop.call_later(wait_s, self._check_silence, self._loop.time() + wait_s)

    def _check_silence(self, due_at: float) -> None:
        """Called `silence_s` after the last frame that was known when the timer was set."""
        now = self._loop.time()
        if now - due_at > _LATE_S:
            self._heard_at = now  # frames may have arrived that this process has not read yet
        silent_s = now - self._heard_at
        if silent_s >= self._timeouts.silence_s:
            self.end(ReplicaLost(f"silent for {silent_s:.1f} s", reason="silent"))
        else:
            self._expect_frame_within(self._timeouts.silence_s - silent_s)
