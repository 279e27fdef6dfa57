"""The state of a response while its tokens come: the output of each choice, and the numbers for `usage`."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from io import StringIO
from types import MappingProxyType
from typing import Protocol

from app.api.http.errors import log_error
from app.api.output.choices import ChoiceDelta, generate_choices
from app.api.output.tool_calls import ToolCallDelta
from app.api.prepared_request import PreparedRequest
from app.api.request_context import RequestContext
from app.api.request_trace import RequestTrace
from app.api.schemas.parameters import IGNORED_HEADER
from app.engine.request import EngineTimes, Queued
from app.json_pieces import Json
from app.metrics import CallMetrics, RequestMetrics
from app.usage import CallUsage, Used

logger = logging.getLogger(__name__)


class GrowingText(StringIO):
    """A text in pieces. Adding one costs its own length; a `str` in a field would be copied whole at every token."""

    __slots__ = ()
    add = StringIO.write
    __str__ = StringIO.getvalue


@dataclass(slots=True)
class ChoiceOutput:
    """The output of one choice by now."""

    text: GrowingText = field(default_factory=GrowingText)
    reasoning: GrowingText = field(default_factory=GrowingText)
    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_cached_tokens: int = 0
    num_accepted: int = 0  # tokens of its prediction, as drafts
    num_rejected: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    _calls: list[tuple[ToolCallDelta, GrowingText]] = field(default_factory=list)  # the first delta, all arguments

    @property
    def calls(self) -> list[Json]:
        """Its tool calls."""
        return [tool_call(first._replace(arguments=str(arguments))) for first, arguments in self._calls]

    def add_calls(self, deltas: Iterable[ToolCallDelta]) -> None:
        """Add what is new of its tool calls."""
        for delta in deltas:
            if delta.name is not None:
                self._calls.append((delta, GrowingText()))
            self._calls[delta.number][1].add(delta.arguments)


@dataclass(slots=True)
class ResponseState:
    """A request that is checked and has its tokens reserved, and its outputs by now.

    Its generation begins when they are read.
    """

    prepared: PreparedRequest
    request_id: str
    metrics: CallMetrics
    pieces: AsyncGenerator[ChoiceDelta, None]
    outputs: list[ChoiceOutput]  # of each request
    queued: Queued | None = None  # the place of the first request
    times: EngineTimes | None = None  # of the request with the first token
    extra_usage: Callable[[], Json] = dict  # further fields of `usage`, by now
    trace: RequestTrace | None = None  # where traces are sent
    is_open: bool = False  # the headers were sent before the first token, so no error can have a status of its own
    writer: Writer | None = None  # of the endpoint; None: the client does not see it
    is_streamed: bool = False  # as the body asks
    is_kept: bool = False  # so the whole of it is wanted beside its events
    shows_loads: bool = False  # to an admin only
    pipeline_headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    ignored_fields: str = ""  # names of fields of the body that have no effect

    @classmethod
    def begin(
        cls,
        prepared: PreparedRequest,
        context: RequestContext,
        metrics: RequestMetrics,
        *,
        pieces: AsyncGenerator[ChoiceDelta, None] | None = None,
    ) -> ResponseState:
        """The response to a request that begins now. What it uses counts for the account.

        `pieces` are those of an answer that has been generated, and counted, already.
        """
        of_call = CallMetrics(
            metrics.model(prepared.model.base),
            [len(request.prompt_token_ids) for request in prepared.requests],
            arrived_at=context.arrived_at,
            is_background=prepared.requests[0].is_background,
        )
        outputs = [ChoiceOutput() for _ in prepared.requests]
        if pieces is not None:
            return cls(prepared, context.request_id, of_call, pieces, outputs)
        state = cls(prepared, context.request_id, of_call, generate_choices(prepared), outputs, trace=context.trace)
        context.reservation.usages.append(state.used)
        context.begun.append(prepared)
        if context.trace is not None:
            context.trace.checked()
        return state

    async def full_response(self) -> Json:
        """The response as one object."""
        assert self.writer is not None, "a client sees it"
        return await self.writer.full_response(self)

    async def events(self, writer: EventWriter | None = None) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events, by default those of its endpoint's writer.

        An error before the first event is raised, so that it can have a status of its own; a later one becomes an
        event.
        """
        if writer is None:
            assert self.writer is not None, "a client sees it"
            writer = self.writer.event_writer(self)
        try:
            with self.metrics:
                async with aclosing(self.pieces):
                    async for piece in self.pieces:
                        self.add(piece, keep_text=self.is_kept)
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
        for written in last:
            yield written

    def headers(self, *, explain: bool) -> dict[str, str]:
        """Where the request went and how long that took, as far as it is known by now.

        That is the replica of the first request and its place in the queue; `explain`: and why this replica. An admin
        sees the loads of all replicas too, which other clients' requests cause.
        """
        headers, queued = dict(self.pipeline_headers), self.queued
        if self.ignored_fields:
            headers[IGNORED_HEADER] = self.ignored_fields
        if queued is not None:
            headers["x-carousel-queue-position"] = str(queued.position)
            headers["x-carousel-estimated-wait-ms"] = str(round(queued.estimated_wait_s * 1e3))
            if queued.replica_id:
                headers["x-carousel-replica"] = queued.replica_id
            if explain and queued.why_there:
                loads = f": {queued.loads_there}" if self.shows_loads and queued.loads_there else ""
                headers["x-carousel-why"] = queued.why_there + loads
        if self.times is not None and self.times.settings:  # of the replica that the timings belong to
            headers["x-carousel-settings"] = self.times.settings
        return headers | {f"x-carousel-{name.replace('_', '-')}": str(ms) for name, ms in self.timings().items()}

    def add(self, piece: ChoiceDelta, *, keep_text: bool) -> None:
        """Add a delta. `keep_text`: its text is needed for the full response."""
        output = self.outputs[piece.index]
        if piece.queued is not None or piece.times is not None:
            self._note_replica(piece)
        output.num_tokens += piece.num_tokens
        if piece.num_reasoning_tokens:
            output.num_reasoning_tokens += piece.num_reasoning_tokens
        if piece.num_cached_tokens > output.num_cached_tokens:
            output.num_cached_tokens = piece.num_cached_tokens
        if piece.num_accepted or piece.num_rejected:
            output.num_accepted += piece.num_accepted
            output.num_rejected += piece.num_rejected
        if keep_text:
            output.text.add(piece.text)
            output.reasoning.add(piece.reasoning)
            output.add_calls(piece.calls)
        if piece.num_tokens:
            self.metrics.tokens(piece.index, piece.num_tokens)
        if piece.finish_reason is not None:
            output.finish_reason, output.stop_reason = piece.finish_reason, piece.stop_reason
            # The engine sees tool calls as text.
            reason = "stop" if piece.finish_reason == "tool_calls" else piece.finish_reason
            self.metrics.finished(piece.index, reason)
            if self.trace is not None:
                self.trace.finished(piece.index)

    def _note_replica(self, piece: ChoiceDelta) -> None:
        if piece.queued is not None:
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
        """Add all deltas and hand each to `take`."""
        with self.metrics:
            async with aclosing(self.pieces):
                async for piece in self.pieces:
                    self.add(piece, keep_text=keep_text)
                    take(piece)

    def open_if_queued(self) -> bool:
        """Whether the headers may be sent before the first token: only once a replica has accepted the request."""
        self.is_open = self.queued is not None
        return self.is_open

    def used(self) -> CallUsage:
        """What was computed by now."""
        prepared, num_generated = self.prepared, sum(output.num_tokens for output in self.outputs)
        used, model = Used(), prepared.model
        if num_generated or self.queued or any(output.finish_reason for output in self.outputs):
            num_prompt, num_cached = prepared.num_prompt_tokens, self._num_cached_tokens
            cost = model.prices.cost(
                num_prompt_tokens=num_prompt, num_cached_tokens=num_cached, num_output_tokens=num_generated
            )
            used = Used(1, num_prompt, num_cached, num_generated, cost)
        return CallUsage(model.name, prepared.requests[0].is_background, used)

    @property
    def _num_cached_tokens(self) -> int:
        return sum(output.num_cached_tokens for output in self.outputs[:: self.prepared.num_samples])

    def usage(self) -> Json:
        """Prompts count once each, generated tokens (end-of-text tokens too) of all choices."""
        num_prompt_tokens = self.prepared.num_prompt_tokens
        num_completion_tokens = sum(output.num_tokens for output in self.outputs)
        num_cached = self._num_cached_tokens
        num_reasoning = sum(output.num_reasoning_tokens for output in self.outputs)
        usage = usage_of(num_prompt_tokens, num_completion_tokens, num_cached=num_cached, num_reasoning=num_reasoning)
        if self.prepared.requests[0].prediction_token_ids:
            usage["completion_tokens_details"] |= {
                "accepted_prediction_tokens": sum(output.num_accepted for output in self.outputs),
                "rejected_prediction_tokens": sum(output.num_rejected for output in self.outputs),
            }
        return usage | self.more_usage()

    def usage_of_responses(self) -> Json:
        """The same by the names of OpenAI's newer endpoints."""
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
            **self.more_usage(),
        }

    def more_usage(self) -> Json:
        """The fields of `usage` that OpenAI's API does not have."""
        return self.extra_usage() | ({"timings": self.timings()} if self.prepared.wants_timings else {})

    def timings(self) -> dict[str, float]:
        """Milliseconds, as far as they are known: queue and prefill on the replica, the first token and all others."""
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
        """What a trace says of the response, by OpenTelemetry's names for generative models."""
        usage = self.usage()
        return {
            "gen_ai.request.model": self.prepared.model.name,
            "gen_ai.response.id": self.prepared.response_id,
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": usage["completion_tokens"],
        }

    def log_end(self) -> None:
        """Log the end of the response."""
        usage = self.usage()
        logger.info(
            # `deployments.plan` reads it.
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
        """Whether there was an event."""

    def write(self, piece: ChoiceDelta) -> Iterable[bytes]:
        """The events for a delta that the state has, in pieces; none for one without content."""

    def end(self) -> Iterable[bytes]:
        """The events after the last delta."""

    def fail(self, error: Exception) -> Iterable[bytes]:
        """The events after an error."""


class Writer(ABC):
    """Writes the responses of one endpoint."""

    @abstractmethod
    async def full_response(self, state: ResponseState) -> Json:
        """Wait for the end of all choices and write one response."""

    def event_writer(self, state: ResponseState) -> EventWriter:
        """For the bodies of the endpoint that can ask for a stream."""
        raise AssertionError("no body of this endpoint asks for a stream")


def tool_call(delta: ToolCallDelta) -> Json:
    """A tool call with the arguments of its first delta."""
    if delta.is_custom:
        return {"id": delta.call_id, "type": "custom", "custom": {"name": delta.name, "input": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"id": delta.call_id, "type": "function", "function": function}


def usage_of(num_prompt: int, num_completion: int, *, num_cached: int, num_reasoning: int) -> Json:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
    }
