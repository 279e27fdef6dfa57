"""Responses that are kept: those that ask for it at /v1/responses, and the routes by their ids.

The process of batches generates them, so they outlive their connection and their ingress. Here is what it generates,
and what an ingress passes on.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from app.api.endpoints.files import page_of
from app.api.endpoints.responses import ResponseBuilder
from app.api.http.operations import EVENTS, OF_A_LIST, Operation, RouteGroup, page_query
from app.api.http.sse import EventResponse, WhileConnected
from app.api.output.choices import ChoiceDelta
from app.api.output.response_state import EventWriter, ResponseState
from app.api.output.tool_calls import ToolCallDelta
from app.api.request_context import RequestContext
from app.batches import RESPONSE_RUNS, BatchService, Events, EventsAfter, NewResponse
from app.errors import Failure, InvalidRequest
from app.json_pieces import Json

_END = b"\n\n"  # of an event
_LOOK_EVERY_S = 10.0  # a call to the process of batches waits so long for something new
# One that comes while a call waits for events of others is asked for after so long; a pause between calls.
_NEWS_EVERY_S, _PAUSE_S = 0.05, 0.003
_MAX_ITEMS_OF_PAGE = 100
_CONTEXT_HEADERS = "x-carousel-"  # what begins so says where and when a request runs


class KeptResponse:
    """See `KeptAnswer`."""

    def __init__(self, state: ResponseState, builder: ResponseBuilder) -> None:
        self._state = state
        self._builder = builder

    def as_json(self) -> Json:
        """The response by now."""
        return self._builder.as_json()

    async def events(self, known: Sequence[bytes]) -> AsyncGenerator[list[bytes], None]:
        """Its events behind those that are `known` from an earlier attempt, those of each delta together.

        A prompt with one seed gives one output, so what an earlier attempt has said is left out of this one. Raises
        Failure where it says something else.
        """
        writer: EventWriter = self._builder
        if known:
            writer = resumed = _ResumedWriter(self._builder)
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

    def __init__(self, builder: ResponseBuilder) -> None:
        self._builder = builder
        self._said: dict[str, str] = defaultdict(str)  # by kind of text, what this attempt has still to repeat
        self.has_begun = False  # this attempt, which another follows if it fails before

    def repeat(self, known: Sequence[bytes]) -> None:
        """Bring the response to where the known events end. Raises Failure when other events come of it."""
        events = [from_json(event.partition(b"data: ")[2]) for event in known]
        written = b"".join(b"".join(self._builder.write(delta)) for delta in self._deltas(events))
        if _events(written) != list(known):
            raise Failure("this response was interrupted and cannot go on where it was; send it again")

    def _deltas(self, events: Sequence[Json]) -> Iterable[ChoiceDelta]:
        num_calls = 0
        yield _delta()  # it has begun
        for event in events:
            kind, text = event["type"], event.get("delta", "")
            if kind == "response.reasoning_text.delta":
                self._said["reasoning"] += text
                yield _delta(reasoning=text)
            elif kind == "response.output_text.delta":
                self._said["text"] += text
                yield _delta(text=text)
            elif kind == "response.output_item.added" and "call_id" in event["item"]:
                item = event["item"]
                is_custom = item["type"] == "custom_tool_call"
                self._said[f"name {num_calls}"] = item["name"]
                yield _delta(calls=(ToolCallDelta(num_calls, item["call_id"], item["name"], "", is_custom),))
                num_calls += 1
            elif kind.endswith(("_arguments.delta", "_input.delta")):
                self._said[f"arguments {num_calls - 1}"] += text
                yield _delta(calls=(ToolCallDelta(num_calls - 1, "", None, text),))

    def write(self, piece: ChoiceDelta) -> Iterable[bytes]:
        """The events for what is new in a delta."""
        if piece.says_nothing:
            return ()
        self.has_begun = True
        calls = tuple(self._new_calls(piece.calls))
        reasoning, text = self._new("reasoning", piece.reasoning), self._new("text", piece.text)
        if piece.finish_reason is not None and any(self._said.values()):
            raise _differs()
        return self._builder.write(msgspec.structs.replace(piece, reasoning=reasoning, text=text, calls=calls))

    def _new_calls(self, calls: Iterable[ToolCallDelta]) -> Iterable[ToolCallDelta]:
        for call in calls:
            arguments = self._new(f"arguments {call.number}", call.arguments)
            name = call.name
            if name is not None and not self._new(f"name {call.number}", name):
                name = None
            if name is not None or arguments:
                yield call._replace(name=name, arguments=arguments)

    def _new(self, kind: str, text: str) -> str:
        """What of a text is not repeated."""
        said = self._said[kind]
        num_repeated = min(len(said), len(text))
        if said[:num_repeated] != text[:num_repeated]:
            raise _differs()
        self._said[kind] = said[num_repeated:]
        return text[num_repeated:]

    def end(self) -> Iterable[bytes]:
        """No events: the last delta has ended the response."""
        return ()

    def fail(self, error: Exception) -> Iterable[bytes]:
        """The events with which the response has failed."""
        return self._builder.fail(error)


def _events(written: bytes) -> list[bytes]:
    return [event + _END for event in written.split(_END)[:-1]]


def _differs() -> Failure:
    return Failure("this response was interrupted, and when it was computed again it was another; send it again")


def _delta(*, text: str = "", reasoning: str = "", calls: tuple[ToolCallDelta, ...] = ()) -> ChoiceDelta:
    return ChoiceDelta(index=0, text=text, reasoning=reasoning, calls=calls, num_tokens=1, num_cached_tokens=0)


class KeptResponseRoutes(RouteGroup):
    """The routes by ids, and what POST /v1/responses does with a body that asks for kept responses."""

    def __init__(self, service: BatchService, owner_of: Callable[[Request], str], *, heartbeat_s: float) -> None:
        self._service = service
        self._owner_of = owner_of
        self._heartbeat_s = heartbeat_s
        self._following = _Following(service)

    async def continued(self, body: dict[str, Any], owner: str) -> dict[str, Any]:
        """The body with the items before its own that `previous_response_id` stands for. Raises NotFound."""
        previous, own = body.get("previous_response_id"), body.get("input")
        if not isinstance(previous, str) or not isinstance(own, str | list):
            return body  # a mistake that its schema names
        if isinstance(own, str):
            own = [{"type": "message", "role": "user", "content": own}]
        return body | {"input": [*await self._service.conversation(owner, previous), *own]}

    async def answer(self, body: Json, context: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a response generated that is kept, and answer with it."""
        new = NewResponse(
            owner=context.reservation.account.name,
            body=body,
            headers={name: value for name, value in context.headers.items() if name.startswith(_CONTEXT_HEADERS)},
            request_id=context.request_id,
            response_id=f"resp_{uuid.uuid4().hex}",  # a client's own request id may have any character
            is_strict=context.is_strict,
        )
        begun = await self._service.create_response(new)
        context.reservation.release_body()
        if body.get("stream"):
            await self._events(new.owner, begun["id"], after=-1)(scope, receive, send)
            return
        if not body.get("background"):
            async with WhileConnected(receive):
                begun = await self._ended(new.owner, begun["id"])
        await JSONResponse(begun)(scope, receive, send)

    @Operation(
        "get",
        "/v1/responses/{response_id}",
        "A response that is kept, or the rest of its events",
        "Response",
        OF_A_LIST,
        media=(EVENTS,),
        query={
            "stream": {"schema": {"type": "boolean"}},
            "starting_after": {
                "schema": {"type": "integer", "minimum": 0},
                "description": "the `sequence_number` of the last event that has come",
            },
        },
    )
    async def retrieve(self, request: Request) -> Response:
        """One response, as far as it is there. Raises NotFound."""
        owner, response_id, query = self._owner_of(request), request.path_params["response_id"], request.query_params
        after = query.get("starting_after")
        if query.get("stream", "false").lower() not in ("true", "1"):
            if after is not None:
                raise InvalidRequest("starting_after is for events; send stream=true too", param="starting_after")
            return JSONResponse(await self._service.response(owner, response_id))
        if after is not None and not (after.isdecimal() and len(after) < 10):
            raise InvalidRequest(
                f"starting_after is {after[:20]!r}; it should be the sequence_number of an event",
                param="starting_after",
            )
        number = -1 if after is None else int(after)
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
        owner = self._owner_of(request)
        page = page_of(owner, request.query_params, max_limit=_MAX_ITEMS_OF_PAGE, default_limit=20)
        return JSONResponse(await self._service.response_items(page, request.path_params["response_id"]))

    @Operation("post", "/v1/responses/{response_id}/cancel", "End a response that is kept", "Response", OF_A_LIST)
    async def cancel(self, request: Request) -> Response:
        """End one response. Raises NotFound, and InvalidRequest when it has ended otherwise."""
        response_id = request.path_params["response_id"]
        return JSONResponse(await self._service.cancel_response(self._owner_of(request), response_id))

    @Operation("delete", "/v1/responses/{response_id}", "Forget a response", "DeletedResponse", OF_A_LIST)
    async def delete(self, request: Request) -> Response:
        """Forget one response. Raises NotFound."""
        response_id = request.path_params["response_id"]
        return JSONResponse(await self._service.delete_response(self._owner_of(request), response_id))

    async def _ended(self, owner: str, response_id: str) -> Json:
        while True:
            response = await self._service.response(owner, response_id, _LOOK_EVERY_S)
            if response["status"] not in RESPONSE_RUNS:
                return response

    def _events(self, owner: str, response_id: str, *, after: int) -> EventResponse:
        return EventResponse(self._follow(owner, response_id, after), heartbeat_s=self._heartbeat_s)

    async def _follow(self, owner: str, response_id: str, after: int) -> AsyncGenerator[bytes, None]:
        is_over = False
        while not is_over:
            events, is_over = await self._following.next(EventsAfter(owner, response_id, after))
            after += len(events)
            if events:
                yield b"".join(events)


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
            return await self._service.response_events([which for which, _ in asked], _NEWS_EVERY_S)
        except Exception as error:
            return [error] * len(asked)


def asks_to_keep(body: Mapping[str, Any]) -> bool:
    """Whether a body of /v1/responses asks for a response that is kept."""
    return bool(body.get("store") or body.get("background"))
