"""Responses, chats and completions that are kept, as their bodies ask for it, and the routes by their ids.

The process of batches generates them, so they outlive their connection and their ingress. Here is what it generates,
and what an ingress passes on.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import msgspec
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from app.api.endpoints.files import page_of
from app.api.endpoints.responses import ResponseBuilder
from app.api.http.guard import owner_of
from app.api.http.operations import EVENTS, OF_A_LIST, Operation, RouteGroup, page_query
from app.api.http.sse import EventResponse, WhileConnected
from app.api.output.choices import ChoiceDelta
from app.api.output.completion_writers import ChunkWriter
from app.api.output.response_state import EventWriter, ResponseState
from app.api.output.tool_calls import ToolCallDelta
from app.api.request_context import RequestContext
from app.batches import RESPONSE_RUNS, RESPONSES_PATH, BatchService, Events, EventsAfter, NewResponse
from app.errors import Failure, InvalidRequest, NotFound, Unavailable
from app.json_pieces import Json

_Answer = TypeVar("_Answer")
# The paths of what can be kept, and how ids begin there.
_CHATS, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEPT_AT = {RESPONSES_PATH: "resp_", _CHATS: "chatcmpl-", _COMPLETIONS: "cmpl-"}
LAST_EVENT_HEADER = "last-event-id"  # of a client that goes on behind that event
_END = b"\n\n"  # of an event
_LOOK_EVERY_S = 10.0  # a call to the process of batches waits so long for something new
# One that comes while a call waits for events of others is asked for after so long; a pause between calls.
_NEWS_EVERY_S, _PAUSE_S = 0.05, 0.003
# A client that waits for the rest of an answer waits so long for a new process of batches, asked for so often.
_NEXT_PROCESS_S, _ASK_AGAIN_S = 120.0, 0.5
_MAX_ITEMS_OF_PAGE = 100
_OF_EVENTS: Json = {
    "stream": {"schema": {"type": "boolean"}},
    "starting_after": {
        "schema": {"type": "integer", "minimum": 0},
        "description": "the number of the last event that has come, from 0 on",
    },
}
_retrieval = partial(Operation, "get", refusals=OF_A_LIST, media=(EVENTS,), query=_OF_EVENTS)
_CONTEXT_HEADERS = "x-carousel-"  # what begins so says where and when a request runs


class KeptResponse:
    """See `KeptAnswer`."""

    def __init__(self, state: ResponseState, writer: ResponseBuilder | ChunkWriter) -> None:
        self._state = state
        self._writer = writer

    def as_json(self) -> Json:
        """The response by now."""
        return self._writer.as_json()

    async def events(self, known: Sequence[bytes]) -> AsyncGenerator[list[bytes], None]:
        """Its events behind those that are `known` from an earlier attempt, those of each delta together.

        A prompt with one seed gives one output, so what an earlier attempt has said is left out of this one. Raises
        Failure where it says something else.
        """
        writer: EventWriter = self._writer
        if known:
            writer = resumed = _ResumedWriter(self._writer)
            resumed.repeat(known)
        pieces = list[bytes]()
        async with aclosing(self._state.events(writer)) as written:
            async for piece in written:
                pieces.append(piece)
                if piece.endswith(_END):
                    yield _events(b"".join(pieces))
                    pieces.clear()


class _ResumedWriter:
    """Writes the events of an attempt behind those of an earlier one."""

    def __init__(self, writer: ResponseBuilder | ChunkWriter) -> None:
        self._writer = writer
        # By choice, and there by kind of text, what this attempt has still to repeat.
        self._said: dict[int, dict[str, str]] = defaultdict(lambda: defaultdict(str))
        self._ended: set[int] = set()  # choices of which the end is known
        self.has_begun = False  # this attempt, which another follows if it fails before

    def repeat(self, known: Sequence[bytes]) -> None:
        """Bring the response to where the known events end. Raises Failure when other events come of it."""
        events = [from_json(event.partition(b"data: ")[2]) for event in known]
        deltas = _deltas_of_chunks(events) if isinstance(self._writer, ChunkWriter) else _deltas(events)
        written = list[bytes]()
        for delta in deltas:
            written += self._writer.write(delta)
            said = self._said[delta.index]
            said["reasoning"] += delta.reasoning
            said["text"] += delta.text
            for call in delta.calls:
                said[f"name {call.number}"] += call.name or ""
                said[f"arguments {call.number}"] += call.arguments
            if delta.finish_reason is not None:
                self._ended.add(delta.index)
        if _events(b"".join(written)) != list(known):
            raise Failure("this response was interrupted and cannot go on where it was; send it again")

    def write(self, piece: ChoiceDelta) -> Iterable[bytes]:
        """The events for what is new in a delta."""
        if piece.says_nothing:
            return ()
        self.has_begun = True
        said = self._said[piece.index]
        calls = tuple(_new_calls(said, piece.calls))
        reasoning, text = _new(said, "reasoning", piece.reasoning), _new(said, "text", piece.text)
        if piece.finish_reason is not None and any(said.values()):
            raise _differs()
        if piece.index in self._ended:
            if calls or reasoning or text:
                raise _differs()
            return ()
        return self._writer.write(msgspec.structs.replace(piece, reasoning=reasoning, text=text, calls=calls))

    def end(self) -> Iterable[bytes]:
        """The events after the last delta."""
        return self._writer.end()

    def fail(self, error: Exception) -> Iterable[bytes]:
        """The events with which the response has failed."""
        return self._writer.fail(error)


def _deltas(events: Sequence[Json]) -> Iterable[ChoiceDelta]:
    """The deltas that these events of a response were written for."""
    num_calls = 0
    yield _delta()  # it has begun
    for event in events:
        kind, text = event["type"], event.get("delta", "")
        if kind == "response.reasoning_text.delta":
            yield _delta(reasoning=text)
        elif kind == "response.output_text.delta":
            yield _delta(text=text)
        elif kind == "response.output_item.added" and "call_id" in event["item"]:
            item = event["item"]
            is_custom = item["type"] == "custom_tool_call"
            yield _delta(calls=(ToolCallDelta(num_calls, item["call_id"], item["name"], "", is_custom),))
            num_calls += 1
        elif kind.endswith(("_arguments.delta", "_input.delta")):
            yield _delta(calls=(ToolCallDelta(num_calls - 1, "", None, text),))


def _deltas_of_chunks(events: Sequence[Json]) -> Iterable[ChoiceDelta]:
    """The deltas that these chunks were written for, one for each."""
    for chunk in events:
        [choice] = chunk["choices"]
        said = choice.get("delta", {"content": choice.get("text")})
        yield _delta(
            choice["index"],
            text=said.get("content") or "",
            reasoning=said.get("reasoning", ""),
            calls=tuple(map(_call_of_chunk, said.get("tool_calls", ()))),
            finish_reason=choice["finish_reason"],
            stop_reason=choice["stop_reason"],
        )


def _call_of_chunk(call: Json) -> ToolCallDelta:
    is_custom = "custom" in call
    said = call["custom" if is_custom else "function"]
    arguments = said["input" if is_custom else "arguments"]
    return ToolCallDelta(call["index"], call.get("id", ""), said.get("name"), arguments, is_custom)


def _new_calls(said: dict[str, str], calls: Iterable[ToolCallDelta]) -> Iterable[ToolCallDelta]:
    for call in calls:
        arguments = _new(said, f"arguments {call.number}", call.arguments)
        name = call.name
        if name is not None and not _new(said, f"name {call.number}", name):
            name = None
        if name is not None or arguments:
            yield call._replace(name=name, arguments=arguments)


def _new(said: dict[str, str], kind: str, text: str) -> str:
    """What of a text is not repeated."""
    num_repeated = min(len(said[kind]), len(text))
    if said[kind][:num_repeated] != text[:num_repeated]:
        raise _differs()
    said[kind] = said[kind][num_repeated:]
    return text[num_repeated:]


def _events(written: bytes) -> list[bytes]:
    return [event + _END for event in written.split(_END)[:-1]]


def _differs() -> Failure:
    return Failure("this response was interrupted, and when it was computed again it was another; send it again")


def _delta(index: int = 0, *, text: str = "", **fields: Any) -> ChoiceDelta:
    return ChoiceDelta(index, text, num_tokens=1, num_cached_tokens=0, **fields)


class KeptResponseRoutes(RouteGroup):
    """The routes by ids, and what is done with a body that asks to be kept."""

    def __init__(self, service: BatchService, *, heartbeat_s: float) -> None:
        self._service = service
        self._heartbeat_s = heartbeat_s
        self._following = _Following(service)

    async def continued(self, body: dict[str, Any], owner: str) -> dict[str, Any]:
        """The body with the items before its own that `previous_response_id` stands for. Raises NotFound."""
        previous, own = body.get("previous_response_id"), body.get("input")
        if not isinstance(previous, str) or not isinstance(own, str | list):
            return body  # a mistake that its schema names
        _check_id(previous, RESPONSES_PATH)
        if isinstance(own, str):
            own = [{"type": "message", "role": "user", "content": own}]
        return body | {"input": [*await self._service.conversation(owner, previous), *own]}

    async def answer(
        self, path: str, body: Json, context: RequestContext, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Have a response generated that is kept, and answer with it."""
        new = NewResponse(
            owner=context.reservation.account.name,
            path=path,
            body=body,
            headers={name: value for name, value in context.headers.items() if name.startswith(_CONTEXT_HEADERS)},
            request_id=context.request_id,
            response_id=f"{KEPT_AT[path]}{uuid.uuid4().hex}",  # a client's own request id may have any character
            is_strict=context.is_strict,
        )
        begun = await self._service.create_response(new)
        context.reservation.release_body()
        if body.get("stream"):
            await self._events(new.owner, begun["id"], after=-1)(scope, receive, send)
            return
        if not new.may_wait:
            async with WhileConnected(receive):
                begun = await self._ended(new.owner, begun["id"])
        if path != RESPONSES_PATH and begun["status"] != "completed":  # only responses have a status to say so
            raise Failure(begun["error"]["message"])
        await JSONResponse(begun)(scope, receive, send)

    async def go_on(self, path: str, context: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the events behind that of the header. Raises NotFound and InvalidRequest."""
        response_id = context.headers[LAST_EVENT_HEADER].rpartition(":")[0]
        _check_id(response_id, path)
        context.reservation.release_body()
        number = _number_of(context.headers, response_id)
        answer = await self._behind(context.reservation.account.name, response_id, number)
        await answer(scope, receive, send)

    @_retrieval("/v1/responses/{response_id}", "A response that is kept, or the rest of its events", "Response")
    async def retrieve(self, request: Request) -> Response:
        """One response, as far as it is there. Raises NotFound."""
        return await self._retrieved(request, RESPONSES_PATH)

    async def _retrieved(self, request: Request, path: str) -> Response:
        owner, response_id, query = owner_of(request), _id_in(request, path), request.query_params
        if request.headers.get(LAST_EVENT_HEADER):
            return await self._behind(owner, response_id, _number_of(request.headers, response_id))
        after = query.get("starting_after")
        if query.get("stream", "false").lower() not in ("true", "1"):
            if after is not None:
                raise InvalidRequest("starting_after is for events; send stream=true too", param="starting_after")
            return JSONResponse(await self._service.response(owner, response_id))
        if after is not None and not _is_number(after):
            raise InvalidRequest(
                f"starting_after is {after[:20]!r}; it should be the sequence_number of an event",
                param="starting_after",
            )
        return await self._behind(owner, response_id, -1 if after is None else int(after))

    async def _behind(self, owner: str, response_id: str, number: int) -> Response:
        """The events behind one. Raises NotFound, and InvalidRequest where there is no such event."""
        [found] = await self._service.response_events([EventsAfter(owner, response_id, number)], 0.0)
        if isinstance(found, Exception):  # it has a status of its own
            raise found
        return self._events(owner, response_id, after=number)

    @Operation(
        "get",
        "/v1/responses/{response_id}/input_items",
        "The items that a response was generated from",
        "ResponseItems",
        OF_A_LIST,
        query=page_query(_MAX_ITEMS_OF_PAGE),
    )
    async def input_items(self, request: Request) -> Response:
        """A page of items, the last first. Raises NotFound."""
        owner = owner_of(request)
        page = page_of(owner, request.query_params, max_limit=_MAX_ITEMS_OF_PAGE, default_limit=20)
        return JSONResponse(await self._service.response_items(page, _id_in(request, RESPONSES_PATH)))

    @Operation("post", "/v1/responses/{response_id}/cancel", "End a response that is kept", "Response", OF_A_LIST)
    async def cancel(self, request: Request) -> Response:
        """End one response. Raises NotFound, and InvalidRequest when it has ended otherwise."""
        response_id = _id_in(request, RESPONSES_PATH)
        return JSONResponse(await self._service.cancel_response(owner_of(request), response_id))

    @Operation("delete", "/v1/responses/{response_id}", "Forget a response", "DeletedResponse", OF_A_LIST)
    async def delete(self, request: Request) -> Response:
        """Forget one response. Raises NotFound."""
        return await self._deleted(request, RESPONSES_PATH, "response")

    async def _deleted(self, request: Request, path: str, shown_as: str) -> Response:
        deleted = await self._service.delete_response(owner_of(request), _id_in(request, path))
        return JSONResponse(deleted | {"object": shown_as})

    @_retrieval(
        "/v1/chat/completions/{response_id}", "A chat that is kept, or the rest of its events", "ChatCompletion"
    )
    async def retrieve_chat(self, request: Request) -> Response:
        """One chat, as far as it is there. Raises NotFound."""
        return await self._retrieved(request, _CHATS)

    @_retrieval("/v1/completions/{response_id}", "A completion that is kept, or the rest of its events", "Completion")
    async def retrieve_completion(self, request: Request) -> Response:
        """One completion, as far as it is there. Raises NotFound."""
        return await self._retrieved(request, _COMPLETIONS)

    @Operation("delete", "/v1/chat/completions/{response_id}", "Forget a chat", "DeletedChat", OF_A_LIST)
    async def delete_chat(self, request: Request) -> Response:
        """Forget one chat. Raises NotFound."""
        return await self._deleted(request, _CHATS, "chat.completion.deleted")

    @Operation("delete", "/v1/completions/{response_id}", "Forget a completion", "DeletedCompletion", OF_A_LIST)
    async def delete_completion(self, request: Request) -> Response:
        """Forget one completion. Raises NotFound."""
        return await self._deleted(request, _COMPLETIONS, "text_completion.deleted")

    async def _ended(self, owner: str, response_id: str) -> Json:
        while True:
            response = await _from_the_next_process(lambda: self._service.response(owner, response_id, _LOOK_EVERY_S))
            if response["status"] not in RESPONSE_RUNS:
                return response

    def _events(self, owner: str, response_id: str, *, after: int) -> EventResponse:
        return EventResponse(self._follow(owner, response_id, after), heartbeat_s=self._heartbeat_s)

    async def _follow(self, owner: str, response_id: str, after: int) -> AsyncGenerator[bytes, None]:
        name, is_over = response_id.encode(), False
        while not is_over:
            events, is_over = await self._following.next(EventsAfter(owner, response_id, after))
            if events:
                numbered = enumerate(events, start=after + 1)
                yield b"".join([b"id: %b:%d\n%b" % (name, number, event) for number, event in numbered])
            after += len(events)


class _Following:
    """All responses whose events this process passes on: one call at a time asks for those of all."""

    def __init__(self, service: BatchService) -> None:
        self._service = service
        self._waiting: list[tuple[EventsAfter, asyncio.Future[Events]]] = []
        self._asking: asyncio.Task[None] | None = None  # as long as something waits

    async def next(self, asked: EventsAfter) -> Events:
        """The next events of one response. Raises what `BatchService.response_events` has for it."""
        events: asyncio.Future[Events] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, events))
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        return await events

    async def _ask(self) -> None:
        try:
            while self._waiting:
                asked = [each for each in self._waiting if not each[1].done()]  # others were given up
                self._waiting = []
                for (which, events), found in zip(asked, await self._found(asked), strict=True):
                    if events.done():
                        continue
                    if isinstance(found, Exception):
                        events.set_exception(found)
                    elif found.written or found.are_last:
                        events.set_result(found)
                    else:
                        self._waiting.append((which, events))
                await asyncio.sleep(_PAUSE_S)  # those that have got some ask for more
        finally:
            self._asking = None

    async def _found(self, asked: Sequence[tuple[EventsAfter, asyncio.Future[Events]]]) -> Sequence[Events | Exception]:
        try:
            return await _from_the_next_process(
                lambda: self._service.response_events([which for which, _ in asked], _NEWS_EVERY_S)
            )
        except Exception as error:
            return [error] * len(asked)


async def _from_the_next_process(ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
    """What the process of batches answers, or the one that follows it. Raises Unavailable if none does in time."""
    until = time.monotonic() + _NEXT_PROCESS_S
    while True:
        try:
            return await ask()
        except Unavailable:
            if time.monotonic() > until:
                raise
        await asyncio.sleep(_ASK_AGAIN_S)


def _id_in(request: Request, path: str) -> str:
    """The id in a path below that of an endpoint. Raises NotFound for one of another endpoint."""
    response_id: str = request.path_params["response_id"]
    _check_id(response_id, path)
    return response_id


def _check_id(response_id: str, path: str) -> None:
    """Raise NotFound for an id of another endpoint."""
    if not response_id.startswith(KEPT_AT[path]):
        raise NotFound(
            f"there is no response {response_id[:100]!r}; ids of {path} begin with {KEPT_AT[path]}",
            code="response_not_found",
        )


def _number_of(headers: Mapping[str, str], response_id: str) -> int:
    """The number of the event that the header names. Raises InvalidRequest."""
    given = headers[LAST_EVENT_HEADER]
    name, _, number = given.rpartition(":")
    if name != response_id or not _is_number(number):
        raise InvalidRequest(
            f"{LAST_EVENT_HEADER} is {given[:100]!r}; it should be the id of an event of this response, such as "
            f"{response_id[:100]}:0",
            param=LAST_EVENT_HEADER,
        )
    return int(number)


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 10
