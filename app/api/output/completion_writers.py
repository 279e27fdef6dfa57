"""Writes responses and chunks of chats and completions in OpenAI's format, as plain dicts, which encode fast."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NotRequired, Protocol, cast

from typing_extensions import TypedDict

from app.api.http.errors import error_body
from app.api.output.answer import Answer, ChoiceOutput, CustomCall, FunctionCall, TokenUsage, tool_call
from app.api.output.choices import ChoiceDelta
from app.api.output.response_state import ResponseState, Writer
from app.api.output.token_details import CHAT_LOGPROBS, COMPLETION_LOGPROBS, DetailsWriter, LogprobsForm
from app.api.output.tool_calls import ToolCallDelta
from app.api.prepared_request import AnswerInfo
from app.json_pieces import DONE, Json, Rows, as_json, event, event_pieces, joined

Reason = Literal["stop", "length", "tool_calls"]


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]  # DeepSeek's name; the next field is vLLM's, and clients read either
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[FunctionCall | CustomCall]]


class FinishedChoice(TypedDict):
    index: int
    logprobs: Json | None
    finish_reason: Reason
    stop_reason: str | int | None
    token_ids: NotRequired[Rows[int]]


class ChatChoice(FinishedChoice):
    message: AnswerMessage


class PromptDetails(TypedDict, total=False):
    prompt_logprobs: Rows[Json | None]
    prompt_token_ids: Rows[int]


class TextChoice(FinishedChoice, PromptDetails):
    text: str


class Choices(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: None
    usage: TokenUsage


class ChatCompletion(Choices, PromptDetails):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Completion(Choices):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class Format(Protocol):
    """The format of one endpoint's choices."""

    object: str
    chunk_object: str
    logprobs: LogprobsForm

    def choice(self, index: int, output: ChoiceOutput) -> Any:
        """Return a finished choice as JSON."""

    def chunk_choices(self, piece: ChoiceDelta, *, is_first: bool, details: Json | None = None) -> list[Json]:
        """Return the choices for a delta, each for a separate chunk. Returns [] for a delta without content.

        `details` contains additional fields for the choice that carries the text.
        """

    def with_prompt(self, body: Any, choice: Any, prompt: Json) -> None:
        """Add the fields about a choice's prompt to the body or to the choice, depending on the endpoint's API."""


class ChatFormat:
    """The format of /v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    logprobs = CHAT_LOGPROBS

    def choice(self, index: int, output: ChoiceOutput) -> ChatChoice:
        text, reasoning, calls = str(output.text), str(output.reasoning), output.calls
        message: AnswerMessage = {"role": "assistant", "content": text, "refusal": None}
        if reasoning:
            message["reasoning_content"] = message["reasoning"] = reasoning
        if calls:
            message["content"], message["tool_calls"] = text or None, calls
        return {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": cast(Reason, output.finish_reason),
            "stop_reason": output.stop_reason,
        }

    def chunk_choices(self, piece: ChoiceDelta, *, is_first: bool, details: Json | None = None) -> list[Json]:
        deltas: list[tuple[Json, Json]] = []
        if is_first:
            deltas.append(({"role": "assistant", "content": ""}, _ending(None, None)))
        if piece.reasoning:
            both = {"reasoning_content": piece.reasoning, "reasoning": piece.reasoning}
            deltas.append((both, _ending(None, None)))
        if piece.text or (details and not piece.reasoning):
            deltas.append(({"content": piece.text}, _ending(None, None)))
        if details:
            deltas[-1][1].update(details)
        if piece.calls:
            deltas.append(({"tool_calls": [_call_delta(call) for call in piece.calls]}, _ending(None, None)))
        if piece.finish_reason is not None:
            deltas.append(({}, _ending(piece.finish_reason, piece.stop_reason)))
        return [{"index": piece.index, "delta": delta} | ending for delta, ending in deltas]

    def with_prompt(self, body: Any, choice: Any, prompt: Json) -> None:
        body |= prompt


def _call_delta(piece: ToolCallDelta) -> Json:
    if piece.name is None:
        more = (
            {"custom": {"input": piece.arguments}} if piece.is_custom else {"function": {"arguments": piece.arguments}}
        )
        return {"index": piece.number, **more}
    return {"index": piece.number} | tool_call(piece)


class CompletionFormat:
    """The format of /v1/completions."""

    object = "text_completion"
    chunk_object = "text_completion"
    logprobs = COMPLETION_LOGPROBS

    def choice(self, index: int, output: ChoiceOutput) -> TextChoice:
        return {
            "index": index,
            "text": str(output.text),
            "logprobs": None,
            "finish_reason": cast(Reason, output.finish_reason),
            "stop_reason": output.stop_reason,
        }

    def chunk_choices(self, piece: ChoiceDelta, *, is_first: bool, details: Json | None = None) -> list[Json]:
        if not piece.text and piece.finish_reason is None and not details:
            return []
        ending = _ending(piece.finish_reason, piece.stop_reason) | (details or {})
        return [{"index": piece.index, "text": piece.text} | ending]

    def with_prompt(self, body: Any, choice: Any, prompt: Json) -> None:
        choice |= prompt


def _ending(finish_reason: str | None, stop_reason: str | int | None) -> Json:
    return {"logprobs": None, "finish_reason": finish_reason, "stop_reason": stop_reason}


@dataclass(frozen=True, slots=True)
class ChoiceWriter(Writer):
    """Writes responses with a list of choices, and their streams of chunks, which end with [DONE]."""

    form: Format

    async def full_response(self, state: ResponseState) -> ChatCompletion | Completion:
        choices = ChoicesBuilder(state, self.form)
        await state.read(choices.add, keep_text=True)
        state.log_end()
        return choices.as_json()

    def event_writer(self, state: ResponseState) -> ChunkWriter:
        return ChunkWriter(state, self.form)


class ChoicesBuilder:
    """Builds a response with all choices. The answer stores the texts, and this builder stores the token details."""

    def __init__(self, answer: Answer, form: Format) -> None:
        self._answer = answer
        self._form = form
        options = answer.info.detail_options
        self._details = (
            None if options is None else DetailsWriter(answer.info, options, answer.token_bytes, form.logprobs)
        )

    def add(self, piece: ChoiceDelta) -> None:
        """Add a delta. The answer must already contain its text."""
        if self._details is not None and piece.details is not None:
            self._details.keep(piece.index, piece.details)

    def as_json(self) -> ChatCompletion | Completion:
        """Return the response so far."""
        answer, form, details = self._answer, self._form, self._details
        body = _envelope(answer.info, form.object) | {"choices": [], "usage": answer.usage()}
        for request in range(len(answer.outputs)) if details is None else _best(answer.info, details):
            choice = form.choice(len(body["choices"]), answer.outputs[request])
            if details is not None:
                choice |= details.of_choice(request)
                form.with_prompt(body, choice, details.of_prompt(request))
            body["choices"].append(choice)
        return cast(ChatCompletion | Completion, body)


def _best(info: AnswerInfo, details: DetailsWriter) -> list[int]:
    """Return the indexes of the samples in the response. With `best_of`, each prompt's likeliest samples are chosen."""
    chosen: list[int] = []
    for first in range(0, info.num_requests, info.num_samples):
        samples: list[int] = list(range(first, first + info.num_samples))
        if info.num_choices < info.num_samples:
            samples.sort(key=details.mean_logprob, reverse=True)
        chosen += samples[: info.num_choices]
    return chosen


class ChunkWriter:
    """Writes the chunks of one streamed response."""

    __slots__ = ("_answer", "_around_text", "_begun", "_details", "_envelope", "_events_differ", "_form", "_info")

    def __init__(self, answer: Answer, form: Format) -> None:
        self._answer = answer
        self._form = form
        self._info = answer.info
        self._envelope = _envelope(answer.info, form.chunk_object)
        self._begun: set[int] = set()
        # Maps each choice to the bytes before and after the text in events from the middle of the choice.
        self._around_text: dict[int, tuple[bytes, bytes]] = {}
        options = self._info.detail_options
        self._details = (
            None if options is None else DetailsWriter(answer.info, options, answer.token_bytes, form.logprobs)
        )
        # Whether the events in the middle of a choice differ in more than their text.
        self._events_differ = self._details is not None or self._info.continuous_usage

    @property
    def has_begun(self) -> bool:
        return bool(self._begun)

    def write(self, piece: ChoiceDelta) -> Iterable[bytes]:
        is_first = piece.index not in self._begun
        is_plain = piece.finish_reason is None and not piece.calls and not piece.reasoning
        if is_plain and not is_first and not self._events_differ:
            if not piece.text:
                return ()
            before, after = self._around_text.get(piece.index) or self._around_text_of(piece.index)
            return (b"%b%b%b" % (before, as_json(piece.text), after),)
        if self._details is not None:
            return self._detailed_events(piece, self._details)
        if piece.is_empty:
            return ()  # nothing is sent while the request is queued
        choices = self._form.chunk_choices(piece, is_first=is_first)
        if choices:
            self._begun.add(piece.index)
        return (b"".join([event(self._chunk(choice, piece)) for choice in choices]),) if choices else ()

    def _detailed_events(self, piece: ChoiceDelta, details: DetailsWriter) -> Iterable[bytes]:
        """Return the events for a delta of a call that asks for details."""
        if piece.details is None and piece.is_empty:
            return ()  # the request is queued
        is_first = piece.index not in self._begun
        choices = self._form.chunk_choices(
            piece, is_first=is_first, details=None if piece.details is None else details.of_chunk(piece.details)
        )
        chunks = [self._chunk(choice, piece) for choice in choices]
        if chunks and is_first:
            self._begun.add(piece.index)
            self._form.with_prompt(chunks[0], choices[0], details.of_prompt(piece.index))
            return joined(chain.from_iterable(map(event_pieces, chunks)))
        return joined(map(event, chunks))

    def _around_text_of(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text in events of a choice that differ only in their text.

        The event is encoded once, with a marker in place of the text. Building and encoding a chunk for every token
        would cost eight times as much.
        """
        text = "\0"
        marked = ChoiceDelta(index, text, num_tokens=1, num_cached_tokens=0)
        [choice] = self._form.chunk_choices(marked, is_first=False)
        # Use the last marker: no string follows the text, but the model's name before it could equal the marker.
        before, mark, after = event(self._chunk(choice, marked)).rpartition(as_json(text))
        assert mark, "an event contains its text"
        self._around_text[index] = before, after
        return before, after

    def _chunk(self, choice: Json, piece: ChoiceDelta) -> Json:
        """Return a chunk for a delta. If it contains only the role, its usage excludes the delta's tokens."""
        chunk = self._envelope | {"choices": [choice]}
        if self._info.include_usage:
            chunk["usage"] = None
        if self._info.continuous_usage:
            chunk["usage"] = self._answer.usage(before=piece if "role" in choice.get("delta", ()) else None)
        return chunk

    def end(self) -> Iterable[bytes]:
        if not self._info.include_usage:
            return (DONE,)
        return (event(self._envelope | {"choices": [], "usage": self._answer.usage()}) + DONE,)

    def fail(self, error: Exception) -> Iterable[bytes]:
        return (event(error_body(error, self._answer.request_id)) + DONE,)


def _envelope(info: AnswerInfo, object_name: str) -> Json:
    return {
        "id": info.response_id,
        "object": object_name,
        "created": info.created,
        "model": info.model,
        "system_fingerprint": None,
    }
