"""POST /v1/messages, Anthropic's API: the answer is one message, or a stream of events that build the message."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, cast

from pydantic_core import from_json, to_json
from typing_extensions import TypedDict

from app.api.endpoints.chat import prepare_chat
from app.api.endpoints.endpoint import Endpoint
from app.api.http.errors import MESSAGES_PATH, error_body
from app.api.output.answer import GrowingText, MoreUsage
from app.api.output.choices import ChoiceDelta
from app.api.output.response_state import ResponseState, Writer
from app.api.output.tool_calls import ToolCallDelta
from app.api.prepared_request import PreparedRequest, ServedModel
from app.api.request_context import RequestContext
from app.api.schemas.messages import MessagesRequest
from app.json_pieces import Json, named_event

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
_STOP_REASONS: dict[str, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use"}


class ContentBlock(TypedDict):
    type: Literal["thinking", "text", "tool_use"]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    text: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[Json]


class MessagesUsage(MoreUsage):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class CreatedMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason
    stop_sequence: str | None
    usage: MessagesUsage


def prepare_message(body: MessagesRequest, model: ServedModel, context: RequestContext) -> PreparedRequest:
    """Check the body and tokenize its chat. Raises InvalidRequest."""
    return prepare_chat(body.as_chat(), model, context, prefix="msg_")


class MessagesWriter(Writer):
    """Writes the answer to one call of /v1/messages."""

    async def full_response(self, state: ResponseState) -> CreatedMessage:
        """Wait until the message has ended, and return it."""
        message = MessageBuilder(state)
        await state.read(lambda piece: deque(message.add(piece), maxlen=0))  # no events are sent
        state.log_end()
        return message.as_json()

    def event_writer(self, state: ResponseState) -> MessageBuilder:
        return MessageBuilder(state)


class MessageBuilder:
    """Builds a message block by block, and creates the events that report the blocks.

    message_start, ping,
        for each block: content_block_start, content_block_delta …, content_block_stop
    message_delta, message_stop, or error
    """

    def __init__(self, state: ResponseState) -> None:
        self._state = state
        self._content: list[_Thinking | _Text | _ToolUse] = []
        self._stop_reason: StopReason | None = None
        self._stop_sequence: str | None = None
        self.has_begun = False

    def write(self, piece: ChoiceDelta) -> Iterable[bytes]:
        """Add a delta and return its events as bytes."""
        written = b"".join(map(named_event, self.add(piece)))
        return (written,) if written else ()

    def end(self) -> Iterable[bytes]:
        """Return no events, because the last delta has ended the message."""
        return ()

    def fail(self, error: Exception) -> Iterable[bytes]:
        """Return the event that reports an error."""
        return (named_event(error_body(error, self._state.request_id, MESSAGES_PATH)),)

    def add(self, piece: ChoiceDelta) -> Iterator[Json]:
        """Add a delta and yield its events."""
        if piece.is_empty:
            return  # the request is queued; no event is sent before the first token
        if not self.has_begun:
            self.has_begun = True
            yield {"type": "message_start", "message": self.as_json()}
            yield {"type": "ping"}
        if piece.reasoning:
            yield from self._say(piece.reasoning, _Thinking)
        if piece.text:
            yield from self._say(piece.text, _Text)
        for call in piece.calls:
            yield from self._call(call)
        if piece.finish_reason is not None:
            yield from self._end(piece.finish_reason, piece.stop_reason)

    def as_json(self) -> CreatedMessage:
        """Return the message in its current state. The stop reason is None until the message has ended."""
        prepared = self._state.prepared
        return {
            "id": prepared.response_id,
            "type": "message",
            "role": "assistant",
            "model": prepared.model.name,
            "content": [block.as_json() for block in self._content],
            "stop_reason": cast(StopReason, self._stop_reason),
            "stop_sequence": self._stop_sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> MessagesUsage:
        usage = self._state.usage()
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": usage["completion_tokens"],
            **self._state.more_usage(),
        }

    def _say(self, text: str, kind: type[_Thinking | _Text]) -> Iterator[Json]:
        if not self._content or not isinstance(self._content[-1], kind):
            yield from self._open(kind())
        yield self._delta(text)

    def _call(self, piece: ToolCallDelta) -> Iterator[Json]:
        if piece.name is not None:
            yield from self._open(_ToolUse(piece.call_id, piece.name))
        if piece.arguments:
            yield self._delta(piece.arguments)

    def _open(self, block: _Thinking | _Text | _ToolUse) -> Iterator[Json]:
        yield from self._close()
        self._content.append(block)
        yield {"type": "content_block_start", "index": self._index, "content_block": block.as_json()}

    def _delta(self, text: str) -> Json:
        """Add text to the last block, and return the event that reports the text."""
        block = self._content[-1]
        block.text.add(text)
        return {"type": "content_block_delta", "index": self._index, "delta": block.delta(text)}

    def _close(self) -> Iterator[Json]:
        if self._content:
            yield {"type": "content_block_stop", "index": self._index}

    @property
    def _index(self) -> int:
        return len(self._content) - 1

    def _end(self, finish_reason: str, stop_reason: str | int | None) -> Iterator[Json]:
        yield from self._close()
        if isinstance(stop_reason, str) and finish_reason == "stop":
            self._stop_reason, self._stop_sequence = "stop_sequence", stop_reason
        else:
            self._stop_reason = _STOP_REASONS.get(finish_reason, "end_turn")
        ending = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        yield {"type": "message_delta", "delta": ending, "usage": self._usage()}
        yield {"type": "message_stop"}


@dataclass(slots=True)
class _Thinking:
    """A block with the reasoning before the answer. The signature is empty."""

    text: GrowingText = field(default_factory=GrowingText)

    def as_json(self) -> ContentBlock:
        return {"type": "thinking", "thinking": str(self.text), "signature": ""}

    @staticmethod
    def delta(text: str) -> Json:
        return {"type": "thinking_delta", "thinking": text}


@dataclass(slots=True)
class _Text:
    """A block with text of the answer."""

    text: GrowingText = field(default_factory=GrowingText)

    def as_json(self) -> ContentBlock:
        return {"type": "text", "text": str(self.text)}

    @staticmethod
    def delta(text: str) -> Json:
        return {"type": "text_delta", "text": text}


@dataclass(slots=True)
class _ToolUse:
    """A block with a tool call. `text` contains the arguments."""

    call_id: str
    name: str
    text: GrowingText = field(default_factory=GrowingText)

    def as_json(self) -> ContentBlock:
        return {"type": "tool_use", "id": self.call_id, "name": self.name, "input": _object_of(str(self.text))}

    @staticmethod
    def delta(text: str) -> Json:
        return {"type": "input_json_delta", "partial_json": text}


def _object_of(arguments: str) -> dict[str, Any]:
    """Parse the arguments as an object. Truncated JSON is accepted, and anything but an object becomes {}."""
    try:
        # A model may write a number that overflows to infinity, which JSON cannot express. The number becomes null.
        value = from_json(to_json(from_json(arguments, allow_partial=True), inf_nan_mode="null"))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


MESSAGES = Endpoint(
    MESSAGES_PATH,
    MessagesRequest,
    prepare_message,
    lambda _: MessagesWriter(),
    summary="Generate a message",
    response=CreatedMessage,
)
