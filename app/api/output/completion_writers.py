"""Writes responses and chunks of chats and completions, as OpenAI's clients read them. Plain dicts, cheap to encode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from pydantic_core import to_json

from app.api.http.errors import error_body, log_error
from app.api.http.sse import DONE, event, event_pieces
from app.api.output.choices import ChoiceDelta
from app.api.output.response_state import ChoiceOutput, Json, ResponseState, tool_call, usage_of
from app.api.output.token_details import CHAT_LOGPROBS, COMPLETION_LOGPROBS, DetailsWriter, LogprobsForm
from app.api.output.tool_calls import ToolCallDelta
from app.api.prepared_request import PreparedRequest
from app.json_pieces import joined


class Format(Protocol):
    """How one endpoint writes its choices."""

    object: str
    chunk_object: str
    logprobs: LogprobsForm

    def choice(self, index: int, output: ChoiceOutput) -> Json:
        """A finished choice."""

    def chunk_choices(self, piece: ChoiceDelta, *, is_first: bool, details: Json | None = None) -> list[Json]:
        """The choices of the chunks for a delta, one chunk each; none for a delta without content.

        `details` are fields of the choice that has the text.
        """

    def with_prompt(self, body: Json, choice: Json, prompt: Json) -> None:
        """Add the fields about a choice's prompt to the body or to the choice."""


class ChatFormat:
    """/v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    logprobs = CHAT_LOGPROBS

    def choice(self, index: int, output: ChoiceOutput) -> Json:
        text, calls = str(output.text), output.calls
        message: Json = {"role": "assistant", "content": text, "refusal": None, **_reasoning(str(output.reasoning))}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return {"index": index, "message": message} | _ending(output.finish_reason, output.stop_reason)

    def chunk_choices(self, piece: ChoiceDelta, *, is_first: bool, details: Json | None = None) -> list[Json]:
        deltas: list[tuple[Json, Json]] = []
        if is_first:
            deltas.append(({"role": "assistant", "content": ""}, _ending(None, None)))
        if piece.reasoning:
            deltas.append((_reasoning(piece.reasoning), _ending(None, None)))
        if piece.text or (details and not piece.reasoning):
            deltas.append(({"content": piece.text}, _ending(None, None)))
        if details:
            deltas[-1][1].update(details)
        if piece.calls:
            deltas.append(({"tool_calls": [_call_delta(call) for call in piece.calls]}, _ending(None, None)))
        if piece.finish_reason is not None:
            deltas.append(({}, _ending(piece.finish_reason, piece.stop_reason)))
        return [{"index": piece.index, "delta": delta} | ending for delta, ending in deltas]

    def with_prompt(self, body: Json, choice: Json, prompt: Json) -> None:
        body |= prompt


def _reasoning(text: str) -> Json:
    """By DeepSeek's name and by vLLM's: clients read one or the other."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _call_delta(piece: ToolCallDelta) -> Json:
    if piece.name is None:
        return {"index": piece.number, "function": {"arguments": piece.arguments}}
    return {"index": piece.number} | tool_call(piece)


class CompletionFormat:
    """/v1/completions."""

    object = "text_completion"
    chunk_object = "text_completion"
    logprobs = COMPLETION_LOGPROBS

    def choice(self, index: int, output: ChoiceOutput) -> Json:
        return {"index": index, "text": str(output.text)} | _ending(output.finish_reason, output.stop_reason)

    def chunk_choices(self, piece: ChoiceDelta, *, is_first: bool, details: Json | None = None) -> list[Json]:
        if not piece.text and piece.finish_reason is None and not details:
            return []
        ending = _ending(piece.finish_reason, piece.stop_reason) | (details or {})
        return [{"index": piece.index, "text": piece.text} | ending]

    def with_prompt(self, body: Json, choice: Json, prompt: Json) -> None:
        choice |= prompt


def _ending(finish_reason: str | None, stop_reason: str | int | None) -> Json:
    return {"logprobs": None, "finish_reason": finish_reason, "stop_reason": stop_reason}


class EventWriter(Protocol):
    """Writes the server-sent events of one call."""

    @property
    def has_begun(self) -> bool:
        """Whether there was an event."""

    def write(self, piece: ChoiceDelta) -> Iterable[bytes]:
        """The events for a delta that the progress has, in pieces; none for one without content."""

    def end(self) -> Iterable[bytes]:
        """The events after the last delta."""

    def fail(self, error: Exception) -> Iterable[bytes]:
        """The events after an error."""


class Writer(ABC):
    """Writes the response of one endpoint to a call."""

    @abstractmethod
    async def full_response(self, state: ResponseState, pieces: AsyncGenerator[ChoiceDelta, None]) -> Json:
        """Wait for the end of all choices and write one response."""

    def event_writer(self, state: ResponseState) -> EventWriter:
        """For the bodies of the endpoint that can ask for a stream."""
        raise AssertionError("no body of this endpoint asks for a stream")

    async def events(
        self, state: ResponseState, pieces: AsyncGenerator[ChoiceDelta, None]
    ) -> AsyncGenerator[bytes, None]:
        """The server-sent events of a call.

        An error before the first event is raised, so that it can have a status of its own; a later one becomes an
        event.
        """
        writer = self.event_writer(state)
        try:
            with state.metrics:
                async with aclosing(pieces):
                    async for piece in pieces:
                        state.add(piece, keep_text=False)
                        for written in writer.write(piece):
                            yield written
            last = writer.end()
            state.log_end()
        except Exception as error:
            if not writer.has_begun and not state.is_open:
                raise
            log_error(error, state.request_id)
            if state.trace is not None:
                state.trace.error = error
            last = writer.fail(error)
        for written in last:
            yield written


@dataclass(frozen=True, slots=True)
class ChoiceWriter(Writer):
    """Responses that are lists of choices, streamed as chunks that end with [DONE]."""

    form: Format

    async def full_response(self, state: ResponseState, pieces: AsyncGenerator[ChoiceDelta, None]) -> Json:
        call, form = state.call, self.form
        details = DetailsWriter(call, form.logprobs) if call.detail_options else None

        def keep(piece: ChoiceDelta) -> None:
            if details is not None and piece.details is not None:
                details.keep(piece.index, piece.details)

        await state.read(pieces, keep, keep_text=True)
        state.log_end()
        body = _envelope(call, form.object) | {"choices": [], "usage": state.usage()}
        for request in range(len(state.outputs)) if details is None else _best(call, details):
            choice = form.choice(len(body["choices"]), state.outputs[request])
            if details is not None:
                choice |= details.of_choice(request)
                form.with_prompt(body, choice, details.of_prompt(request))
            body["choices"].append(choice)
        return body

    def event_writer(self, state: ResponseState) -> EventWriter:
        return _ChunkWriter(state, self.form)


def _best(call: PreparedRequest, details: DetailsWriter) -> list[int]:
    """The samples that the response has, by index: the likeliest of each prompt, in this order."""
    chosen: list[int] = []
    for first in range(0, len(call.requests), call.num_samples):
        samples: list[int] = list(range(first, first + call.num_samples))
        if call.detail_options.choose_best:
            samples.sort(key=details.mean_logprob, reverse=True)
        chosen += samples[: call.num_choices]
    return chosen


class _ChunkWriter:
    """The chunks of one streamed call."""

    def __init__(self, state: ResponseState, form: Format) -> None:
        self._state = state
        self._form = form
        self._call = state.call
        self._envelope = _envelope(state.call, form.chunk_object)
        self._begun: set[int] = set()
        self._text_events: dict[int, _TextEvents] = {}  # by choice, once it has a second text
        self._details = DetailsWriter(self._call, form.logprobs) if self._call.detail_options else None
        # Whether the events in the middle of a choice differ in more than their text.
        self._events_differ = self._details is not None or self._call.continuous_usage

    @property
    def has_begun(self) -> bool:
        return bool(self._begun)

    def write(self, piece: ChoiceDelta) -> Iterable[bytes]:
        is_first = piece.index not in self._begun
        is_plain = piece.finish_reason is None and not piece.calls and not piece.reasoning
        if is_plain and not is_first and not self._events_differ:
            return (self._text_events_of(piece.index).write(piece.text),) if piece.text else ()
        if self._details is not None:
            return self._detailed_events(piece, self._details)
        if not piece.num_tokens and piece.finish_reason is None:
            return ()  # the request is queued; nothing is sent before the first token
        choices = self._form.chunk_choices(piece, is_first=is_first)
        if choices:
            self._begun.add(piece.index)
        return (b"".join([event(self._chunk(choice)) for choice in choices]),) if choices else ()

    def _detailed_events(self, piece: ChoiceDelta, details: DetailsWriter) -> Iterable[bytes]:
        """The events of a call that asks for details."""
        if piece.details is None:
            return ()  # the request is queued
        is_first = piece.index not in self._begun
        choices = self._form.chunk_choices(piece, is_first=is_first, details=details.of_chunk(piece.details))
        chunks = [self._chunk(choice) for choice in choices]
        if chunks and is_first:
            self._begun.add(piece.index)
            self._form.with_prompt(chunks[0], choices[0], details.of_prompt(piece.index))
            return joined(chain.from_iterable(map(event_pieces, chunks)))
        return joined(map(event, chunks))

    def _text_events_of(self, index: int) -> _TextEvents:
        events = self._text_events.get(index)
        if events is None:
            marked = ChoiceDelta(index, _MARK, num_tokens=1, num_cached_tokens=0)
            [choice] = self._form.chunk_choices(marked, is_first=False)
            events = self._text_events[index] = _TextEvents(event(self._chunk(choice)))
        return events

    def _chunk(self, choice: Json) -> Json:
        chunk = self._envelope | {"choices": [choice]}
        if self._call.include_usage:
            chunk["usage"] = self._state.usage() if self._call.continuous_usage else None
        return chunk

    def end(self) -> Iterable[bytes]:
        if not self._call.include_usage:
            return (DONE,)
        return (event(self._envelope | {"choices": [], "usage": self._state.usage()}) + DONE,)

    def fail(self, error: Exception) -> Iterable[bytes]:
        return (event(error_body(error, self._state.request_id)) + DONE,)


_MARK = "\0"


class _TextEvents:
    """The events in the middle of a choice, which differ in their text only.

    The event is encoded once, with a mark for the text: to build and encode a chunk for every token costs eight times
    as much.
    """

    def __init__(self, marked: bytes) -> None:
        # The last mark: nothing that follows the text is a string, but a name before it might be the mark.
        self._before, mark, self._after = marked.rpartition(to_json(_MARK))
        assert mark, "the text of an event is in it"

    def write(self, text: str) -> bytes:
        """The event with this text."""
        return b"%b%b%b" % (self._before, to_json(text), self._after)


def _envelope(call: PreparedRequest, object_name: str) -> Json:
    return {
        "id": call.call_id,
        "object": object_name,
        "created": call.created,
        "model": call.model.name,
        "system_fingerprint": None,
    }


def single_choice_response(
    form: Format, call_id: str, model: str, output: ChoiceOutput, *, created: int, num_prompt: int
) -> Json:
    """The response with one choice that was computed elsewhere, to a prompt of `num_prompt` tokens."""
    return {
        "id": call_id,
        "object": form.object,
        "created": created,
        "model": model,
        "system_fingerprint": None,
        "choices": [form.choice(0, output)],
        "usage": usage_of(
            num_prompt,
            output.num_tokens,
            num_cached=output.num_cached_tokens,
            num_reasoning=output.num_reasoning_tokens,
        ),
    }
