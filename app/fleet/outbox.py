"""The replica's end of the stream to one ingress: what happened to that ingress's requests and is not yet told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from app.engine.request import Queued, Request, TokenDelta, merge_deltas
from app.errors import Unavailable
from app.fleet.frame import Frame, Report

logger = logging.getLogger(__name__)

Submit = Callable[[Request], Queued]


class Outbox:
    """Collects the deltas of one ingress's requests and hands them out as frames. Belongs to one event loop.

    A reader who is slow gets fewer and longer frames: what is kept is bounded by the tokens of the requests.
    """

    def __init__(
        self, report: Callable[[], Report], *, orphaned_after_s: float, on_orphaned: Callable[[], object]
    ) -> None:
        """`report` is asked for each frame. When nobody has read for `orphaned_after_s`, all requests end."""
        self._report = report
        self._on_orphaned = on_orphaned
        self._orphaned_after_s = orphaned_after_s
        self._deltas: dict[str, list[TokenDelta]] = {}  # by request id, in the order of their first
        self._filled = asyncio.Event()
        self._ends: dict[str, asyncio.Future[None]] = {}  # of the requests that have not ended
        self._num_streams = 0  # that were ever opened; the last is the one that counts
        self._orphaned: asyncio.TimerHandle | None = None
        self._expect_a_reader()

    def put(self, delta: TokenDelta) -> None:
        """Called by the engine for each delta of this ingress's requests."""
        self._deltas.setdefault(delta.request_id, []).append(delta)
        self._filled.set()
        if delta.finish_reason is not None:
            end = self._ends.pop(delta.request_id, None)
            if end is not None and not end.done():
                end.set_result(None)

    async def carry(self, request: Request, submit: Submit, abort: Callable[[str], None]) -> None:
        """Submit a request whose deltas come here, and return when it has ended. Cancelling it aborts the request.

        The stream says first that the request is queued, and where.

        Raises:
            CarouselError: what `submit` raises; nothing was queued then.
            Unavailable: nobody has read this outbox for too long; the request is aborted.
        """
        request_id = request.request_id
        queued = submit(request)
        end = self._ends[request_id] = asyncio.get_running_loop().create_future()
        self.put(TokenDelta(request_id, (), queued=queued))
        try:
            await end
        finally:
            if self._ends.pop(request_id, None) is not None:  # it has not ended by itself
                abort(request_id)
                self._deltas.pop(request_id, None)

    async def frames(self, *, heartbeat_s: float) -> AsyncIterator[Frame]:
        """The frames from now on: one at once, then whenever there is something to tell, and every `heartbeat_s`.

        Ends when a newer stream is opened: an ingress that has lost one opens another.
        """
        self._num_streams += 1
        number_of_stream = self._num_streams
        self._cancel_timer()
        self._filled.set()  # wakes the stream before this one, which ends
        number = 0
        try:
            while number_of_stream == self._num_streams:
                yield Frame(number, self._report(), self._take())
                number += 1
                await self._something_to_tell(heartbeat_s)
        finally:
            if number_of_stream == self._num_streams:
                self._expect_a_reader()

    def _take(self) -> tuple[TokenDelta, ...]:
        self._filled.clear()
        deltas, self._deltas = self._deltas, {}
        return tuple([merge_deltas(of_one) for of_one in deltas.values()])

    async def _something_to_tell(self, heartbeat_s: float) -> None:
        if self._filled.is_set():
            return
        timer = asyncio.get_running_loop().call_later(heartbeat_s, self._filled.set)
        try:
            await self._filled.wait()
        finally:
            timer.cancel()

    def _expect_a_reader(self) -> None:
        self._cancel_timer()
        self._orphaned = asyncio.get_running_loop().call_later(self._orphaned_after_s, self._end_all)

    def _cancel_timer(self) -> None:
        if self._orphaned is not None:
            self._orphaned.cancel()
            self._orphaned = None

    def _end_all(self) -> None:
        """Nobody listens: the ingress is gone, or the way to it. It will have resumed its requests elsewhere."""
        if self._ends:
            logger.warning(
                "%d requests end: their ingress has not read for %g s", len(self._ends), self._orphaned_after_s
            )
        self._deltas.clear()
        self._on_orphaned()
        for end in self._ends.values():
            if not end.done():
                end.set_exception(Unavailable("the ingress of this request no longer listens"))
