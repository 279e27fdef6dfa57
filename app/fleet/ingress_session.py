"""The replica's end of the stream to one ingress: that ingress's requests, and what is new of them and not sent yet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from msgspec import structs

from app.engine.async_engine import AsyncEngine, ignored_by
from app.engine.request import FinishReason, Request, TokenDelta, UnreadDelta, as_delta, with_next
from app.engine.snapshot import EngineSnapshot
from app.errors import CarouselError, Failure, traceback_of
from app.fleet.dispatch import ReplicaReport
from app.fleet.frames import REQUEST_FIELDS, Frame
from app.fleet.prefix_feed import PrefixReader
from app.fleet.uncomputed_prompts import UncomputedPrompts

logger = logging.getLogger(__name__)


class FrameStream(Protocol):
    """Carries frames to one ingress."""

    def send(self, frame: Frame) -> None:
        """Send a frame. Only called while `is_writable`."""
        ...

    @property
    def is_writable(self) -> bool:
        """Whether the ingress keeps up. `IngressSession.flush` must be called when it becomes true again."""
        ...


class IngressSession:
    """Submits the requests of one ingress and sends their deltas as frames. Belongs to one event loop and one stream.

    A slow ingress gets fewer and longer frames: what is kept is bounded by the tokens of the requests.
    """

    def __init__(
        self,
        stream: FrameStream,
        engine: AsyncEngine,
        report: Callable[[], ReplicaReport],
        *,
        prefixes: PrefixReader,
        prompts: UncomputedPrompts,
        heartbeat_s: float,
        on_idle: Callable[[], object] = lambda: None,
    ) -> None:
        """A frame is sent at once, then whenever something is new and every `heartbeat_s`.

        `report` is called for each frame, `on_idle` when the session has no request any more. `prefixes` is closed with
        the session. `prompts` counts the prompts of all sessions.
        """
        self._stream = stream
        self._engine = engine
        self._report = report
        self._on_idle = on_idle
        self._prefixes = prefixes
        self._prompts = prompts.open(self._report_prompts)
        # Not sent yet, by request id, in the order of their first.
        self._deltas: dict[str, UnreadDelta] = {}
        self._open: set[str] = set()  # the ids of the requests that the engine has
        self._preparing: dict[str, asyncio.Task[None]] = {}  # by request id, until grammar and adapter are ready
        self._view: EngineSnapshot | None = None  # not sent yet, as the next
        self._metrics: bytes | None = None
        self._next_number = 0  # of the next frame
        self._heartbeat_s = heartbeat_s
        self._queued_timer: asyncio.TimerHandle | None = None
        self._aborted_timer: asyncio.TimerHandle | None = None
        self._prompts_timer: asyncio.TimerHandle | None = None
        self._send_frame()
        self._timer = asyncio.get_running_loop().call_later(heartbeat_s, self._beat)

    # ------------------------------------------------------------------ requests

    def submit(self, request: Request, *, num_prefill_tokens: int | None = None) -> None:
        """Have a request served. Its first delta says that it is queued, or with which error it was refused.

        num_prefill_tokens: see `SubmitRequest`.
        """
        if num_prefill_tokens is None:
            num_prefill_tokens = len(request.prompt_token_ids) + len(request.generated_token_ids)
        self._prompts.add(request.request_id, num_prefill_tokens)
        if request.sampling.grammar is None and request.adapter is None:
            self._submit(request)
            return
        preparing = asyncio.get_running_loop().create_task(self._submit_prepared(request))
        self._preparing[request.request_id] = preparing

    async def _submit_prepared(self, request: Request) -> None:
        try:
            matcher = await self._engine.matcher_of(request)
            adapter = await self._engine.adapter_of(request)
        except Exception as error:
            del self._preparing[request.request_id]
            self._refuse(request, error)
            return
        del self._preparing[request.request_id]
        self._submit(request, matcher, adapter)

    def _submit(self, request: Request, matcher: Any = None, adapter: Any = None) -> None:
        try:
            queued = self._engine.submit(request, self, matcher, adapter)
        except Exception as error:
            self._refuse(request, error)
            return
        request_id = request.request_id
        self._open.add(request_id)
        self._deltas[request_id] = TokenDelta(request_id, (), queued=queued, ignored=ignored_by(matcher))
        # The delta that says that a request is queued waits so long for the request's first token, to save a frame.
        queued_delay_s = 0.05
        if self._queued_timer is None:
            self._queued_timer = asyncio.get_running_loop().call_later(queued_delay_s, self._flush_queued)

    def _flush_queued(self) -> None:
        self._queued_timer = None
        self.flush()

    def _refuse(self, request: Request, error: Exception) -> None:
        if not isinstance(error, CarouselError):
            logger.error("request %s could not be submitted: %s", request.request_id, traceback_of(error))
            error = Failure("the replica failed on this request; its log says why")
        self.put_all([TokenDelta(request.request_id, (), FinishReason.ERROR, error=error)])

    def abort(self, request_id: str) -> None:
        """End a request, free its blocks and report soon that its place is free. Nothing happens when it has ended."""
        preparing = self._preparing.pop(request_id, None)
        if preparing is not None:
            preparing.cancel()
        self._prompts.end(request_id)
        if request_id in self._open:
            self._open.discard(request_id)
            self._engine.abort(request_id)
            self._report_soon()
        self._deltas.pop(request_id, None)
        self._check_idle()

    def _report_soon(self) -> None:
        """A frame that was under way counts the aborted request's prompt, and its ingress takes that for another's."""
        if self._aborted_timer is not None:
            self._aborted_timer.cancel()
        # After the last of some aborts: one frame reports for all, and the engine has freed their places at its next
        # step.
        aborted_delay_s = 0.05
        self._aborted_timer = asyncio.get_running_loop().call_later(
            aborted_delay_s, lambda: self.flush(even_without_deltas=True)
        )

    def _report_prompts(self) -> None:
        """Report how many prompt tokens other ingresses have sent, at once or a moment after the last frame.

        A replica with many short requests has such news all the time, and an ingress takes a replica that sends it too
        many frames for broken.
        """
        if self._prompts_timer is not None:
            self._prompts_timer.cancel()
        loop, pause_s = asyncio.get_running_loop(), 0.01
        wait_s = self._sent_at + pause_s - loop.time()
        if wait_s <= 0:
            self.flush(even_without_deltas=True)
        else:
            self._prompts_timer = loop.call_later(wait_s, lambda: self.flush(even_without_deltas=True))

    def put_all(self, deltas: Iterable[TokenDelta]) -> None:
        """Send these deltas of the ingress's requests, or keep them while the ingress is slow."""
        kept = self._deltas
        for delta in deltas:
            kept[delta.request_id] = with_next(kept.get(delta.request_id), delta)
            if delta.token_ids or delta.finish_reason is not None:
                self._prompts.end(delta.request_id)
            if delta.finish_reason is not None:
                self._open.discard(delta.request_id)
        self.flush()

    @property
    def is_idle(self) -> bool:
        """Whether all requests have ended and their last deltas are sent."""
        return not (self._open or self._preparing or self._deltas)

    def close(self) -> None:
        """The stream has ended: the ingress goes on with its requests at other replicas. They end here."""
        self._timer.cancel()
        self._prefixes.close()
        self._prompts.close()
        for request_id in [*self._preparing, *self._open]:
            self.abort(request_id)
        for timer in (self._queued_timer, self._aborted_timer, self._prompts_timer):
            if timer is not None:
                timer.cancel()
        self._deltas.clear()
        self._check_idle()

    def _check_idle(self) -> None:
        if self.is_idle:
            self._on_idle()

    # ------------------------------------------------------------------ the stream

    def flush(self, *, even_without_deltas: bool = False) -> None:
        """Send what is kept, if anything is and the ingress keeps up."""
        if (self._deltas or even_without_deltas) and self._stream.is_writable:
            self._send_frame()
            if not self._open:
                self._check_idle()

    def show(self, view: EngineSnapshot) -> None:
        """Send a view with the next step's frame, to save a frame; at once while the ingress has no request here.

        A slow ingress gets the newest only.
        """
        if self._view is not None:  # no step has brought a frame since
            self.flush(even_without_deltas=True)
        self._view = view
        if not self._open:
            self.flush(even_without_deltas=True)

    def send_metrics(self, metrics: bytes) -> None:
        """Send what is measured here at once. A slow ingress gets the newest only."""
        self._metrics = metrics
        self.flush(even_without_deltas=True)

    def _send_frame(self) -> None:
        deltas, self._deltas = self._deltas, {}
        merged = tuple(map(as_delta, deltas.values()))
        report = structs.replace(
            self._report(), num_own=len(self._open), num_prompt_tokens_of_others=self._prompts.take()
        )
        known_fields = () if self._next_number else tuple(sorted(REQUEST_FIELDS))
        frame = Frame(self._next_number, report, merged, self._view, self._prefixes.take(), known_fields, self._metrics)
        self._view = self._metrics = None
        self._next_number += 1
        if self._prompts_timer is not None:
            self._prompts_timer.cancel()
        self._sent_at = asyncio.get_running_loop().time()
        self._stream.send(frame)

    def _beat(self) -> None:
        """Send a heartbeat if nothing was sent for as long. One timer a heartbeat, whatever is sent meanwhile."""
        loop = asyncio.get_running_loop()
        wait_s = self._sent_at + self._heartbeat_s - loop.time()
        if wait_s <= 0:
            wait_s = self._heartbeat_s
            if self._stream.is_writable:
                self._send_frame()
        self._timer = loop.call_later(wait_s, self._beat)
