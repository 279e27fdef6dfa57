"""The state of a response during generation: its deltas, its metrics and its replica."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from app.api.http.errors import log_error
from app.api.http.sse import Connection
from app.api.output.answer import Answer, ChoiceOutput, MoreUsage
from app.api.output.choices import ChoiceDelta, DirectPath, generate_choices
from app.api.prepared_request import AnswerInfo, PreparedRequest
from app.api.request_context import RequestContext
from app.api.request_trace import RequestTrace
from app.api.schemas.parameters import ignored_header
from app.engine.request import EngineTimes, Queued
from app.metrics import CallMetrics, RequestMetrics
from app.usage import CallUsage, Used

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class ResponseState(Answer):
    """A checked request with reserved tokens, and its outputs so far. Reading the outputs starts the generation."""

    prepared: PreparedRequest
    metrics: CallMetrics
    pieces: Callable[[DirectPath | None], AsyncGenerator[ChoiceDelta, None]]  # without the deltas that the path sends
    queued: Queued | None = None  # the queue position of the first request
    times: EngineTimes | None = None  # the times of the request with the first token
    extra_usage: Callable[[], MoreUsage] = MoreUsage  # returns additional fields of `usage`
    trace: RequestTrace | None = None  # None if requests are not traced
    is_open: bool = False  # the headers may be sent before the first token, so an error can no longer set the status
    writer: Writer | None = None  # the endpoint's writer, or None if the client does not see this response
    is_streamed: bool = False  # the body asks for a stream
    shows_loads: bool = False  # headers may show the loads of replicas, for an admin
    pipeline_headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    ignored: tuple[str, ...] = ()  # fields without effect, then schema keywords that the grammar does not enforce

    @classmethod
    def begin(
        cls,
        prepared: PreparedRequest,
        context: RequestContext,
        metrics: RequestMetrics,
        *,
        pieces: AsyncGenerator[ChoiceDelta, None] | None = None,
    ) -> ResponseState:
        """Create the response to a request that is starting, and charge its usage to the account.

        `pieces` yields the deltas of an answer that was already generated and charged.
        """
        of_call = CallMetrics(
            metrics.model(prepared.model.base),
            [len(request.prompt_token_ids) for request in prepared.requests],
            arrived_at=context.arrived_at,
            is_background=prepared.requests[0].is_background,
        )
        state = cls(
            info=prepared.info(),
            outputs=[ChoiceOutput() for _ in prepared.requests],
            token_bytes=prepared.model.tokenizer.token_bytes,
            prepared=prepared,
            request_id=context.request_id,
            metrics=of_call,
            pieces=partial(generate_choices, prepared) if pieces is None else lambda _: pieces,
            trace=context.trace if pieces is None else None,
        )
        if pieces is not None:
            return state
        context.reservation.usages.append(state.used)
        context.begun.append(prepared)
        if context.trace is not None:
            context.trace.checked()
        return state

    async def full_response(self) -> Mapping[str, Any]:
        """Return the response as one object."""
        assert self.writer is not None, "a client sees this response"
        return await self.writer.full_response(self)

    async def events(self, connection: Connection | None = None) -> AsyncGenerator[bytes, None]:
        """Yield the response as server-sent events.

        Raises an error that occurs before the first event, so that it can set the response's status. A later error
        becomes an event. While `connection` is ready, events in the middle of the answer are sent to it, not yielded.
        """
        assert self.writer is not None, "a client sees this response"
        writer = self.writer.event_writer(self)
        direct = None if connection is None else DirectPath(connection, self.add, writer.write)
        try:
            with self.metrics:
                async with aclosing(self.pieces(direct)) as pieces:
                    async for piece in pieces:
                        self.add(piece)
                        for written in writer.write(piece):
                            yield written
            last = writer.end()
            self.log_end()
        except Exception as error:
            if not writer.has_begun and not self.is_open:
                raise
            log_error(error, self.request_id)
            if self.trace is not None:
                self.trace.error = error
            last = writer.fail(error)
        finally:
            if direct is not None:
                direct.close()
        for written in last:
            yield written

    def headers(self, *, explain: bool) -> dict[str, str]:
        """Return headers with the replica of the first request, its queue position, and the timings known so far.

        With `explain`, a header states why this replica was chosen. Only an admin sees the loads of all replicas,
        because loads reveal the requests of other clients.
        """
        own = {} if self.writer is None else self.writer.headers
        headers, queued = {**own, **self.pipeline_headers, **ignored_header(self.ignored)}, self.queued
        if queued is not None:
            headers["x-carousel-queue-position"] = str(queued.position)
            headers["x-carousel-estimated-wait-ms"] = str(round(queued.estimated_wait_s * 1e3))
            if queued.replica_id:
                headers["x-carousel-replica"] = queued.replica_id
            if explain and queued.routing_reason:
                loads = f": {queued.candidate_loads}" if self.shows_loads and queued.candidate_loads else ""
                headers["x-carousel-why"] = queued.routing_reason + loads
        if self.times is not None and self.times.settings:  # from the replica that measured these times
            headers["x-carousel-settings"] = self.times.settings
        return headers | {f"x-carousel-{name.replace('_', '-')}": str(ms) for name, ms in self.timings().items()}

    def add(self, piece: ChoiceDelta, *, keep_text: bool = False) -> None:
        """Add a delta, and store its text for the full response if `keep_text` is true."""
        if piece.queued is not None or piece.times is not None:
            self._note_replica(piece)
        self.outputs[piece.index].add(piece, keep_text=keep_text)
        if piece.num_tokens:
            self.metrics.tokens(piece.index, piece.num_tokens)
        if piece.finish_reason is not None:
            # To the engine, tool calls are text that ends with "stop".
            reason = "stop" if piece.finish_reason == "tool_calls" else piece.finish_reason
            self.metrics.finished(piece.index, reason)
            if self.trace is not None:
                self.trace.finished(piece.index)

    def _note_replica(self, piece: ChoiceDelta) -> None:
        if piece.queued is not None:
            if piece.ignored and self.queued is None:
                self.ignored += piece.ignored
            self.queued = self.queued or piece.queued
            self.metrics.placed(piece.index, piece.queued.group)
            if self.trace is not None:
                self.trace.accepted(piece.index, piece.queued.replica_id)
        if piece.times is not None:
            self.times = self.times or piece.times
            self.metrics.left_queue(piece.index, piece.times.queue_s)
            if self.trace is not None:
                self.trace.first_token(piece.index, piece.times)

    async def read(self, take: Callable[[ChoiceDelta], object], *, keep_text: bool = False) -> None:
        """Add all deltas and pass each to `take`."""
        with self.metrics:
            async with aclosing(self.pieces(None)) as pieces:
                async for piece in pieces:
                    self.add(piece, keep_text=keep_text)
                    take(piece)

    def open_if_queued(self) -> bool:
        """Return whether a replica has accepted the request, so that the headers may be sent before the first token."""
        self.is_open = self.queued is not None
        return self.is_open

    def used(self) -> CallUsage:
        """Return the usage so far, with its cost."""
        prepared, num_generated = self.prepared, sum(output.num_tokens for output in self.outputs)
        used, model = Used(), prepared.model
        if num_generated or self.queued or any(output.finish_reason for output in self.outputs):
            num_prompt, num_cached = prepared.num_prompt_tokens, self.num_cached_tokens
            cost = model.prices.cost(
                num_prompt_tokens=num_prompt, num_cached_tokens=num_cached, num_output_tokens=num_generated
            )
            used = Used(1, num_prompt, num_cached, num_generated, cost)
        return CallUsage(model.name, prepared.requests[0].is_background, used)

    def more_usage(self) -> MoreUsage:
        more = self.extra_usage()
        if self.prepared.wants_timings:
            more["timings"] = self.timings()
        return more

    def timings(self) -> dict[str, float]:
        """Return the timings known so far, in milliseconds: replica queue, fetch, prefill, first token and decode."""
        times, first_token_s, decode_s = self.times, self.metrics.first_token_s, self.metrics.decode_s
        known = {
            "queue_ms": None if times is None else times.queue_s,
            "fetch_ms": None if times is None else times.fetch_s or None,
            "prefill_ms": None if times is None else times.prefill_s,
            "ttft_ms": first_token_s,
            "decode_ms": decode_s,
        }
        return {name: round(1000 * seconds, 1) for name, seconds in known.items() if seconds is not None}

    def trace_attributes(self) -> dict[str, str | int | float]:
        """Return the response's attributes for a trace, named by OpenTelemetry's conventions for generative AI."""
        usage = self.usage()
        return {
            "gen_ai.request.model": self.prepared.model.name,
            "gen_ai.response.id": self.prepared.response_id,
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": usage["completion_tokens"],
        }

    def log_end(self) -> None:
        """Log the end of the response, in a line that `deployments.plan` parses."""
        usage = self.usage()
        logger.info(
            "request %s finished after %.3f s: model %s, %d choices, %d prompt tokens, %d completion tokens, answer %s",
            self.request_id,
            self.metrics.elapsed_s,
            self.prepared.model.name,
            len(self.outputs),
            usage["prompt_tokens"],
            usage["completion_tokens"],
            self.prepared.response_id,
        )


class EventWriter(Protocol):
    """Writes the server-sent events of one response."""

    @property
    def has_begun(self) -> bool:
        """Whether any event has been written."""

    def write(self, piece: ChoiceDelta) -> Iterable[bytes]:
        """Return the events for a delta that was added to the state, in pieces. Empty for a delta without content."""

    def end(self) -> Iterable[bytes]:
        """Return the events after the last delta."""

    def fail(self, error: Exception) -> Iterable[bytes]:
        """Return the events after an error."""


class Writer(ABC):
    """Writes the responses of one endpoint."""

    headers: ClassVar[Mapping[str, str]] = MappingProxyType({})  # on every response

    @abstractmethod
    async def full_response(self, state: ResponseState) -> Mapping[str, Any]:
        """Wait for all choices to finish, and return the response."""

    def event_writer(self, state: ResponseState) -> EventWriter:
        """Return the writer of a stream. Only endpoints whose bodies can ask for a stream override this method."""
        raise AssertionError("no body of this endpoint asks for a stream")

    def info(self, state: ResponseState) -> AnswerInfo:
        """Return the information needed to write the response from its stored deltas."""
        return state.info
