"""The routes of stored responses, chats and completions, and the handling of bodies that ask to be stored.

The batches process generates a stored answer, so the answer survives its connection and its ingress. An ingress reads
the answer's records and converts them to events or to one object.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from pydantic_core import from_json, to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from app.api.auth.limits import Reservation
from app.api.endpoints.files import page_of
from app.api.http.answers import JsonAnswer
from app.api.http.guard import owner_of
from app.api.http.operations import EVENTS, LIST_REFUSALS, Operation, RouteGroup, page_query
from app.api.http.sse import EventResponse, WhileConnected
from app.api.request_context import RequestContext
from app.api.schemas.parameters import ignored_header
from app.api.stored_answers import (
    STORED_ID_PREFIXES,
    StoredEvents,
    StoredObject,
    check_id,
    error_of,
    own_items,
    read_turn,
    with_history,
)
from app.batches import (
    CHATS_PATH,
    COMPLETIONS_PATH,
    RESPONSES_PATH,
    AnswerPart,
    BatchService,
    NewResponse,
    PageOf,
    list_object,
)
from app.errors import InvalidRequest, NotFound, Unavailable
from app.json_pieces import Json

T = TypeVar("T")
LAST_EVENT_HEADER = "last-event-id"  # the last event that a resuming client has received
# A reader that needs the rest of an answer waits this long for a new batches process, with this pause between attempts.
_RESTART_TIMEOUT_S, _RETRY_PAUSE_S = 120.0, 0.5
_OPENING_S = 5.0  # all other readers wait this long, because a new process needs time to open its folder
_MAX_ITEMS_OF_PAGE = 100
_SMALL_BYTES = 1024  # records of this size contain a few deltas
_OF_EVENTS: Json = {
    "stream": {"schema": {"type": "boolean"}},
    "starting_after": {
        "schema": {"type": "integer", "minimum": 0},
        "description": "the number of the last event that the client has received; the first event is 0",
    },
}
_retrieval = partial(Operation, "get", refusals=LIST_REFUSALS, media=(EVENTS,), query=_OF_EVENTS)
_CONTEXT_HEADERS = "x-carousel-"  # headers with this prefix affect where and when a request runs


class StoredResponseRoutes(RouteGroup):
    """Handles bodies that ask to be stored, and requests for a stored answer by its id."""

    def __init__(self, service: BatchService, turns: asyncio.Lock, *, heartbeat_s: float) -> None:
        """`turns` is the lock with which large answers take turns on the event loop (see `JsonAnswer`)."""
        self._service = service
        self._turns = turns
        self._heartbeat_s = heartbeat_s

    async def continued(self, body: Json, owner: str) -> Json:
        """Return the body with the items of the responses that it continues. Raises InvalidRequest."""

        def read(response_id: str, is_continued: bool) -> AsyncGenerator[AnswerPart, None]:
            return self._parts(owner, response_id, waits=False, is_continued=is_continued)

        return await with_history(body, read)

    async def answer(
        self, path: str, body: Json, context: RequestContext, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Create a stored answer, which the batches process generates, and respond with the answer."""
        seed = {} if body.get("seed") is not None else {"seed": secrets.randbits(63)}
        previous = body.get("previous_response_id") if path == RESPONSES_PATH else None
        new = NewResponse(
            owner=context.reservation.account.name,
            path=path,
            body=to_json({"store": True} | body | seed),
            headers={name: value for name, value in context.headers.items() if name.startswith(_CONTEXT_HEADERS)},
            request_id=context.request_id,
            response_id=STORED_ID_PREFIXES[path] + uuid.uuid4().hex,  # a client's request id may contain any character
            is_strict=context.is_strict,
            previous=previous if isinstance(previous, str) else None,
            is_streamed=bool(body.get("stream")),
            may_wait=path == RESPONSES_PATH and bool(body.get("background")),
        )
        await self._service.create_response(new)
        context.reservation.release_body()
        answer: Response
        if new.is_streamed:
            answer = self._events(StoredEvents(), [], new.owner, new.response_id, after=-1)
        elif new.may_wait:
            answer = await self._object(new.owner, new.response_id, context.reservation, waits=False)
        else:
            async with WhileConnected(receive):
                answer = await self._object(new.owner, new.response_id, context.reservation, waits=True)
        await answer(scope, receive, send)

    async def resume(self, path: str, context: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond with the events after the event that the header identifies. Raises NotFound and InvalidRequest."""
        response_id = context.headers[LAST_EVENT_HEADER].rpartition(":")[0]
        check_id(response_id, path)
        context.reservation.release_body()
        number = _number_of(context.headers, response_id)
        async with WhileConnected(receive):
            answer = await self._behind(context.reservation.account.name, response_id, number)
        await answer(scope, receive, send)

    @_retrieval("/v1/responses/{response_id}", "A stored response, or the rest of its events", "Response")
    async def retrieve(self, request: Request) -> Response:
        """Return one response, finished or not. Raises NotFound."""
        return await self._retrieved(request, RESPONSES_PATH)

    async def _retrieved(self, request: Request, path: str) -> Response:
        owner, response_id, query = owner_of(request), _id_in(request, path), request.query_params
        if request.headers.get(LAST_EVENT_HEADER):
            number = _number_of(request.headers, response_id)
            async with WhileConnected(request.receive):
                return await self._behind(owner, response_id, number)
        after = query.get("starting_after")
        if query.get("stream", "false").lower() not in ("true", "1"):
            if after is not None:
                raise InvalidRequest(
                    "starting_after requires a stream of events; also send stream=true", param="starting_after"
                )
            async with WhileConnected(request.receive):
                return await self._object(owner, response_id, request.scope["state"]["reservation"], waits=False)
        if after is not None and not _is_number(after):
            raise InvalidRequest(
                f"starting_after is {after[:20]!r}; it should be the sequence_number of an event",
                param="starting_after",
            )
        async with WhileConnected(request.receive):
            return await self._behind(owner, response_id, -1 if after is None else int(after))

    async def _behind(self, owner: str, response_id: str, number: int) -> Response:
        """Respond with the events after event `number`. Raises NotFound, or InvalidRequest if this event is missing."""
        events, read = StoredEvents(), list[bytes]()
        async with aclosing(self._parts(owner, response_id, waits=False, is_patient=True)) as parts:
            async for part in parts:
                async for piece in _yielding_to_loop(events.of(part, after=number)):
                    read.append(piece)
                if events.number > number:
                    break
        answer = events.reader.answer
        if answer is not None and not answer.new.is_streamed:
            raise InvalidRequest(
                "this response has no events, because it was created without stream: true; request it without `stream`"
            )
        if number >= max(events.number, 1):
            raise InvalidRequest(
                f"starting_after is {number}, but the sequence_number of the last event so far is {events.number - 1}; "
                f"lower it",
                param="starting_after",
            )
        return self._events(events, read, owner, response_id, after=number)

    @Operation(
        "get",
        "/v1/responses/{response_id}/input_items",
        "The input items of a response",
        "ResponseItems",
        LIST_REFUSALS,
        query=page_query(_MAX_ITEMS_OF_PAGE),
    )
    async def input_items(self, request: Request) -> Response:
        """List a page of input items, by default the last first. Raises NotFound."""
        owner, response_id = owner_of(request), _id_in(request, RESPONSES_PATH)
        page = page_of(owner, request.query_params, max_limit=_MAX_ITEMS_OF_PAGE, default_limit=20)
        items = [item async for item in self._items(page, response_id)]
        return JSONResponse(list_object(items, page))

    async def _items(self, page: PageOf, response_id: str) -> AsyncGenerator[Json, None]:
        """Yield the items of a page, and one more item if the list continues. Raises NotFound."""
        order = [turn async for turn in self._turn_ids(page.owner, response_id)]
        has_begun, left = page.after is None, page.limit + 1
        for turn_id in reversed(order) if page.is_ascending else order:
            items = await self._items_of(page.owner, turn_id, with_output=turn_id != response_id)
            for item in items if page.is_ascending else reversed(items):
                if has_begun and left:
                    left -= 1
                    yield item
                has_begun = has_begun or item["id"] == page.after
            if not left:
                return
        if not has_begun:
            raise NotFound(f"`after` is {str(page.after)[:100]!r}; this list has no item with this id", param="after")

    async def _turn_ids(self, owner: str, response_id: str) -> AsyncGenerator[str, None]:
        """Yield the ids of the conversation's responses, the newest first."""
        next_id: str | None = response_id
        while next_id is not None:
            turn_id = next_id
            next_id = (await self._request(owner, turn_id, is_continued=turn_id != response_id)).previous
            yield turn_id

    async def _items_of(self, owner: str, turn_id: str, *, with_output: bool) -> list[Json]:
        if with_output:
            turn = await read_turn(self._parts(owner, turn_id, waits=False, is_continued=True), turn_id)
            items = [*turn.input, *turn.output]
        else:
            new = await self._request(owner, turn_id)
            items = own_items((await asyncio.to_thread(from_json, new.body))["input"])
        return [{"id": f"item_{number}_{turn_id}", **_shown(item)} for number, item in enumerate(items)]

    async def _request(self, owner: str, response_id: str, *, is_continued: bool = False) -> NewResponse:
        """Return the request of a stored response. Reads only the first part. Raises NotFound."""
        read = StoredObject()
        async with aclosing(self._read(read, owner, response_id, is_continued=is_continued)) as reading:
            async for _ in reading:
                break
        return read.answer.new

    @Operation("post", "/v1/responses/{response_id}/cancel", "Cancel a stored response", "Response", LIST_REFUSALS)
    async def cancel(self, request: Request) -> Response:
        """Cancel one response. Raises NotFound, and InvalidRequest if it has already ended for another reason."""
        owner, response_id = owner_of(request), _id_in(request, RESPONSES_PATH)
        await self._service.cancel_response(owner, response_id)
        return await self._object(owner, response_id, request.scope["state"]["reservation"], waits=False)

    @Operation("delete", "/v1/responses/{response_id}", "Delete a response", "DeletedResponse", LIST_REFUSALS)
    async def delete(self, request: Request) -> Response:
        """Delete one response. Raises NotFound."""
        return await self._deleted(request, RESPONSES_PATH, "response")

    async def _deleted(self, request: Request, path: str, shown_as: str) -> Response:
        response_id = _id_in(request, path)
        await self._service.delete_response(owner_of(request), response_id)
        return JSONResponse({"id": response_id, "object": shown_as, "deleted": True})

    @_retrieval("/v1/chat/completions/{response_id}", "A stored chat, or the rest of its events", "ChatCompletion")
    async def retrieve_chat(self, request: Request) -> Response:
        """Return one chat, finished or not. Raises NotFound."""
        return await self._retrieved(request, CHATS_PATH)

    @_retrieval("/v1/completions/{response_id}", "A stored completion, or the rest of its events", "Completion")
    async def retrieve_completion(self, request: Request) -> Response:
        """Return one completion, finished or not. Raises NotFound."""
        return await self._retrieved(request, COMPLETIONS_PATH)

    @Operation("delete", "/v1/chat/completions/{response_id}", "Delete a chat", "DeletedChat", LIST_REFUSALS)
    async def delete_chat(self, request: Request) -> Response:
        """Delete one chat. Raises NotFound."""
        return await self._deleted(request, CHATS_PATH, "chat.completion.deleted")

    @Operation("delete", "/v1/completions/{response_id}", "Delete a completion", "DeletedCompletion", LIST_REFUSALS)
    async def delete_completion(self, request: Request) -> Response:
        """Delete one completion. Raises NotFound."""
        return await self._deleted(request, COMPLETIONS_PATH, "text_completion.deleted")

    async def _object(self, owner: str, response_id: str, reservation: Reservation, *, waits: bool) -> Response:
        """Return the answer as one object. With `waits`, wait until the answer has ended.

        Raises NotFound and LimitReached. With `waits`, also raises the error of a chat or completion that has failed.
        """
        read = StoredObject()
        async with aclosing(self._read(read, owner, response_id, waits=waits)) as reading:
            async for _ in reading:
                if not reservation.num_logprobs:
                    reservation.hold_logprobs(read.answer.info.num_logprobs)
        end = read.answer.end
        if waits and end is not None and end.error is not None and read.answer.new.path != RESPONSES_PATH:
            raise error_of(end)  # only the object of a response has a status and an error
        return JsonAnswer(read.as_json(), self._turns, headers=ignored_header(read.answer.info.ignored))

    async def _read(
        self, read: StoredObject, owner: str, response_id: str, *, waits: bool = False, is_continued: bool = False
    ) -> AsyncGenerator[None, None]:
        """Read an answer part by part. `read.answer` is set whenever this generator yields."""
        async with aclosing(self._parts(owner, response_id, waits=waits, is_continued=is_continued)) as parts:
            async for part in parts:
                async for _ in _yielding_to_loop(read.add(part)):
                    pass
                if read.reader.answer is not None:
                    yield

    def _events(
        self, events: StoredEvents, read: list[bytes], owner: str, response_id: str, *, after: int
    ) -> EventResponse:
        """Respond with all events after number `after`. `read` holds the pieces that `events` has already returned."""
        following = self._follow(events, read, owner, response_id, after)

        def headers() -> dict[str, str]:
            answer = events.reader.answer
            return {} if answer is None else ignored_header(answer.info.ignored)

        return EventResponse(following, heartbeat_s=self._heartbeat_s, headers=headers, may_begin=events.open)

    async def _follow(
        self, events: StoredEvents, read: list[bytes], owner: str, response_id: str, after: int
    ) -> AsyncGenerator[bytes, None]:
        for piece in filter(None, read):
            yield piece
        read.clear()
        if events.reader.answer is not None and events.reader.answer.end is not None:
            return
        async with aclosing(self._parts(owner, response_id, events.reader.num_bytes)) as parts:
            async for part in parts:
                if part.end is None and len(part.data) <= _SMALL_BYTES:  # nearly all parts are small
                    if written := b"".join(events.of(part, after=after)):
                        yield written
                    continue
                async for piece in _yielding_to_loop(events.of(part, after=after)):
                    if piece:
                        yield piece

    async def _parts(
        self,
        owner: str,
        response_id: str,
        offset: int = 0,
        *,
        waits: bool = True,
        is_continued: bool = False,
        is_patient: bool = False,
    ) -> AsyncGenerator[AnswerPart, None]:
        """See `BatchService.follow_response`.

        If the batches process dies, a reader that `waits` or `is_patient` receives the parts from the next process.
        Raises Unavailable if no process answers in time. Other readers wait a shorter time.
        """
        failed_at: float | None = None  # time of the batches process's first failure after its last answer
        while True:
            asked_at = time.monotonic()
            try:
                following = self._service.follow_response(
                    owner, response_id, offset, waits=waits, is_continued=is_continued
                )
                async with aclosing(following) as parts:
                    async for part in parts:
                        offset += len(part.data)
                        yield part
                        failed_at = None
                        if part.end is not None:
                            return
                if not waits:
                    return
            except Unavailable:
                now = time.monotonic()
                if failed_at is None or now > asked_at + _RESTART_TIMEOUT_S:  # the process was alive until then
                    failed_at = now
                if now >= failed_at + (_RESTART_TIMEOUT_S if waits or is_patient else _OPENING_S):
                    raise
            await asyncio.sleep(_RETRY_PAUSE_S)


async def _yielding_to_loop(some: Iterable[T]) -> AsyncIterator[T]:
    """Yield all elements, and let other tasks run in between."""
    at_once = 8  # deltas with log-probabilities take a millisecond each
    for number, each in enumerate(some, 1):
        yield each
        if number % at_once == 0:
            await asyncio.sleep(0)


def _id_in(request: Request, path: str) -> str:
    """Return the response id in the URL. Raises NotFound for an id of another endpoint."""
    response_id: str = request.path_params["response_id"]
    check_id(response_id, path)
    return response_id


def _number_of(headers: Mapping[str, str], response_id: str) -> int:
    """Return the number of the event that the header identifies. Raises InvalidRequest."""
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


def _shown(item: Json) -> Json:
    """Return an input item in the form of OpenAI's list."""
    content, kind = item.get("content"), item.get("type", "message")
    if isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        content = [{"type": part, "text": content} | ({"annotations": []} if part == "output_text" else {})]
    return {"type": kind, "status": "completed"} | item | ({} if content is None else {"content": content})
