"""POST /v1/responses: the response is one object, or a stream of events that build the object."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, takewhile
from typing import Any, Literal, NotRequired, cast

from msgspec import structs
from pydantic_core import to_json
from typing_extensions import TypedDict

from app.api.endpoints.chat import prepare_chat
from app.api.endpoints.endpoint import Endpoint
from app.api.http.errors import error_body
from app.api.output.answer import Answer, GrowingText, ResponsesUsage
from app.api.output.choices import ChoiceDelta
from app.api.output.response_state import ResponseState, Writer
from app.api.output.token_details import PackedLogprobs, TokenLogprob, TokenNames, chat_entry
from app.api.output.tool_calls import ToolCallDelta
from app.api.prepared_request import AnswerInfo, PreparedRequest, ServedModel
from app.api.request_context import RequestContext
from app.api.schemas.conversation import VendorTool
from app.api.schemas.requests import ChatRequest
from app.api.schemas.responses import ResponsesRequest, full_name
from app.batches import RESPONSE_RUNS, RESPONSES_PATH
from app.errors import ContextTooLong, InvalidRequest
from app.json_pieces import Json, Rows, joined, named_event, named_event_pieces


def prepare_response(body: ResponsesRequest, model: ServedModel, context: RequestContext) -> PreparedRequest:
    """Check the body and tokenize its chat. `truncation` may drop old turns of the chat. Raises InvalidRequest."""
    if body.storing_param is not None and not context.may_store:
        raise InvalidRequest(
            f"{body.storing_param} requires a service that stores files and batches (`batches` in its configuration), "
            f"and is not supported in batches; remove it and send the whole conversation as input",
            param=body.storing_param,
        )
    chat, prepare = body.as_chat(), partial(prepare_chat, model=model, context=context, prefix="resp_")
    try:
        return prepare(chat)
    except ContextTooLong:
        if body.truncation == "disabled":
            raise
    return _prepare_newest(chat, prepare)


def _prepare_newest(chat: ChatRequest, prepare: Callable[[ChatRequest], PreparedRequest]) -> PreparedRequest:
    """Prepare a chat that is too long, without its oldest turns but with its instructions. Raises InvalidRequest.

    A turn begins with a user message, so a tool call is never separated from its result.
    """
    messages = chat.messages
    instructions = list(takewhile(lambda message: message.role in ("system", "developer"), messages))
    begins = [at for at, message in enumerate(messages) if message.role == "user"] or [len(instructions)]

    @cache  # a turn that fits is prepared only once
    def prepared(turn: int) -> PreparedRequest:
        return prepare(chat.model_copy(update={"messages": [*instructions, *messages[begins[turn] :]]}))

    def fits(turn: int) -> bool:
        try:
            return bool(prepared(turn))
        except ContextTooLong:
            return False

    # The search excludes the last turn. If the last turn does not fit, this call raises the error with the numbers.
    return prepared(bisect_left(range(len(begins) - 1), True, key=fits))


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class RepeatedFields(TypedDict):  # the fields that repeat the request, in their order on the wire
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: Json
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Json
    service_tier: str | None
    store: bool
    temperature: float
    text: Json
    tool_choice: str | Json
    tools: list[Json]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None


class OutputItem(TypedDict):
    id: str
    type: Literal["reasoning", "message", "function_call", "custom_tool_call"]
    status: str
    role: NotRequired[Literal["assistant"]]
    summary: NotRequired[list[Json]]
    content: NotRequired[list[Json]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    namespace: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]


class Response(RepeatedFields):
    id: str
    object: Literal["response"]
    created_at: int
    status: ResponseStatus
    error: Json | None
    incomplete_details: Json | None
    model: str
    output: list[OutputItem]
    usage: ResponsesUsage | None  # None until the response ends


@dataclass(frozen=True, slots=True)
class ResponsesWriter(Writer):
    """Writes the answer to one call of /v1/responses."""

    body: ResponsesRequest

    async def full_response(self, state: ResponseState) -> Response:
        """Wait until the response has ended, and return it."""
        response = self.event_writer(state)
        await state.read(lambda piece: deque(response.add(piece), maxlen=0))  # no events are sent
        state.log_end()
        return response.as_json()

    def event_writer(self, state: ResponseState) -> ResponseBuilder:
        return ResponseBuilder(state, _of_body(self.body))

    def info(self, state: ResponseState) -> AnswerInfo:
        return structs.replace(state.info, of_body=to_json(_of_body(self.body)))


def _of_body(body: ResponsesRequest) -> RepeatedFields:
    repeated = {name: getattr(body, name) for name in RepeatedFields.__annotations__} | {
        "reasoning": body.reasoning.model_dump(),
        "text": {"format": body.text.format.as_json()},
        "tool_choice": body.tool_choice
        if isinstance(body.tool_choice, str)
        else body.tool_choice.model_dump(exclude_none=True),
        "tools": [tool.as_json() for tool in body.tools if not isinstance(tool, VendorTool)],
        "top_logprobs": body.top_logprobs or 0,
        "user": body.user or None,
    }
    return cast(RepeatedFields, repeated)


def _namespaces(tools: Iterable[Json]) -> dict[str, tuple[str, str]]:
    """Return the namespace and the short name of each tool in a namespace, by the name that the model calls."""
    return {
        full_name(each["name"], tool["name"]): (each["name"], tool["name"])
        for each in tools
        if each["type"] == "namespace"
        for tool in each["tools"]
    }


class ResponseBuilder:
    """Builds a response item by item, and creates the events that report the items.

    response.created, response.in_progress,
        for each item: output_item.added, … deltas …, output_item.done
    response.completed, or response.incomplete, or response.failed
    """

    def __init__(self, answer: Answer, of_body: RepeatedFields) -> None:
        """`of_body` contains the response's fields that repeat its request."""
        self._answer = answer
        self._of_body = of_body
        self._namespaces = _namespaces(of_body["tools"])
        self._has_logprobs = answer.info.detail_options is not None
        self._output: list[_ReasoningItem | _Message | _Call] = []
        self._status = "queued" if of_body["background"] else "in_progress"
        self._error: Json | None = None
        self._num_events = 0
        self._names = TokenNames(answer.token_bytes)
        self._pending_logprobs: list[TokenLogprob] = []  # of tokens that no event has reported yet
        self.has_begun = False

    def write(self, piece: ChoiceDelta) -> Iterable[bytes]:
        """Add a delta and return its events as bytes."""
        if self._has_logprobs:
            return joined(chain.from_iterable(map(named_event_pieces, self.add(piece))))
        written = b"".join(map(named_event, self.add(piece)))  # this path saves 4 µs per token
        return (written,) if written else ()

    def end(self) -> Iterable[bytes]:
        """Return no events, because the last delta has ended the response."""
        return ()

    def fail(self, error: Exception) -> Iterable[bytes]:
        """Return the last events of a response that has failed."""
        return self._last_events("failed", error)

    def cancel(self) -> Iterable[bytes]:
        """Return the last events of a cancelled response, with `response.incomplete`: OpenAI has no cancelled event."""
        return self._last_events("cancelled")

    def _last_events(self, status: str, error: Exception | None = None) -> Iterable[bytes]:
        return joined(chain.from_iterable(map(named_event_pieces, self._stopped(status, error))))

    def stop(self, status: str, error: Exception | None = None) -> None:
        """End the response early, with the status "failed" or "cancelled"."""
        self._status = status
        if error is not None:
            body = error_body(error, self._answer.request_id)["error"]
            code = "rate_limit_exceeded" if body["type"] == "rate_limit_error" else "server_error"
            self._error = {"code": code, "message": body["message"]}
        for item in self._output:
            if item.status == "in_progress":
                item.status = "incomplete"

    def add(self, piece: ChoiceDelta) -> Iterator[Json]:
        """Add a delta and yield its events."""
        if piece.is_empty:
            return  # the request is queued; no event is sent before the first token
        yield from self._begin()
        if piece.details is not None:
            self._pending_logprobs += piece.details.text_logprobs
        if piece.reasoning:
            yield from self._reason(piece.reasoning)
        if piece.text:
            yield from self._say(piece.text)
        for call in piece.calls:
            yield from self._call(call)
        if piece.finish_reason is not None:
            if self._pending_logprobs and not (self._output and not isinstance(self._output[-1], _Message)):
                yield from self._say("")  # the end token has log-probabilities but no text
            yield from self._end(is_complete=piece.finish_reason != "length")

    def _stopped(self, status: str, error: Exception | None) -> Iterator[Json]:
        yield from self._begin()
        self.stop(status, error)
        kind = "incomplete" if status == "cancelled" else status
        yield self._event(f"response.{kind}", response=self.as_json())

    def as_json(self) -> Response:
        """Return the response in its current state."""
        info = self._answer.info
        is_incomplete = self._status == "incomplete"
        return {
            **self._of_body,
            "id": info.response_id,
            "object": "response",
            "created_at": info.created,
            "status": cast(ResponseStatus, self._status),
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "model": info.model,
            "output": [item.as_json() for item in self._output],
            "usage": None if self._status in RESPONSE_RUNS else self._answer.usage_of_responses(),
        }

    def _begin(self) -> Iterator[Json]:
        if not self.has_begun:
            self.has_begun = True
            self._status = "in_progress"
            yield self._event("response.created", response=self.as_json())
            yield self._event("response.in_progress", response=self.as_json())

    def _reason(self, text: str) -> Iterator[Json]:
        if not self._output or not isinstance(self._output[-1], _ReasoningItem):
            yield from self._open(_ReasoningItem(self._item_id("rs")))
        item = self._output[-1]
        assert isinstance(item, _ReasoningItem), "a reasoning item is open"
        item.text.add(text)
        self._pending_logprobs = []  # only text has log-probabilities
        yield self._event("response.reasoning_text.delta", **self._place(), content_index=0, delta=text)

    def _say(self, text: str) -> Iterator[Json]:
        if not self._output or not isinstance(self._output[-1], _Message):
            yield from self._open(self._new_message())
        message = self._output[-1]
        assert isinstance(message, _Message), "a message is open"
        message.text.add(text)
        logprobs = [chat_entry(token, message.names, message.num_top) for token in self._pending_logprobs]
        message.logprobs.add(self._pending_logprobs)
        self._pending_logprobs = []
        yield self._event("response.output_text.delta", **self._place(), content_index=0, delta=text, logprobs=logprobs)

    def _call(self, piece: ToolCallDelta) -> Iterator[Json]:
        if piece.name is not None:
            item_id = self._item_id("ctc" if piece.is_custom else "fc")
            namespace, name = self._namespaces.get(piece.name, (None, piece.name))
            yield from self._open(_Call(item_id, piece.call_id, name, piece.is_custom, namespace))
        call = self._output[-1]
        assert isinstance(call, _Call), "deltas of a call follow each other"
        self._pending_logprobs = []  # only text has log-probabilities
        call.arguments.add(piece.arguments)
        if piece.arguments:
            yield self._event(f"response.{call.argument_kind}.delta", **self._place(), delta=piece.arguments)

    def _open(self, item: _ReasoningItem | _Message | _Call) -> Iterator[Json]:
        yield from self._close(is_complete=True)
        self._output.append(item)
        yield self._item_event("response.output_item.added")
        if isinstance(item, _Message):
            yield self._event("response.content_part.added", **self._place(), content_index=0, part=item.part())

    def _close(self, *, is_complete: bool) -> Iterator[Json]:
        """End the last item."""
        if not self._output:
            return
        item = self._output[-1]
        item.status = "completed" if is_complete else "incomplete"
        if isinstance(item, _Message):
            place = self._place() | {"content_index": 0}
            yield self._event("response.output_text.done", **place, text=str(item.text), logprobs=item.rows())
            yield self._event("response.content_part.done", **place, part=item.part())
        elif isinstance(item, _ReasoningItem):
            place = self._place() | {"content_index": 0}
            yield self._event("response.reasoning_text.done", **place, text=str(item.text))
        else:
            named = {} if item.is_custom else {"name": item.name}  # earlier versions of OpenAI's types include `name`
            yield self._event(f"response.{item.argument_kind}.done", **self._place(), **named, **item.argument())
        yield self._item_event("response.output_item.done")

    def _end(self, *, is_complete: bool) -> Iterator[Json]:
        if not self._output:
            yield from self._open(self._new_message())
        yield from self._close(is_complete=is_complete)
        self._status = "completed" if is_complete else "incomplete"
        yield self._event(f"response.{self._status}", response=self.as_json())

    def _new_message(self) -> _Message:
        return _Message(self._item_id("msg"), self._names, self._of_body["top_logprobs"])

    def _item_id(self, kind: str) -> str:
        """Return the id of the next item. All attempts to generate a stored response use the same ids."""
        return f"{kind}_{self._answer.info.response_id.removeprefix('resp_')}-{len(self._output)}"

    def _place(self) -> Json:
        return {"item_id": self._output[-1].item_id, "output_index": len(self._output) - 1}

    def _item_event(self, kind: str) -> Json:
        return self._event(kind, output_index=len(self._output) - 1, item=self._output[-1].as_json())

    def _event(self, kind: str, **fields: Any) -> Json:
        event = {"type": kind, "sequence_number": self._num_events} | fields
        self._num_events += 1
        return event


@dataclass(slots=True)
class _ReasoningItem:
    """An item with the reasoning before the answer."""

    item_id: str
    text: GrowingText = field(default_factory=GrowingText)
    status: str = "in_progress"

    def as_json(self) -> OutputItem:
        content = [{"type": "reasoning_text", "text": str(self.text)}] if self.status != "in_progress" else []
        return {"id": self.item_id, "type": "reasoning", "status": self.status, "summary": [], "content": content}


@dataclass(slots=True)
class _Message:
    """An item with an assistant message."""

    item_id: str
    names: TokenNames
    num_top: int  # number of likeliest tokens listed for each token
    text: GrowingText = field(default_factory=GrowingText)
    logprobs: PackedLogprobs = field(default_factory=PackedLogprobs)  # empty unless the request asks for them
    status: str = "in_progress"

    def rows(self) -> Rows[Json] | list[Json]:
        return self.logprobs.rows(chat_entry, self.names, self.num_top) if self.logprobs else []

    def part(self) -> Json:
        return {"type": "output_text", "text": str(self.text), "annotations": [], "logprobs": self.rows()}

    def as_json(self) -> OutputItem:
        content = [self.part()] if str(self.text) or self.status != "in_progress" else []
        return {"id": self.item_id, "type": "message", "status": self.status, "role": "assistant", "content": content}


@dataclass(slots=True)
class _Call:
    """An item with a call of a function or a custom tool. `arguments` also stores the input of a custom tool."""

    item_id: str
    call_id: str
    name: str
    is_custom: bool
    namespace: str | None
    arguments: GrowingText = field(default_factory=GrowingText)
    status: str = "in_progress"

    @property
    def argument_kind(self) -> str:
        """The part of event names that denotes the arguments."""
        return "custom_tool_call_input" if self.is_custom else "function_call_arguments"

    def argument(self) -> Json:
        return {"input" if self.is_custom else "arguments": str(self.arguments)}

    def as_json(self) -> OutputItem:
        item: OutputItem = {
            "id": self.item_id,
            "type": "custom_tool_call" if self.is_custom else "function_call",
            "status": self.status,
            "call_id": self.call_id,
            "name": self.name,
        }
        if self.namespace is not None:
            item["namespace"] = self.namespace
        item["input" if self.is_custom else "arguments"] = str(self.arguments)
        return item


RESPONSES = Endpoint(
    RESPONSES_PATH,
    ResponsesRequest,
    prepare_response,
    ResponsesWriter,
    summary="Generate a response",
    response=Response,
)
