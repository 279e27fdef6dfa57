"""Responses, chats and completions that are kept: generated here, whatever becomes of the connection or the ingress.

A response is known to the catalog before its client hears of it, and its end before its client reads of it. The events
of one that is streamed are appended to a file before a client reads them, so one whose process dies goes on behind
them: its prompt and seed are the same, and what it says again is left out.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from app.batches import (
    PIECE_BYTES,
    RESPONSE_RUNS,
    RESPONSES_PATH,
    AnswerKept,
    Events,
    EventsAfter,
    KeptAnswer,
    NewResponse,
    PageOf,
)
from app.disk import STORAGE_FAILURES, STORAGE_PAUSE_S, OneThread
from app.errors import (
    CarouselError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
    may_be_served_later,
    traceback_of,
)
from app.jobs.backlog import MAX_DEATHS
from app.jobs.catalog import Catalog
from app.jobs.job import StoredResponse
from app.json_pieces import DONE, Json, event, json_pieces, named_event

logger = logging.getLogger(__name__)

_TOGETHER_S = 0.005
RETRY_S = 1.0  # after a refusal that names no time
REFUSAL_KEPT_S = 60.0  # for the client that waits for the response
_END, _END_OF_DELTA = b"\n\n", b"\n"  # of an event in a file, and of all that one delta gave
_HELD_BACK = b"\n"  # before the events of the last delta, which no client reads before the response has ended
# They are written from the response itself.
_LAST_EVENTS = (b"event: response.completed\n", b"event: response.incomplete\n", b"event: response.failed\n", DONE)


@dataclass(slots=True, eq=False)
class _Running:
    """A response that has not ended."""

    new: NewResponse
    response: Json  # as it was when it was accepted
    log: Path | None  # of its events; None: it is not streamed
    events: list[bytes] = field(default_factory=list)
    answer: KeptAnswer | None = None  # while it is computed
    task: asyncio.Task[None] | None = None

    def now(self) -> Json:
        """The response by now; it has not ended before the catalog knows it."""
        now = self.response if self.answer is None else _object(self.answer)
        return now if now.get("status") in RESPONSE_RUNS else now | {"status": "in_progress", "usage": None}


class KeptResponses:
    """The responses of one folder, while this process holds it."""

    def __init__(
        self,
        folder: Path,
        catalog: Catalog,
        thread: OneThread,
        answer: AnswerKept,
        *,
        admit: Callable[[str, int, Callable[[], Counter[str]]], Awaitable[None]],
        clock: Callable[[], float],
        keep_s: int | None,
    ) -> None:
        """`folder` has the events, `thread` is the catalog's.

        `admit` raises where an owner may not keep so many bytes more, or has too many that run; it counts these last.
        """
        self._folder = folder
        self._catalog = catalog
        self._answer = answer
        self._thread = thread
        self._admit = admit
        self._clock = clock
        self._keep_s = keep_s
        self._running: dict[str, _Running] = {}
        self._changes: list[tuple[Callable[[], None], asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None  # as long as there are changes
        self._changed = asyncio.Event()  # another for each change
        self._refusals: dict[str, Exception] = {}  # of responses that never began, for their clients

    async def resume(self) -> None:
        """Go on with what has not ended, and remove events that no response has."""
        unended = await self._thread.run(self._catalog.unended_responses)
        known = set(await self._thread.run(self._catalog.response_ids))
        await asyncio.to_thread(_sweep, self._folder, known)
        for stored in unended:
            new = NewResponse(**from_json(stored.request))
            running = _Running(new, from_json(stored.response), self._log_of(new))
            if running.log is not None:
                running.events = await asyncio.to_thread(_read_shown, running.log)
            logger.info("response %s goes on behind %d events", new.response_id, len(running.events))
            self._start(running, self._go_on(running, stored.num_attempts))

    async def close(self) -> None:
        """Stop. What has not ended goes on when the folder is opened again."""
        tasks = [each.task for each in self._running.values() if each.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._writing is not None:
            await self._writing
        with suppress(*STORAGE_FAILURES):  # then this end counts as a death
            for response_id in self._running:
                await self._thread.run(self._catalog.count_response_attempt, response_id, by=-1)

    async def create(self, new: NewResponse) -> Json:
        """Begin a response; its object. Raises what its body would be refused with, and Overloaded."""
        await self._admit(new.owner, len(to_json(new.body)), self._owners)
        seed = {} if new.body.get("seed") is not None else {"seed": secrets.randbits(63)}
        new = replace(new, created_at=int(self._clock()), body=dict(new.body) | seed)
        running = _Running(new, {}, self._log_of(new))
        accepted: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._start(running, self._begin(running, accepted))
        return await asyncio.shield(accepted)

    async def response(self, owner: str, response_id: str, wait_s: float = 0.0) -> Json:
        """See `BatchService`."""
        running = self._of(owner, response_id)
        if running is not None:
            await self._change(wait_s, lambda: response_id not in self._running)
            if response_id in self._running:
                return running.now()
        self._raise_refusal(response_id)
        stored = await self._stored(owner, response_id)
        response: Json = from_json(stored.response)
        return response

    async def events(self, asked: Sequence[EventsAfter], wait_s: float) -> list[Events | Exception]:
        """See `BatchService`."""
        if not any(map(self._has_news, asked)):
            await self._change(wait_s, lambda: any(map(self._has_news, asked)))
            await asyncio.sleep(_TOGETHER_S)  # other responses of the same step have events too
        return [await self._events_of(each) for each in asked]

    def _has_news(self, asked: EventsAfter) -> bool:
        running = self._of(asked.owner, asked.response_id)
        return running is None or len(running.events) > asked.number + 1

    async def _events_of(self, asked: EventsAfter) -> Events | Exception:
        try:
            return await self._read(asked.owner, asked.response_id, asked.number)
        except CarouselError as error:
            return error

    async def _read(self, owner: str, response_id: str, after: int) -> Events:
        running = self._of(owner, response_id)
        if running is not None:
            _check_streamed(running.new)
            _check_after(after, len(running.events))
            return _piece(running.events, after, may_be_last=False)
        self._raise_refusal(response_id)
        stored = await self._stored(owner, response_id)
        new = NewResponse(**from_json(stored.request))
        _check_streamed(new)
        events = await asyncio.to_thread(_read_events, self._folder / response_id)
        events.append(_last_event(new, from_json(stored.response), len(events)))
        _check_after(after, len(events))
        return _piece(events, after, may_be_last=True)

    async def conversation(self, owner: str, response_id: str) -> list[Json]:
        """See `BatchService`."""
        stored = await self._stored(owner, response_id)
        response = from_json(stored.response)
        if response["status"] not in ("completed", "incomplete"):
            raise InvalidRequest(
                f"the response {response_id!r} is {response['status']}; only one that is completed or incomplete can "
                f"be gone on with",
                param="previous_response_id",
            )
        return [*_items(NewResponse(**from_json(stored.request))), *map(_as_input, response["output"])]

    async def items(self, page: PageOf, response_id: str) -> list[Json]:
        """The items of a page, and one more when there are more. Raises NotFound."""
        stored = await self._stored(page.owner, response_id)
        items = [
            {"id": f"item_{number}_{response_id}", **_shown(item)}
            for number, item in enumerate(_items(NewResponse(**from_json(stored.request))))
        ]
        if not page.is_ascending:
            items.reverse()
        begin = 0
        if page.after is not None:
            begin = next((at + 1 for at, item in enumerate(items) if item["id"] == page.after), -1)
            if begin < 0:
                raise NotFound(f"there is nothing with the id {page.after[:100]!r} to go on after", param="after")
        return items[begin : begin + page.limit + 1]

    async def cancel(self, owner: str, response_id: str) -> Json:
        """See `BatchService`."""
        running = self._of(owner, response_id)
        if running is None:
            response = from_json((await self._stored(owner, response_id)).response)
            if response["status"] != "cancelled":
                raise InvalidRequest(f"the response is {response['status']}; only one that runs can be cancelled")
            return dict(response)
        response = await self._stopped(running)
        await self._end(running, _ended(response, "cancelled"))
        return await self.response(owner, response_id)

    async def delete(self, owner: str, response_id: str) -> Json:
        """See `BatchService`."""
        running = self._of(owner, response_id)
        await self._stored(owner, response_id)
        if running is not None:
            await self._stopped(running)
            self._leave(running)
        await self._forget([response_id])
        return {"id": response_id, "object": "response", "deleted": True}

    async def remove_expired(self) -> None:
        """Forget what has expired."""
        await self._forget(await self._thread.run(self._catalog.expired_response_ids, self._clock()))

    async def _forget(self, response_ids: Sequence[str]) -> None:
        await self._thread.run(self._catalog.remove_responses, response_ids)
        for response_id in response_ids:
            await asyncio.to_thread((self._folder / response_id).unlink, missing_ok=True)

    async def _change(self, wait_s: float, is_there: Callable[[], bool]) -> None:
        """Returns once something is there, after `wait_s` at the latest."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not is_there():
                    await self._changed.wait()

    async def _write(self, change: Callable[[], None]) -> None:
        """Change the catalog, together with the changes that come while an earlier one is on its way to the disk."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changes.append((change, written))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        await written

    async def _write_all(self) -> None:
        try:
            while self._changes:
                changes, self._changes = self._changes, []
                error: Exception | None = None
                try:
                    await self._thread.run(self._catalog.together, [change for change, _ in changes])
                except Exception as failed:
                    error = failed
                for _, written in changes:
                    if written.done():  # nothing waits for it any more
                        continue
                    if error is None:
                        written.set_result(None)
                    else:
                        written.set_exception(error)
        finally:
            self._writing = None

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # One response

    def _owners(self) -> Counter[str]:
        return Counter(each.new.owner for each in self._running.values())

    def _start(self, running: _Running, work: Coroutine[Any, Any, None]) -> None:
        self._running[running.new.response_id] = running
        running.task = asyncio.create_task(work, name=running.new.response_id)

    async def _begin(self, running: _Running, accepted: asyncio.Future[Json]) -> None:
        """Generate a response, which is `accepted` once the catalog knows it."""
        try:
            await self._generate(running, accepted=accepted, may_wait=running.new.may_wait)
        except Exception as error:
            if accepted.done():
                self._refuse(running, error)
                await self._thread.run(self._catalog.remove_responses, [running.new.response_id])
            else:
                accepted.set_exception(error)
            self._leave(running)
        finally:
            accepted.cancel()  # where it is not done, this process ends

    async def _go_on(self, running: _Running, num_attempts: int) -> None:
        """Generate the rest of a response whose process has died."""
        if num_attempts >= MAX_DEATHS:
            error = Unavailable(f"the process that generated it died {num_attempts} times; send it again")
            await self._end(running, _ended(running.response, "failed", error))
            return
        await self._thread.run(self._catalog.count_response_attempt, running.new.response_id)
        await self._generate(running)

    async def _generate(
        self, running: _Running, *, accepted: asyncio.Future[Json] | None = None, may_wait: bool = True
    ) -> None:
        """Generate a response to its end, again and again while no replica has room for it where it `may_wait`.

        Raises what refuses it before it is accepted, and where it may not wait.
        """
        is_over, last_events = False, list[bytes]()
        while not is_over:
            try:
                async with self._answer(running.new) as answer:
                    if accepted is not None and not accepted.done():
                        running.response = _object(answer)
                        await self._write(partial(self._catalog.add_response, self._row(running)))
                        accepted.set_result(running.response)
                    running.answer = answer
                    with _opened(running.log) as log:
                        async for events in answer.events(tuple(running.events)):
                            is_last = events[-1].startswith(_LAST_EVENTS)
                            if is_last:
                                last_events = events = events[:-1]
                            if log is not None and events:
                                written = b"".join(events) + _END_OF_DELTA  # before a client reads any of them
                                log.write(_HELD_BACK + written if is_last else written)
                                if not is_last:
                                    running.events += events
                                    self._wake()
                    response = _object(answer)
                is_over = True
            except Exception as error:
                running.response, running.answer = running.now(), None
                if accepted is not None and not (accepted.done() and may_wait):
                    raise
                if may_be_served_later(error):
                    await asyncio.sleep(getattr(error, "retry_after_s", RETRY_S))
                    continue
                response, is_over = _ended(running.response, "failed", error), True
        await self._end(running, response, last_events)

    async def _end(self, running: _Running, response: Json, last_events: Sequence[bytes] = ()) -> None:
        """The catalog knows the end before a client reads of it."""
        num_bytes = sum(map(len, (*running.events, *last_events)))
        while True:
            try:
                end = partial(self._catalog.end_response, running.new.response_id, response, num_bytes)
                await self._write(end)
                break
            except STORAGE_FAILURES as error:
                logger.error("the end of response %s could not be kept: %s; trying again", response["id"], error)
                await asyncio.sleep(STORAGE_PAUSE_S)
        running.answer = None
        running.response = response
        running.events += last_events
        running.events.append(_last_event(running.new, response, len(running.events)))
        self._leave(running)

    async def _stopped(self, running: _Running) -> Json:
        """The response as it was when its generation was stopped."""
        response = running.now()
        if running.task is not None:
            running.task.cancel()
            await asyncio.wait({running.task})
        return response

    def _leave(self, running: _Running) -> None:
        self._running.pop(running.new.response_id, None)
        self._wake()

    def _refuse(self, running: _Running, error: Exception) -> None:
        response_id = running.new.response_id
        self._refusals[response_id] = error
        asyncio.get_running_loop().call_later(REFUSAL_KEPT_S, self._refusals.pop, response_id, None)

    def _raise_refusal(self, response_id: str) -> None:
        error = self._refusals.get(response_id)
        if error is not None:
            raise error

    def _of(self, owner: str, response_id: str) -> _Running | None:
        running = self._running.get(response_id)
        return running if running is not None and running.new.owner == owner and running.response else None

    async def _stored(self, owner: str, response_id: str) -> StoredResponse:
        stored: StoredResponse = await self._thread.run(
            self._catalog.stored_response, owner, response_id, self._clock()
        )
        return stored

    def _row(self, running: _Running) -> StoredResponse:
        new = running.new
        return StoredResponse(
            id=new.response_id,
            owner=new.owner,
            created_at=new.created_at,
            expires_at=None if self._keep_s is None else new.created_at + self._keep_s,
            status=running.response["status"],
            request=to_json(new).decode(),
            response=to_json(running.response).decode(),
        )

    def _log_of(self, new: NewResponse) -> Path | None:
        return self._folder / new.response_id if new.body.get("stream") else None


# Events in files:


def _opened(log: Path | None) -> AbstractContextManager[FileIO | None]:
    """To write behind what is there, without a buffer."""
    return nullcontext() if log is None else FileIO(log, "a")


def _read_deltas(log: Path) -> list[bytes]:
    """All that were written to their ends."""
    try:
        return log.read_bytes().split(_END + _END_OF_DELTA)[:-1]
    except FileNotFoundError:
        return []


def _read_events(log: Path) -> list[bytes]:
    return [event + _END for written in _read_deltas(log) for event in written.removeprefix(_HELD_BACK).split(_END)]


def _read_shown(log: Path) -> list[bytes]:
    """Those that a client may have read of a response that has not ended; the file has no others any more."""
    written = _read_deltas(log)
    if written and written[-1].startswith(_HELD_BACK):
        del written[-1]
    if log.exists():
        os.truncate(log, sum(len(each) + len(_END + _END_OF_DELTA) for each in written))
    return _read_events(log)


def _sweep(folder: Path, known: Container[str]) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    for file in folder.iterdir():
        if file.name not in known:
            file.unlink(missing_ok=True)


def _last_event(new: NewResponse, response: Json, number: int) -> bytes:
    """The event that ends a response; there is none of a name of its own for one that was cancelled.

    Of chunks, also the error before it.
    """
    if new.path != RESPONSES_PATH:
        if response.get("error") is None:
            return DONE
        error = {"type": "server_error", "param": None} | response["error"]
        return event({"error": error}) + DONE
    kind = "incomplete" if response["status"] == "cancelled" else response["status"]
    return named_event({"type": f"response.{kind}", "sequence_number": number, "response": response})


def _piece(events: Sequence[bytes], after: int, *, may_be_last: bool) -> Events:
    """Events behind one, of about `PIECE_BYTES`."""
    piece, size = list[bytes](), 0
    for at in range(after + 1, len(events)):
        if size >= PIECE_BYTES:
            return Events(piece, are_last=False)
        piece.append(events[at])
        size += len(events[at])
    return Events(piece, may_be_last)


# Objects:


def _object(answer: KeptAnswer) -> Json:
    response: Json = from_json(b"".join(json_pieces(answer.as_json())))
    return response


def _ended(response: Json, status: str, error: Exception | None = None) -> Json:
    """A response that ends before its time."""
    ended = response | {"status": status}
    if "output" in response:
        ended["output"] = [
            item | {"status": "incomplete"} if item["status"] == "in_progress" else item for item in response["output"]
        ]
    if error is not None:
        if not isinstance(error, CarouselError):
            logger.error("response %s failed: %s", response["id"], traceback_of(error))
        message = str(error) if isinstance(error, CarouselError) else "the server failed on it; its log has the reason"
        code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
        ended["error"] = {"code": code, "message": message}
    return ended


def _items(new: NewResponse) -> list[Json]:
    given = new.body["input"]
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given


def _as_input(item: Json) -> Json:
    """An output item as one of a later response."""
    fields = ("type", "role", "call_id", "name", "arguments", "input", "content")
    kept = {name: item[name] for name in fields if name in item}
    if isinstance(kept.get("content"), list):
        kept["content"] = [{"type": part["type"], "text": part.get("text", "")} for part in kept["content"]]
    return kept


def _shown(item: Json) -> Json:
    """An input item in a list, as OpenAI shows it."""
    content, kind = item.get("content"), item.get("type", "message")
    if isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        content = [{"type": part, "text": content} | ({"annotations": []} if part == "output_text" else {})]
    return {"type": kind, "status": "completed"} | item | ({} if content is None else {"content": content})


def _check_streamed(new: NewResponse) -> None:
    if not new.body.get("stream"):
        raise InvalidRequest("events are kept of responses that were begun with stream: true; this one was not")


def _check_after(after: int, num_events: int) -> None:
    if after >= max(num_events, 1):
        raise InvalidRequest(
            f"starting_after is {after}; the last event so far has the number {num_events - 1}", param="starting_after"
        )
