"""Batches worked off by jobs: their lines as the rows of bulk runs, the records of those as the lines' answers.

A job is found again by its id, which is on disk before it begins; its records are in its folder. So whatever dies, what
is done is booked once, and what is not goes on in the same job or in the next.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from app.api import AcceptedItem, ServedModel
from app.api.output.completion_writers import Answer, ChatFormat, CompletionFormat, Format, answered_elsewhere
from app.api.schemas.requests import GenerationRequest, QueuedRequest
from app.errors import InvalidRequest
from app.jobs import Answered, BatchWork, InputLine, LineResult, failed_line, result_of
from app.jobs.batch_folder import FolderDraft, Part, Records, delete_all_but, delete_folder, parts_of
from app.jobs.job_server import JobServer, JobState, NoJobServer
from app.jobs.preparation import CHAT_URL, COMPLETIONS_URL, check_fits_row
from app.jobs.record import Record

logger = logging.getLogger(__name__)

FOLLOW_EVERY_S = 1.0
SERVER_PAUSE_S = 5.0  # while it does not answer
JOB_ATTEMPTS = 3  # one after the other, and no line has come of them
JOB_PAUSE_S = 5.0
STOP_PATIENCE_S = 30.0
_LOG_CHARACTERS = 2000

Accept = Callable[
    [str, str, Mapping[str, Any], Callable[[QueuedRequest, ServedModel], None]], Awaitable[AcceptedItem | Answered]
]
T = TypeVar("T")

_FORMATS: Mapping[str, tuple[Format, str]] = {
    CHAT_URL: (ChatFormat(), "chatcmpl"),
    COMPLETIONS_URL: (CompletionFormat(), "cmpl"),
}


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A batch's lines that have not ended."""

    work: BatchWork
    lines: dict[int, str]  # their custom ids

    def line(self, number: int) -> InputLine:
        """One of them, without its body: that is with the job."""
        return InputLine(number=number, custom_id=self.lines[number], body={})


class BatchJobs:
    """`BatchWorker` on a job server: a bulk run for each model that a batch's lines name, one after the other."""

    endpoints: Sequence[str] = tuple(_FORMATS)

    def __init__(self, folder: Path, server: JobServer, accept: Accept, *, max_at_once: int) -> None:
        """`folder` is seen by every node of the server's cluster; `accept` is `RequestHandler.accept_item`.

        As many batches have a job at the same time as `max_at_once` says.
        """
        self._folder = folder
        self._server = server
        self._accept = accept
        self._places = asyncio.Semaphore(max_at_once)
        self._waiting: dict[str, _Waiting] = {}  # by the batch's id, of those that have a place

    def num_in_flight(self, owner: str) -> int:
        """See `BatchWorker`: all lines of batches that have a job."""
        return sum(len(each.lines) for each in self._waiting.values() if each.work.batch.owner == owner)

    async def work_off(self, work: BatchWork) -> None:
        """See `BatchWorker`."""
        async with self._places:
            if await self._parts(work) is None:
                await self._make_folder(work)
            async with self._lines_of(work) as waiting:
                for part in await self._parts(work) or ():
                    await self._run(waiting, part)
                assert not waiting.lines, "every line was refused or is a row of one part"

    async def stop(self, work: BatchWork) -> None:
        """See `BatchWorker`."""
        job_id, parts = await work.job_id(), await self._parts(work)
        if job_id is None or not parts:
            return
        try:
            async with asyncio.timeout(STOP_PATIENCE_S):
                await _answer(lambda: self._server.stop(job_id))
                while await self._state(job_id) is JobState.RUNNING:  # noqa: ASYNC110
                    await asyncio.sleep(FOLLOW_EVERY_S)
        except TimeoutError:
            logger.warning("job %s was told to stop and has not within %g s", job_id, STOP_PATIENCE_S)
        async with self._lines_of(work) as waiting:
            for part in parts:
                await self._book(waiting, part, Records(part))

    async def forget(self, batch_id: str) -> None:
        """See `BatchWorker`."""
        await asyncio.to_thread(delete_folder, self._folder / batch_id)

    async def sweep(self, unfinished: Sequence[str]) -> None:
        """See `BatchWorker`."""
        await asyncio.to_thread(delete_all_but, self._folder, unfinished)

    # Lines into rows

    async def _make_folder(self, work: BatchWork) -> None:
        """Write the lines that can run as rows; the others end here, with what HTTP would have said."""
        batch = work.batch
        draft = await asyncio.to_thread(FolderDraft, self._folder / batch.id)
        with draft:
            async with aclosing(work.lines(await work.ended())) as pieces:
                async for lines in pieces:
                    outcomes = [await self._accept(batch.owner, batch.endpoint, line.body, _check) for line in lines]
                    told = list(zip(lines, outcomes, strict=True))
                    rows = [(_row_id(batch.id, line), each) for line, each in told if isinstance(each, AcceptedItem)]
                    await asyncio.to_thread(draft.write, batch.endpoint, rows)
                    await work.end(
                        [result_of(batch.id, line, each) for line, each in told if isinstance(each, Answered)]
                    )
            await asyncio.to_thread(draft.keep)

    @asynccontextmanager
    async def _lines_of(self, work: BatchWork) -> AsyncIterator[_Waiting]:
        waiting = _Waiting(work, {})
        async with aclosing(work.lines(await work.ended())) as pieces:
            async for lines in pieces:
                waiting.lines.update((line.number, line.custom_id) for line in lines)
        self._waiting[work.batch.id] = waiting
        try:
            yield waiting
        finally:
            del self._waiting[work.batch.id]

    # Jobs

    async def _run(self, waiting: _Waiting, part: Part) -> None:
        """Return when every line of the part has ended."""
        num_fruitless = 0
        while not await self._is_done(waiting, part):
            if num_fruitless == JOB_ATTEMPTS:
                await self._give_up(waiting, part)
                return
            await asyncio.sleep(num_fruitless * JOB_PAUSE_S)
            num_before = len(waiting.lines)
            await self._follow(waiting, part, await self._job(waiting.work, part))
            num_fruitless = num_fruitless + 1 if len(waiting.lines) == num_before else 0

    async def _is_done(self, waiting: _Waiting, part: Part) -> bool:
        is_finished = await asyncio.to_thread(lambda: part.is_finished)
        await self._book(waiting, part, Records(part))
        return is_finished

    async def _job(self, work: BatchWork, part: Part) -> str:
        """The id of the part's job: of the one that runs, or of another that begins."""
        beginning = f"{work.batch.id}-{part.number}-"
        job_id = await work.job_id()
        if job_id and job_id.startswith(beginning) and await self._state(job_id) is JobState.RUNNING:
            logger.info("batch %s: job %s runs still", work.batch.id, job_id)
            return job_id
        new_id = f"{beginning}{uuid.uuid4().hex[:8]}"
        await work.keep_job_id(new_id)
        await _answer(lambda: self._server.submit(new_id, model=part.model, folder=part.folder))
        logger.info("batch %s: job %s begins, for model %s", work.batch.id, new_id, part.model)
        return new_id

    async def _follow(self, waiting: _Waiting, part: Part, job_id: str) -> None:
        """Book records as they come until the job has ended."""
        records = Records(part)
        state = JobState.RUNNING
        while state is JobState.RUNNING:
            state = await self._state(job_id)  # first: what it has written by its end is read
            await self._book(waiting, part, records)
            if state is JobState.RUNNING:
                await asyncio.sleep(FOLLOW_EVERY_S)
        if state is JobState.ENDED and not await asyncio.to_thread(lambda: part.is_finished):
            log = await _answer(lambda: self._server.log(job_id))
            logger.warning("job %s ended before its time: %s", job_id, log[-_LOG_CHARACTERS:])

    async def _book(self, waiting: _Waiting, part: Part, records: Records) -> None:
        while some := await asyncio.to_thread(records.more):
            results = [_result(waiting, part, record) for record in some if _line_number(record.id) in waiting.lines]
            await waiting.work.end(results)
            for result in results:
                waiting.lines.pop(result.line_number, None)

    async def _give_up(self, waiting: _Waiting, part: Part) -> None:
        message = f"the job that computes this line has failed {JOB_ATTEMPTS} times; the server's log has the reason"
        numbers = await asyncio.to_thread(lambda: [_line_number(row_id) for row_id in part.row_ids()])
        lost = [waiting.line(number) for number in numbers if number in waiting.lines]
        await waiting.work.end([failed_line(waiting.work.batch.id, line, "job_failed", message) for line in lost])
        for line in lost:
            del waiting.lines[line.number]

    async def _state(self, job_id: str) -> JobState:
        return await _answer(lambda: self._server.state(job_id))

    async def _parts(self, work: BatchWork) -> list[Part] | None:
        return await asyncio.to_thread(parts_of, self._folder / work.batch.id)


async def _answer(ask: Callable[[], Awaitable[T]]) -> T:
    """What the server says, once it answers."""
    while True:
        try:
            return await ask()
        except NoJobServer as error:
            logger.warning("the job server does not answer, and is waited for: %s", error)
        await asyncio.sleep(SERVER_PAUSE_S)


def _check(body: QueuedRequest, _: ServedModel) -> None:
    """Raise InvalidRequest for what a bulk run cannot do, in words for who does not know that there is one."""
    try:
        if not isinstance(body, GenerationRequest):
            raise InvalidRequest("they answer chats and completions only")
        check_fits_row(body)
    except InvalidRequest as error:
        raise InvalidRequest(f"this server's batches run as bulk jobs: {error.message}", param=error.param) from None


# A row without a seed has one that follows from its id: the same line in another batch should be drawn anew.
def _row_id(batch_id: str, line: InputLine) -> str:
    return f"{batch_id}-{line.number}"


def _line_number(row_id: str) -> int:
    return int(row_id.rpartition("-")[2])


def _result(waiting: _Waiting, part: Part, record: Record) -> LineResult:
    batch, line = waiting.work.batch, waiting.line(_line_number(record.id))
    if record.error is not None:
        return failed_line(batch.id, line, "line_failed", record.error)
    form, prefix = _FORMATS[batch.endpoint]
    answer = Answer(text=record.text or "", num_tokens=record.completion_tokens, finish_reason=record.finish_reason)
    body = answered_elsewhere(
        form, f"{prefix}-{uuid.uuid4().hex}", part.model, answer,
        created=int(time.time()), num_prompt=record.prompt_tokens,
    )  # fmt: skip
    return result_of(batch.id, line, Answered(200, body))
