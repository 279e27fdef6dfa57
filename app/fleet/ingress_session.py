"""The replica's end of the stream to one ingress: the ingress's requests and their unsent deltas."""

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
        """Whether the ingress is keeping up. The owner calls `IngressSession.flush` when this becomes true again."""
        ...


class IngressSession:
    """Submits the requests of one ingress and sends their deltas as frames. Belongs to one event loop and one stream.

    A slow ingress receives fewer, larger frames. The requests' token limits bound the size of the unsent deltas.
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
        """Send the first frame immediately. Further frames follow changes, and are sent at least every `heartbeat_s`.

        `report` is called for each frame, and `on_idle` when the session has no more requests. The session owns and
        closes `prefixes`. `prompts` is shared by all sessions.
        """
        self._stream = stream
        self._engine = engine
        self._report = report
        self._on_idle = on_idle
        self._prefixes = prefixes
        self._prompts = prompts.open(self._report_prompts)
        # The unsent deltas by request id, in the order of each request's first unsent delta.
        self._deltas: dict[str, UnreadDelta] = {}
        self._open: set[str] = set()  # ids of the requests that the engine serves
        self._preparing: dict[str, asyncio.Task[None]] = {}  # by request id, until its grammar and adapter are ready
        self._view: EngineSnapshot | None = None  # the unsent view
        self._metrics: bytes | None = None  # the unsent metrics
        self._next_number = 0  # number of the next frame
        self._heartbeat_s = heartbeat_s
        self._queued_timer: asyncio.TimerHandle | None = None
        self._aborted_timer: asyncio.TimerHandle | None = None
        self._prompts_timer: asyncio.TimerHandle | None = None
        self._send_frame()
        self._timer = asyncio.get_running_loop().call_later(heartbeat_s, self._beat)

    # ------------------------------------------------------------------ requests

    def submit(self, request: Request, *, num_prefill_tokens: int | None = None) -> None:
        """Serve a request. Its first delta reports that the request is queued, or carries an error if it is refused.

        See `SubmitRequest` for `num_prefill_tokens`.
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
        queued_delay_s = 0.05  # if the first token follows within this time, one frame carries both deltas
        if self._queued_timer is None:
            self._queued_timer = asyncio.get_running_loop().call_later(queued_delay_s, self._flush_queued)

    def _flush_queued(self) -> None:
        self._queued_timer = None
        self.flush()

    def _refuse(self, request: Request, error: Exception) -> None:
        if not isinstance(error, CarouselError):
            logger.error("request %s could not be submitted: %s", request.request_id, traceback_of(error))
            error = Failure("the replica failed to process this request; see its log for the reason")
        self.put_all([TokenDelta(request.request_id, (), FinishReason.ERROR, error=error)])

    def abort(self, request_id: str) -> None:
        """End a request, free its blocks, and soon report the free slot. Ignored if the request has already ended."""
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
        """Report soon after an abort. Until then, the ingress attributes the request's work to other ingresses."""
        if self._aborted_timer is not None:
            self._aborted_timer.cancel()
        # With this delay, one frame can report a series of aborts, and the engine has freed the slots in its next step.
        aborted_delay_s = 0.05
        self._aborted_timer = asyncio.get_running_loop().call_later(
            aborted_delay_s, lambda: self.flush(even_without_deltas=True)
        )

    def _report_prompts(self) -> None:
        """Report soon how many uncomputed prompt tokens other ingresses have sent.

        On a replica with many short requests, the number changes all the time. An ingress treats a replica as broken if
        it sends too much data without deltas (see `FrameReader`). Reports are therefore at least 10 ms apart, and more
        if they list many adapters.
        """
        if self._prompts_timer is None:
            loop, pause_s = asyncio.get_running_loop(), 0.01 * (1 + self._num_adapters / 64)
            wait_s = max(0.0, self._sent_at + pause_s - loop.time())
            self._prompts_timer = loop.call_later(wait_s, self._flush_report)

    def _flush_report(self) -> None:
        self._prompts_timer = None
        self.flush(even_without_deltas=True)

    def put_all(self, deltas: Iterable[TokenDelta]) -> None:
        """Send deltas for the ingress's requests. While the ingress is slow, they are merged and stored instead."""
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
        """Whether all requests have ended and their last deltas have been sent."""
        return not (self._open or self._preparing or self._deltas)

    def close(self) -> None:
        """End all requests after the stream has ended. The ingress resumes them on other replicas."""
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
        """Send the stored deltas if the ingress is keeping up. Without deltas, no frame is sent by default."""
        if (self._deltas or even_without_deltas) and self._stream.is_writable:
            self._send_frame()
            if not self._open:
                self._check_idle()

    def show(self, view: EngineSnapshot) -> None:
        """Send a view with the next step's frame, or immediately if the ingress has no requests here.

        A slow ingress receives only the newest view.
        """
        if self._view is not None:  # no frame was sent since the last view
            self.flush(even_without_deltas=True)
        self._view = view
        if not self._open:
            self.flush(even_without_deltas=True)

    def send_metrics(self, metrics: bytes) -> None:
        """Send this replica's metrics immediately. A slow ingress receives only the newest metrics."""
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
            self._prompts_timer = None
        self._num_adapters = len(report.adapters or ())
        self._sent_at = asyncio.get_running_loop().time()
        self._stream.send(frame)

    def _beat(self) -> None:
        """Send a heartbeat if no frame was sent for `heartbeat_s`. Frames do not restart the timer, for speed."""
        loop = asyncio.get_running_loop()
        wait_s = self._sent_at + self._heartbeat_s - loop.time()
        if wait_s <= 0:
            wait_s = self._heartbeat_s
            if self._stream.is_writable:
                self._send_frame()
        self._timer = loop.call_later(wait_s, self._beat)
