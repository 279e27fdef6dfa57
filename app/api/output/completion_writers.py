"""What goes back: whole responses, chunks and usage, as OpenAI's clients read them. Plain dicts, cheap to encode."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic_core import to_json

from app.api.call import Call
from app.api.http.errors import error_body, log_error
from app.api.http.sse import DONE, event
from app.api.output.choices import ChoiceDelta
from app.api.output.token_details import DetailsWriter, TokenLogprob, TokenNames, chat_logprobs, completion_logprobs
from app.api.output.tool_calls import ToolCallDelta
from app.engine.request import Queued
from app.metrics import CallMetrics, RequestMetrics

logger = logging.getLogger(__name__)

Json = dict[str, Any]


@dataclass(slots=True)
class Answer:
    """One choice as far as it has come."""

    text: str = ""
    num_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    calls: list[Json] = field(default_factory=list)

    def add_calls(self, pieces: Iterable[ToolCallDelta]) -> None:
        """Go on with the calls that these pieces belong to."""
        for piece in pieces:
            if piece.name is not None:
                self.calls.append(called(piece))
            else:
                self.calls[piece.number]["function"]["arguments"] += piece.arguments


@dataclass(slots=True)
class Progress:
    """What all choices of a call have come to: their texts and the numbers for `usage`."""

    call: Call
    request_id: str
    metrics: CallMetrics
    answers: list[Answer] = field(init=False)
    queued: Queued | None = None  # as the first choice that was heard of found it
    extra_usage: Json = field(default_factory=dict)  # what usage says beside the usual
    is_open: bool = False  # the headers went out before there was a token: no error has a status of its own any more

    def __post_init__(self) -> None:
        self.answers = [Answer() for _ in self.call.requests]

    @classmethod
    def measured(cls, call: Call, request_id: str, metrics: RequestMetrics, *, arrived_at: float) -> Progress:
        """Of a call that `metrics` measures from `arrived_at` on, by their clock."""
        prompt_tokens = [len(request.prompt_token_ids) for request in call.requests]
        return cls(call, request_id, metrics.model(call.model.name).call(prompt_tokens, arrived_at=arrived_at))

    def add(self, piece: ChoiceDelta, *, keep_text: bool) -> None:
        """Book a piece; its text is kept only for whole responses."""
        answer = self.answers[piece.index]
        self.queued = self.queued or piece.queued
        answer.num_tokens += piece.num_tokens
        if piece.num_cached_tokens > answer.num_cached_tokens:
            answer.num_cached_tokens = piece.num_cached_tokens
        answer.finish_reason, answer.stop_reason = piece.finish_reason, piece.stop_reason
        if keep_text:
            answer.text += piece.text
            answer.add_calls(piece.calls)
        if piece.num_tokens:
            self.metrics.tokens(piece.index, piece.num_tokens)
        if piece.measured_reason is not None:
            self.metrics.finished(piece.index, piece.measured_reason)

    def open_if_queued(self) -> bool:
        """Whether headers may go out before the first token: a replica has accepted the request."""
        self.is_open = self.queued is not None
        return self.is_open

    def num_tokens(self) -> int:
        """Tokens of prompts and outputs that were computed so far; none while no replica has accepted the call."""
        num_generated = sum(answer.num_tokens for answer in self.answers)
        was_accepted = num_generated or self.queued or any(answer.finish_reason for answer in self.answers)
        return num_generated + self.call.num_prompt_tokens if was_accepted else 0

    def usage(self) -> Json:
        """Prompts count once each, generated tokens (end-of-text tokens too) of all choices."""
        num_prompt_tokens = self.call.num_prompt_tokens
        num_completion_tokens = sum(answer.num_tokens for answer in self.answers)
        firsts = self.answers[:: self.call.num_samples]
        num_cached = sum(answer.num_cached_tokens for answer in firsts)
        return _usage(num_prompt_tokens, num_completion_tokens, num_cached=num_cached) | self.extra_usage

    def placement_headers(self, *, explain: bool) -> dict[str, str]:
        """Where the call's first request went, what it found in the queue there, and why there if asked."""
        queued = self.queued
        if queued is None:
            return {}
        headers = {
            "x-carousel-queue-position": str(queued.position),
            "x-carousel-estimated-wait-ms": str(round(queued.estimated_wait_s * 1e3)),
        }
        if queued.replica_id:
            headers["x-carousel-replica"] = queued.replica_id
        if explain and queued.why_there:
            headers["x-carousel-why"] = queued.why_there
        return headers

    def log_end(self) -> None:
        """One line for a call that came to its end."""
        usage = self.usage()
        logger.info(
            "request %s finished: model %s, %d choices, %d prompt tokens, %d completion tokens",
            self.request_id,
            self.call.model.name,
            len(self.answers),
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )


class Format(Protocol):
    """How one endpoint writes its choices."""

    object: str
    chunk_object: str

    def choice(self, index: int, answer: Answer) -> Json:
        """A finished choice."""

    def chunk_choices(self, piece: ChoiceDelta, *, is_first: bool, details: Json | None = None) -> list[Json]:
        """The choices of the chunks that a piece makes, one chunk each; none when there is nothing to say.

        `details` are fields of the choice that has the text.
        """

    def write_logprobs(self, logprobs: list[TokenLogprob], names: TokenNames, num_top: int) -> Json:
        """The log-probabilities of tokens, each with so many of the likeliest."""

    def with_prompt(self, body: Json, choice: Json, prompt: Json) -> None:
        """Say in the body or in the choice what `prompt` says of its prompt."""


class ChatFormat:
    """/v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, index: int, answer: Answer) -> Json:
        message: Json = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.calls:
            message |= {"content": answer.text or None, "tool_calls": answer.calls}
        return {"index": index, "message": message} | _ending(answer.finish_reason, answer.stop_reason)

    def chunk_choices(self, piece: ChoiceDelta, *, is_first: bool, details: Json | None = None) -> list[Json]:
        deltas: list[tuple[Json, Json]] = []
        if is_first:
            deltas.append(({"role": "assistant", "content": ""}, _ending(None, None)))
        if piece.text or details:
            deltas.append(({"content": piece.text}, _ending(None, None) | (details or {})))
        if piece.calls:
            deltas.append(({"tool_calls": [_call_delta(call) for call in piece.calls]}, _ending(None, None)))
        if piece.finish_reason is not None:
            deltas.append(({}, _ending(piece.finish_reason, piece.stop_reason)))
        return [{"index": piece.index, "delta": delta} | ending for delta, ending in deltas]

    def write_logprobs(self, logprobs: list[TokenLogprob], names: TokenNames, num_top: int) -> Json:
        return chat_logprobs(logprobs, names, num_top)

    def with_prompt(self, body: Json, choice: Json, prompt: Json) -> None:
        body |= prompt


def called(piece: ToolCallDelta) -> Json:
    """A call, as far as its first piece tells it."""
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"id": piece.call_id, "type": "function", "function": function}


def _call_delta(piece: ToolCallDelta) -> Json:
    if piece.name is None:
        return {"index": piece.number, "function": {"arguments": piece.arguments}}
    return {"index": piece.number} | called(piece)


class CompletionFormat:
    """/v1/completions."""

    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, index: int, answer: Answer) -> Json:
        return {"index": index, "text": answer.text} | _ending(answer.finish_reason, answer.stop_reason)

    def chunk_choices(self, piece: ChoiceDelta, *, is_first: bool, details: Json | None = None) -> list[Json]:
        if not piece.text and piece.finish_reason is None and not details:
            return []
        ending = _ending(piece.finish_reason, piece.stop_reason) | (details or {})
        return [{"index": piece.index, "text": piece.text} | ending]

    def write_logprobs(self, logprobs: list[TokenLogprob], names: TokenNames, num_top: int) -> Json:
        return completion_logprobs(logprobs, names, num_top)

    def with_prompt(self, body: Json, choice: Json, prompt: Json) -> None:
        choice |= prompt


def _ending(finish_reason: str | None, stop_reason: str | int | None) -> Json:
    return {"logprobs": None, "finish_reason": finish_reason, "stop_reason": stop_reason}


class Writer(ABC):
    """Writes the response of one endpoint to a call."""

    @abstractmethod
    async def full_response(self, progress: Progress, pieces: AsyncGenerator[ChoiceDelta, None]) -> Json:
        """Wait for the end of all requests and write one response."""

    def events(self, progress: Progress, pieces: AsyncGenerator[ChoiceDelta, None]) -> AsyncGenerator[bytes, None]:
        """The server-sent events of a call, for the bodies of the endpoint that can ask for them.

        An error before the first event is raised, so that it can have a status of its own; a later one becomes an
        event.
        """
        raise AssertionError("no body of this endpoint asks for a stream")


@dataclass(frozen=True, slots=True)
class ChoiceWriter(Writer):
    """Answers that are lists of choices, streamed as chunks with [DONE] behind them."""

    form: Format

    async def full_response(self, progress: Progress, pieces: AsyncGenerator[ChoiceDelta, None]) -> Json:
        call, form = progress.call, self.form
        details = DetailsWriter(call, form.write_logprobs) if call.detail_options else None
        with progress.metrics:
            async with aclosing(pieces):
                async for piece in pieces:
                    progress.add(piece, keep_text=True)
                    if details is not None and piece.details is not None:
                        details.keep(piece.index, piece.details)
        progress.log_end()
        body = _envelope(call, form.object) | {"choices": [], "usage": progress.usage()}
        for request in range(len(progress.answers)) if details is None else _best(call, details):
            choice = form.choice(len(body["choices"]), progress.answers[request])
            if details is not None:
                choice |= details.of_choice(request)
                form.with_prompt(body, choice, details.of_prompt(request))
            body["choices"].append(choice)
        return body

    async def events(
        self, progress: Progress, pieces: AsyncGenerator[ChoiceDelta, None]
    ) -> AsyncGenerator[bytes, None]:
        writer = _ChunkWriter(progress, self.form)
        try:
            with progress.metrics:
                async with aclosing(pieces):
                    async for piece in pieces:
                        for written in writer.events(piece):
                            yield written
            if progress.call.include_usage:
                yield writer.usage_event()
            progress.log_end()
        except Exception as error:
            if not writer.has_begun and not progress.is_open:
                raise
            log_error(error, progress.request_id)
            yield event(error_body(error, progress.request_id))
        yield DONE


def _best(call: Call, details: DetailsWriter) -> list[int]:
    """The requests whose answers go back, by index: of each prompt's samples the likeliest, in this order."""
    chosen: list[int] = []
    for first in range(0, len(call.requests), call.num_samples):
        samples: list[int] = list(range(first, first + call.num_samples))
        if call.detail_options.choose_best:
            samples.sort(key=details.mean_logprob, reverse=True)
        chosen += samples[: call.num_choices]
    return chosen


class _ChunkWriter:
    """The chunks of one streamed call."""

    def __init__(self, progress: Progress, form: Format) -> None:
        self._progress = progress
        self._form = form
        self._call = progress.call
        self._envelope = _envelope(progress.call, form.chunk_object)
        self._begun: set[int] = set()
        self._text_events: dict[int, _TextEvents] = {}  # by choice, once it has begun
        self._details = DetailsWriter(self._call, form.write_logprobs) if self._call.detail_options else None

    @property
    def has_begun(self) -> bool:
        return bool(self._begun)

    def events(self, piece: ChoiceDelta) -> list[bytes]:
        """Book a piece and write what it adds to its choice; nothing when there is nothing to say yet."""
        self._progress.add(piece, keep_text=False)
        text_events = self._text_events.get(piece.index)
        if text_events is not None and piece.finish_reason is None and not piece.calls:
            return [text_events.write(piece.text)] if piece.text else []
        if self._details is not None:
            return self._detailed_events(piece, self._details)
        if not piece.num_tokens and piece.finish_reason is None:
            return []  # it is queued; no word goes out before there is a token
        choices = self._form.chunk_choices(piece, is_first=piece.index not in self._begun)
        if choices:
            self._begun.add(piece.index)
            if not self._call.continuous_usage:  # else they differ in their usage too
                self._text_events[piece.index] = _TextEvents(self._text_event(piece.index, _MARK))
        return [event(self._chunk(choice)) for choice in choices]

    def _detailed_events(self, piece: ChoiceDelta, details: DetailsWriter) -> list[bytes]:
        """Of a call whose events differ in more than their text."""
        if piece.details is None:
            return []  # it is queued
        is_first = piece.index not in self._begun
        choices = self._form.chunk_choices(piece, is_first=is_first, details=details.of_chunk(piece.details))
        chunks = [self._chunk(choice) for choice in choices]
        if chunks and is_first:
            self._begun.add(piece.index)
            self._form.with_prompt(chunks[0], choices[0], details.of_prompt(piece.index))
        return [event(chunk) for chunk in chunks]

    def _text_event(self, index: int, text: str) -> bytes:
        """An event in the middle of a choice."""
        piece = ChoiceDelta(index, text, num_tokens=1, num_cached_tokens=0)
        [choice] = self._form.chunk_choices(piece, is_first=False)
        return event(self._chunk(choice))

    def _chunk(self, choice: Json) -> Json:
        chunk = self._envelope | {"choices": [choice]}
        if self._call.include_usage:
            chunk["usage"] = self._progress.usage() if self._call.continuous_usage else None
        return chunk

    def usage_event(self) -> bytes:
        """The last chunk, without choices."""
        return event(self._envelope | {"choices": [], "usage": self._progress.usage()})


_MARK = "\0"


class _TextEvents:
    """The events of a choice that differ in their text only, as all but its first and its last do.

    Encoded once, with a mark for the text: to build and to encode a chunk for every token costs eight times as much.
    """

    def __init__(self, marked: bytes) -> None:
        # The last one: nothing that follows the text is a string, but a name before it might be the mark.
        self._before, mark, self._after = marked.rpartition(to_json(_MARK))
        assert mark, "the text of an event is in it"

    def write(self, text: str) -> bytes:
        """The event that says this text."""
        return b"%b%b%b" % (self._before, to_json(text), self._after)


def _envelope(call: Call, object_name: str) -> Json:
    return {
        "id": call.call_id,
        "object": object_name,
        "created": call.created,
        "model": call.model.name,
        "system_fingerprint": None,
    }


def answered_elsewhere(
    form: Format, call_id: str, model: str, answer: Answer, *, created: int, num_prompt: int
) -> Json:
    """The whole response for one choice that somebody else has computed, of a prompt of `num_prompt` tokens."""
    return {
        "id": call_id,
        "object": form.object,
        "created": created,
        "model": model,
        "system_fingerprint": None,
        "choices": [form.choice(0, answer)],
        "usage": _usage(num_prompt, answer.num_tokens, num_cached=answer.num_cached_tokens),
    }


def _usage(num_prompt: int, num_completion: int, *, num_cached: int) -> Json:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
