"""Generates stored responses, chats and completions.

A stored answer outlives its connection and its ingress. The catalog records the answer before the client receives its
id, and the answer's end before any client reads it. The request and the deltas are records in a file. If this process
dies, the next one regenerates the answer with the same prompt and seed, and skips the tokens that are in the file.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from app.batches import AnswerEnd, AnswerPart, AnswerRecorder, NewResponse, PrepareStoredAnswer
from app.disk import STORAGE_FAILURES, STORAGE_PAUSE_S, OneThread, sync_folder
from app.errors import (
    CarouselError,
    Failure,
    InvalidRequest,
    NotFound,
    Unavailable,
    may_be_served_later,
    traceback_of,
)
from app.jobs.answer_log import AnswerLog, LogWriter, Take, create_file, pieces_of
from app.jobs.backlog import MAX_DEATHS
from app.jobs.catalog import Catalog, Superseded
from app.jobs.job import StoredResponse
from app.jobs.space import MIN_CHARGED_BYTES
from app.records import RecordReader, num_complete_bytes, record

logger = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_S = 1.0  # the pause after a refusal without a retry time
LOOK_EVERY_BYTES = 256 * 1024  # an answer checks the disk for room each time it has grown by this many bytes
REFUSAL_KEPT_S = 60.0  # how long clients can read the reason for a refused response
_encode = msgspec.msgpack.Encoder().encode
_decode_new = msgspec.msgpack.Decoder(NewResponse).decode
_decode_end = msgspec.json.Decoder(AnswerEnd).decode


@dataclass(slots=True, eq=False)
class _Running:
    """An answer that has not ended."""

    new: NewResponse
    log: AnswerLog | None = None  # None until the answer is accepted
    has_counted: bool = False  # whether the catalog has counted this attempt
    num_charged: int = MIN_CHARGED_BYTES  # bytes that the catalog counts for the file until the answer ends
    task: asyncio.Task[None] | None = None


class StoredResponses:
    """The stored responses of a folder that this process holds."""

    def __init__(
        self,
        folder: Path,
        catalog: Catalog,
        thread: OneThread,
        answer: PrepareStoredAnswer,
        *,
        admit: Callable[[str, int, Callable[[], Counter[str]]], Awaitable[None]],
        shortage: Callable[[str], Awaitable[str | None]],
        clock: Callable[[], float],
        keep_s: int | None,
        wait_s: float,
    ) -> None:
        """`folder` holds the answers' files. `thread` is the only thread that uses the catalog.

        `admit(owner, num_bytes, running)` raises if the owner has no space left for the bytes or too many running
        answers. `running` returns the number of running answers by owner. While an answer grows, `shortage` returns the
        reason why the disk has no room, or None, and raises if the owner has no space left. An answer waits at most
        `wait_s` seconds for room on a replica, and is deleted after `keep_s` seconds (None for never).
        """
        self._folder = folder
        self._catalog = catalog
        self._answer = answer
        self._thread = thread
        self._admit = admit
        self._shortage = shortage
        self._clock = clock
        self._keep_s = keep_s
        self._wait_s = wait_s
        self._writer = LogWriter()
        self._running: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # for running answers, and for refused ones until they are deleted
        self._changes: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self._writing: asyncio.Task[None] | None = None  # writes changes until none is left
        # The ends of accepted responses that were refused before their first token, by owner and id.
        self._refusals: dict[tuple[str, str], AnswerEnd] = {}
        self._closing = asyncio.Event()

    async def resume(self) -> None:
        """Resume the answers that have not ended, and remove files that belong to no answer."""
        unended = await self._thread.run(self._catalog.unended_responses)
        known = set(await self._thread.run(self._catalog.response_ids))
        await asyncio.to_thread(_sweep, self._folder, known)
        for stored in unended:
            running = _Running(NewResponse(owner=stored.owner, body=b"", request_id="", response_id=stored.id))
            running.num_charged = max(stored.num_bytes, MIN_CHARGED_BYTES)
            self._start(running, self._continue(running, stored.num_attempts))

    async def close(self) -> None:
        """Stop all work. Unfinished answers resume when the folder is opened again.

        Ends all calls in progress. Calls that are waiting for the storage raise Unavailable.
        """
        self._closing.set()
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for running in self._running.values():
            if running.log is not None:
                running.log.close(failure=_ends())
        await self._writer.close()
        if self._writing is not None:
            await self._writing
        counted = [response_id for response_id, running in self._running.items() if running.has_counted]
        uncount = partial(self._catalog.count_response_attempt, by=-1)
        with suppress(*STORAGE_FAILURES):  # if the storage fails, this stop counts as a crash
            await self._thread.run(self._catalog.together, [partial(uncount, each) for each in counted])

    def growing_bytes(self) -> Counter[str]:
        """Return, by owner, the bytes of running answers that the catalog does not count yet."""
        grown: Counter[str] = Counter()
        for running in self._running.values():
            if running.log is not None:
                grown[running.new.owner] += max(0, running.log.num_bytes - running.num_charged)
        return grown

    async def create(self, new: NewResponse) -> None:
        """Start a response, and return once it is stored. Raises Overloaded or another error if it is refused."""
        await self._admit(new.owner, len(new.body), self._owners)
        if self._closing.is_set():
            raise _ends()
        running = _Running(msgspec.structs.replace(new, created_at=int(self._clock())))
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._start(running, self._begin(running, accepted))
        await asyncio.shield(accepted)

    async def follow(
        self, owner: str, response_id: str, offset: int, *, waits: bool, is_continued: bool, take: Take | None = None
    ) -> AsyncGenerator[AnswerPart, None]:
        """Return the parts of a response as described in `LocalBatchService.follow_response`."""
        running = self._of(owner, response_id)
        if running is not None:
            assert running.log is not None, "it is accepted"
            return running.log.parts(offset, waits=waits, take=take)
        if (owner, response_id) in self._refusals:
            return _only(AnswerPart(b"", self._refusals[owner, response_id]))
        stored = await self._found(owner, response_id, is_continued)
        if not stored.end:
            raise Unavailable("the server cannot finish this answer now (see its log for the reason); try again later")
        return self._stored_parts(stored, offset)

    async def _stored_parts(self, stored: StoredResponse, offset: int) -> AsyncGenerator[AnswerPart, None]:
        async for piece in pieces_of(self._folder / stored.id, offset):
            yield AnswerPart(piece)
        if stored.end:
            yield AnswerPart(b"", _decode_end(stored.end))

    async def cancel(self, owner: str, response_id: str) -> None:
        """See `BatchService`."""
        running = self._of(owner, response_id)
        if running is not None:
            await self._stop(running)
            if response_id in self._running:  # otherwise the response ended before its task was cancelled
                await self._end(running, AnswerEnd("cancelled"))
        stored = await self._stored(owner, response_id)
        if stored.status != "cancelled":
            raise InvalidRequest(f"the response is {stored.status}; only running responses can be cancelled")

    async def delete(self, owner: str, response_id: str) -> None:
        """See `BatchService`."""
        running = self._of(owner, response_id)
        await self._stored(owner, response_id)
        if running is not None:
            await self._stop(running)
            await self._until_stored(partial(self._forget, [response_id]), response_id)
            self._leave(running, failure=NotFound(f"the response {response_id!r} was deleted"))
        else:
            await self._forget([response_id])

    async def remove_expired(self) -> None:
        expired = await self._thread.run(self._catalog.expired_response_ids, self._clock())
        at_once = 100  # responses per transaction; few, because other work is waiting for the catalog's thread
        for at in range(0, len(expired), at_once):
            await self._forget(expired[at : at + at_once])

    async def _forget(self, response_ids: Sequence[str]) -> None:
        for unused in await self._thread.run(self._catalog.remove_responses, response_ids):
            await asyncio.to_thread((self._folder / unused).unlink, missing_ok=True)

    async def _write(self, change: Callable[[], T]) -> T:
        """Apply a change to the catalog. Changes that arrive during an earlier write share one transaction."""
        written: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._changes.append((change, written))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        return await written

    async def _write_all(self) -> None:
        try:
            while self._changes:
                changes, self._changes = self._changes, []
                for (_, written), outcome in zip(changes, await self._outcomes_of(changes), strict=True):
                    if written.done():  # the waiting call was cancelled
                        continue
                    if isinstance(outcome, Exception):
                        written.set_exception(outcome)
                    else:
                        written.set_result(outcome)
        finally:
            self._writing = None

    async def _outcomes_of(self, changes: Sequence[tuple[Callable[[], Any], asyncio.Future[Any]]]) -> list[Any]:
        """Apply changes in one transaction or, if one fails, one by one. Returns their results or errors."""
        try:
            return await self._thread.run(self._catalog.together, [change for change, _ in changes])
        except Exception as error:
            if len(changes) == 1:
                return [error]
            return [(await self._outcomes_of([each]))[0] for each in changes]

    # One response

    def _owners(self) -> Counter[str]:
        return Counter(each.new.owner for each in self._running.values())

    def _start(self, running: _Running, work: Coroutine[Any, Any, None]) -> None:
        self._running[running.new.response_id] = running
        running.task = asyncio.create_task(work, name=running.new.response_id)
        self._tasks.add(running.task)
        running.task.add_done_callback(partial(self._task_ended, running))

    def _task_ended(self, running: _Running, task: asyncio.Task[None]) -> None:
        """Report a failed task to the readers of its answer."""
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        error = task.exception()
        assert isinstance(error, Exception), "any other error ends the process"
        logger.error("response %s cannot be finished: %s", running.new.response_id, traceback_of(error))
        self._leave(running, failure=Unavailable("the server cannot finish this answer now; try again later"))

    async def _begin(self, running: _Running, accepted: asyncio.Future[None]) -> None:
        """Generate a response. Completes `accepted` once it is in the catalog, or with the error if it is refused."""
        try:
            end = await self._generate(running, accepted)
        except Exception as error:
            refusal = None
            if accepted.done():
                refusal = self._refuse(running, error)
            else:
                accepted.set_exception(error)
            self._leave(running, refusal)
            if running.log is not None:
                await self._until_stored(partial(self._forget, [running.new.response_id]), running.new.response_id)
        else:
            await self._end(running, end)
        finally:
            accepted.cancel()  # has an effect only if this process is closing

    async def _continue(self, running: _Running, num_attempts: int) -> None:
        """Generate the rest of a response that an earlier process began."""
        path = self._folder / running.new.response_id
        try:
            await self._until_stored(partial(self._open, running, path), path.name)
        except CarouselError as error:
            logger.error("response %s cannot be continued: %s", path.name, error)
            await self._until_stored(partial(self._write_end, path.name, _ended_by(error, path.name), 0), path.name)
            self._running.pop(path.name, None)
            return
        if num_attempts >= MAX_DEATHS:
            too_often = Unavailable(
                f"the process that generates this response died {num_attempts} times; send it again"
            )
            await self._end(running, _ended_by(too_often, path.name))
            return
        count = partial(self._thread.run, self._catalog.count_response_attempt, path.name)
        await self._until_stored(count, path.name)
        running.has_counted = True
        await self._end(running, await self._generate(running, None))

    async def _open(self, running: _Running, path: Path) -> None:
        """Open a response's file, cutting off a torn last record. Raises Failure."""
        running.new, num_bytes = await asyncio.to_thread(_repaired, path)
        running.log = AnswerLog(path, self._writer, num_bytes)
        logger.info("response %s resumes after %d bytes", path.name, num_bytes)

    async def _generate(self, running: _Running, accepted: asyncio.Future[None] | None) -> AnswerEnd:
        """Generate a response and return its end. A response that `may_wait` is retried until a replica has room.

        Raises the error if the response is refused before its first token.
        """
        new = running.new
        may_wait = new.may_wait or accepted is None
        while True:
            num_new = 0
            try:
                async with self._answer(new, partial(self._read_turn, running)) as answer:
                    if accepted is not None and not accepted.done():
                        await self._accept(running, answer)
                        accepted.set_result(None)
                    log = running.log
                    assert log is not None, "it is accepted"
                    num_bytes = 0  # bytes since the last check for room
                    async with aclosing(answer.records(self._known(log))) as records:
                        async for content in records:
                            num_new += 1
                            await log.append(record(content))
                            num_bytes += len(content)
                            if num_bytes >= LOOK_EVERY_BYTES:
                                num_bytes = 0
                                await self._room(new)
                    await log.flush()
                return answer.end()
            except Exception as error:
                if accepted is not None and (not accepted.done() or not (may_wait or num_new)):
                    raise
                retry_s = getattr(error, "retry_after_s", RETRY_S)
                if may_wait and not num_new and may_be_served_later(error) and self._may_wait_for(retry_s, new):
                    await asyncio.sleep(retry_s)
                    continue
                return _ended_by(error, new.response_id)

    async def _room(self, new: NewResponse) -> None:
        """Wait until the disk has room for a growing answer. Raises InvalidRequest if its owner's share is used up."""
        has_logged = False
        while (shortage := await self._shortage(new.owner)) is not None:
            if not has_logged:
                logger.warning("response %s is paused for lack of storage space: %s", new.response_id, shortage)
            has_logged = True
            await asyncio.sleep(STORAGE_PAUSE_S)

    def _may_wait_for(self, seconds: float, new: NewResponse) -> bool:
        return self._clock() + seconds < new.created_at + self._wait_s

    async def _accept(self, running: _Running, answer: AnswerRecorder) -> None:
        """Store a new response: write its request to a file, then add its row to the catalog."""
        new, path = running.new, self._folder / running.new.response_id
        head = record(_encode(new)) + record(answer.info)
        stored = StoredResponse(
            id=new.response_id,
            owner=new.owner,
            created_at=new.created_at,
            expires_at=None if self._keep_s is None else new.created_at + self._keep_s,
            status="queued" if new.may_wait else "in_progress",
            previous=new.previous,
            num_attempts=1,
            num_bytes=len(head),
        )
        try:
            await asyncio.to_thread(_create, path, head)
            # Open the log before adding the row, because a response without a log would never end.
            log = AnswerLog(path, self._writer, len(head), content=head)
            await self._write(partial(self._catalog.add_response, stored, self._clock()))
            running.log, running.has_counted = log, True
            running.num_charged = max(len(head), MIN_CHARGED_BYTES)
        except Exception:
            path.unlink(missing_ok=True)
            raise

    async def _known(self, log: AnswerLog) -> AsyncGenerator[bytes, None]:
        """Yield the contents of the file's records, except the first two, which hold the request and its info."""
        reader, num_head = RecordReader(), 2
        async for part in log.parts(0, waits=False):
            for content in reader.feed(part.data):
                if num_head:
                    num_head -= 1
                else:
                    yield content

    async def _read_turn(
        self, running: _Running, response_id: str, is_continued: bool
    ) -> AsyncGenerator[AnswerPart, None]:
        """See `ReadAnswer`. Once an answer is accepted, the response that it continues may be deleted or expired."""
        stored = await self._found(running.new.owner, response_id, is_continued or running.log is not None)
        async for part in self._stored_parts(stored, 0):
            yield part

    async def _found(self, owner: str, response_id: str, is_continued: bool) -> StoredResponse:
        if not is_continued:
            return await self._stored(owner, response_id)
        stored: StoredResponse = await self._thread.run(self._catalog.continued_response, owner, response_id)
        return stored

    async def _end(self, running: _Running, end: AnswerEnd) -> None:
        """Store a response's end in the catalog, then report it to the readers."""
        log = running.log
        assert log is not None, "it is accepted"
        with suppress(Unavailable):  # the storage is broken; the records written so far stay readable
            await log.flush()
        write = partial(self._write_end, running.new.response_id, end, log.num_bytes, log)
        self._leave(running, await self._until_stored(write, running.new.response_id))

    async def _write_end(
        self, response_id: str, end: AnswerEnd, num_bytes: int, log: AnswerLog | None = None
    ) -> AnswerEnd:
        """See `Catalog.end_response`."""
        if log is not None:
            await asyncio.to_thread(log.sync)
        return await self._write(partial(self._catalog.end_response, response_id, end, num_bytes))

    async def _until_stored(self, store: Callable[[], Awaitable[T]], response_id: str) -> T:
        """Retry `store` until it succeeds, and return its result. Raises Superseded, or Unavailable after `close`."""
        while True:
            try:
                return await store()
            except Superseded:
                raise
            except STORAGE_FAILURES as error:
                logger.error(
                    "response %s cannot be stored: %s; retrying in %.0f s", response_id, error, STORAGE_PAUSE_S
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(STORAGE_PAUSE_S):
                    await self._closing.wait()
            if self._closing.is_set():
                raise _ends()

    async def _stop(self, running: _Running) -> None:
        if running.task is not None:
            running.task.cancel()
            await asyncio.wait({running.task})

    def _leave(self, running: _Running, end: AnswerEnd | None = None, failure: Exception | None = None) -> None:
        self._running.pop(running.new.response_id, None)
        if running.log is not None:
            running.log.close(end, failure)

    def _refuse(self, running: _Running, error: Exception) -> AnswerEnd:
        owner, response_id = running.new.owner, running.new.response_id
        refusal = self._refusals[owner, response_id] = _ended_by(error, response_id, "refused")
        asyncio.get_running_loop().call_later(REFUSAL_KEPT_S, self._refusals.pop, (owner, response_id), None)
        return refusal

    def _of(self, owner: str, response_id: str) -> _Running | None:
        """Return a running response of this owner, or None. Raises Unavailable while its file is being opened."""
        running = self._running.get(response_id)
        if running is None or running.new.owner != owner:
            return None
        if running.log is None:
            raise Unavailable("this response is being opened; try again")
        return running

    async def _stored(self, owner: str, response_id: str) -> StoredResponse:
        stored: StoredResponse = await self._thread.run(
            self._catalog.stored_response, owner, response_id, self._clock()
        )
        return stored


def _ended_by(error: Exception, response_id: str, status: str = "failed") -> AnswerEnd:
    if not isinstance(error, CarouselError):
        logger.error("response %s failed: %s", response_id, traceback_of(error))
        error = Failure("the server failed to generate this response; see its log for the reason")
    return AnswerEnd(status, error.to_plain())


def _ends() -> Unavailable:
    return Unavailable("the batches process is stopping; try again")


async def _only(part: AnswerPart) -> AsyncGenerator[AnswerPart, None]:
    yield part


# The following functions block and run in a thread.


def _create(path: Path, head: bytes) -> None:
    create_file(path, head)
    sync_folder(path.parent)


def _repaired(path: Path) -> tuple[NewResponse, int]:
    """Cut off a torn last record of a response's file. Returns the request and the new size. Raises Failure."""
    try:
        data = path.read_bytes()
        num_bytes = num_complete_bytes(data)
        new = _decode_new(next(RecordReader().feed(data), b""))
    except (FileNotFoundError, msgspec.DecodeError):
        raise Failure("the server has lost this request; send it again") from None
    os.truncate(path, num_bytes)
    return new, num_bytes


def _sweep(folder: Path, known: Container[str]) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    for file in folder.iterdir():
        if file.name not in known:
            file.unlink(missing_ok=True)
