"""The replica's end of the stream to one ingress: what happened to that ingress's requests and is not sent yet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from app.engine.request import Queued, Request, TokenDelta, merge_deltas
from app.errors import Unavailable
from app.fleet.dispatch import ReplicaReport
from app.fleet.frames import Frame

logger = logging.getLogger(__name__)

Submit = Callable[[Request], Queued]


class FrameStream(Protocol):
    """Carries frames to one ingress."""

    def send(self, frame: Frame) -> None:
        """Send a frame. Only called while `is_writable`."""
        ...

    @property
    def is_writable(self) -> bool:
        """Whether the ingress keeps up. `Outbox.flush` must be called when it becomes true again."""
        ...

    def close(self) -> None:
        """Close the stream: a newer one has taken its place."""
        ...


class Outbox:
    """Collects the deltas of one ingress's requests and sends them as frames. Belongs to one event loop.

    A slow ingress gets fewer and longer frames: what is kept is bounded by the tokens of the requests.
    """

    def __init__(
        self, report: Callable[[], ReplicaReport], *, orphaned_after_s: float, on_orphaned: Callable[[], object]
    ) -> None:
        """`report` is called for each frame. Without a stream for `orphaned_after_s`, all requests end."""
        self._report = report
        self._on_orphaned = on_orphaned
        self._orphaned_after_s = orphaned_after_s
        self._deltas: dict[str, list[TokenDelta]] = {}  # not sent yet, by request id, in the order of their first
        self._ends: dict[str, asyncio.Future[None]] = {}  # of the requests that have not ended
        self._stream: FrameStream | None = None
        self._next_number = 0  # of the stream's next frame
        self._heartbeat_s = 0.0
        self._sent_at = 0.0  # by the event loop's clock
        self._timer = self._begin_orphan_timer()

    # ------------------------------------------------------------------ requests

    async def serve(self, request: Request, submit: Submit, abort: Callable[[str], None]) -> None:
        """Submit a request, take its deltas, and return when it has ended. Cancelling this aborts the request.

        The stream says first that the request is queued, and where.

        Raises:
            CarouselError: from `submit`; nothing was queued then.
            Unavailable: there was no stream for too long; the request is aborted.
        """
        request_id = request.request_id
        queued = submit(request)
        end = self._ends[request_id] = asyncio.get_running_loop().create_future()
        self.put_all([TokenDelta(request_id, (), queued=queued)])
        try:
            await end
        finally:
            if self._ends.pop(request_id, None) is not None:  # it has not ended by itself
                abort(request_id)
                self._deltas.pop(request_id, None)

    def put_all(self, deltas: Iterable[TokenDelta]) -> None:
        """Send these deltas of the ingress's requests, or keep them while the ingress is slow or away."""
        kept = self._deltas
        for delta in deltas:
            of_request = kept.get(delta.request_id)
            if of_request is None:
                kept[delta.request_id] = [delta]
            else:
                of_request.append(delta)
            if delta.finish_reason is not None:
                end = self._ends.pop(delta.request_id, None)
                if end is not None and not end.done():
                    end.set_result(None)
        self.flush()

    # ------------------------------------------------------------------ the stream

    def attach(self, stream: FrameStream, *, heartbeat_s: float) -> None:
        """Send on this stream from now on: a frame at once, then whenever something is new and every `heartbeat_s`.

        The stream before is closed: an ingress that has lost one opens another.
        """
        before, self._stream = self._stream, stream
        if before is not None:
            before.close()
        self._timer.cancel()
        self._next_number = 0
        self._heartbeat_s = heartbeat_s
        self._send_frame(stream)
        self._timer = asyncio.get_running_loop().call_later(heartbeat_s, self._beat)

    def detach(self, stream: FrameStream) -> None:
        """A stream has ended. Nothing happens when it was not the newest."""
        if stream is self._stream:
            self._stream = None
            self._timer.cancel()
            self._timer = self._begin_orphan_timer()

    def flush(self) -> None:
        """Send what is kept, if anything is and the ingress keeps up."""
        stream = self._stream
        if self._deltas and stream is not None and stream.is_writable:
            self._send_frame(stream)

    def _send_frame(self, stream: FrameStream) -> None:
        deltas, self._deltas = self._deltas, {}
        merged = tuple([merge_deltas(of_request) for of_request in deltas.values()])
        frame = Frame(self._next_number, self._report(), merged)
        self._next_number += 1
        self._sent_at = asyncio.get_running_loop().time()
        stream.send(frame)

    def _beat(self) -> None:
        """Send a heartbeat if nothing was sent for as long. One timer a heartbeat, whatever is sent meanwhile."""
        loop, stream = asyncio.get_running_loop(), self._stream
        if stream is None:
            return
        wait_s = self._sent_at + self._heartbeat_s - loop.time()
        if wait_s <= 0:
            wait_s = self._heartbeat_s
            if stream.is_writable:
                self._send_frame(stream)
        self._timer = loop.call_later(wait_s, self._beat)

    # ------------------------------------------------------------------ without a stream

    def _begin_orphan_timer(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._orphaned_after_s, self._end_all)

    def _end_all(self) -> None:
        """The ingress is gone, or the way to it. It has resumed its requests at other replicas."""
        if self._ends:
            logger.warning(
                "%d requests end: their ingress has had no stream for %g s", len(self._ends), self._orphaned_after_s
            )
        self._deltas.clear()
        self._on_orphaned()
        for end in self._ends.values():
            if not end.done():
                end.set_exception(Unavailable("the ingress of this request has gone"))
