"""Works batches off: from `validating` to their end, from wherever a crash has left them."""

from __future__ import annotations

import asyncio
import logging
import random
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from functools import partial

from app.config import BatchesConfig
from app.errors import EngineStopped, LimitReached, Overloaded, Unavailable
from app.jobs.catalog import Store
from app.jobs.files import FileFolder
from app.jobs.items import InputRules, OpenFile, check, read_lines
from app.jobs.job import OUTPUT_PURPOSE, Batch, LineError, Status, StoredFile
from app.jobs.line import Answer, Answered, InputLine, Json, LineResult, result_of
from app.jobs.one_thread import OneThread
from app.jobs.outputs import WrittenFile, write_files
from app.jobs.places import Place, Places
from app.jobs.recorder import Recorder
from app.jobs.token_rate import TokenRate
from app.jobs.worker import BatchWork, BatchWorker

logger = logging.getLogger(__name__)

STORAGE_FAILURES = (OSError, sqlite3.Error)
STORAGE_ATTEMPTS = 3
STORAGE_PAUSE_S = 5.0
LINE_ATTEMPTS = 3  # of a line that the server fails on; the engine itself has set the guilty apart by then
UNAVAILABLE_PAUSE_S = 2.0
MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 30.0

# What a batch becomes at its end, by what it was when its lines stopped.
_ENDS = {
    Status.FINALIZING: Status.COMPLETED,
    Status.CANCELLING: Status.CANCELLED,
    Status.IN_PROGRESS: Status.EXPIRED,
}


class Runner:
    """One task for each batch that has not ended; all of them share the places for lines in flight."""

    def __init__(
        self,
        store: Store,
        folder: FileFolder,
        thread: OneThread,
        answer: Answer,
        config: BatchesConfig,
        clock: Callable[[], float],
        on_end: Callable[[], None],
        worker: BatchWorker | None = None,
    ) -> None:
        """`store` is used in `thread` only; `clock` gives seconds since 1970; `on_end` hears of each batch's end.

        Where there is a `worker` it gets whole batches, and `answer` no lines.
        """
        self._store = store
        self._folder = folder
        self._thread = thread
        self._answer = answer
        self._config = config
        self._clock = clock
        self._places = Places(config.max_in_flight)
        self._on_end = on_end
        self._worker = worker
        self._rate = TokenRate(clock)
        self.recorder = Recorder(lambda results: thread.run(store.record, results))
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stops: dict[str, asyncio.Event] = {}

    @property
    def num_batches(self) -> int:
        """Batches that have not ended."""
        return len(self._tasks)

    def num_in_flight(self, owner: str) -> int:
        """Lines of this owner that somebody computes or that wait for it."""
        return self._places.num_taken(owner) + (self._worker.num_in_flight(owner) if self._worker else 0)

    def tokens_per_second(self, owner: str) -> float:
        """Output tokens of this owner's lines over the last minute."""
        return self._rate.per_second(owner)

    def start(self, batch_id: str) -> None:
        """Work off a batch that the store knows."""
        self._stops[batch_id] = asyncio.Event()
        # In a context of its own: a batch is no part of the request that began it. Ray Serve keeps a request's id in
        # the context; calls with the same id, waiting for a replica at the same time, displace one another.
        task = self._tasks[batch_id] = asyncio.create_task(self._run(batch_id), context=Context())
        task.add_done_callback(lambda _: (self._tasks.pop(batch_id), self._stops.pop(batch_id), self._on_end()))

    def stop(self, batch_id: str) -> None:
        """The batch was set to `cancelling`: its lines in flight are aborted."""
        if batch_id in self._stops:
            self._stops[batch_id].set()

    async def close(self) -> None:
        """Stop all work. What was not done is as after a crash: it goes on when the store is opened again."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.recorder.drained()

    async def _run(self, batch_id: str) -> None:
        for attempt in range(1, STORAGE_ATTEMPTS + 1):
            try:
                await self._advance(batch_id)
                return
            except STORAGE_FAILURES:
                logger.exception("batch %s: the storage failed, attempt %d of %d", batch_id, attempt, STORAGE_ATTEMPTS)
                if attempt < STORAGE_ATTEMPTS:
                    await asyncio.sleep(STORAGE_PAUSE_S)
            except Exception:
                logger.exception("batch %s failed", batch_id)
                break
        with suppress(*STORAGE_FAILURES):  # then it stays as it is, and goes on after a restart
            await self._fail(batch_id)

    async def _advance(self, batch_id: str) -> None:
        batch = await self._thread.run(self._store.batch, batch_id)
        if batch.status is Status.VALIDATING:
            batch = await self._validate(batch)
        if batch.status is Status.IN_PROGRESS:
            batch = await self._work(batch)
        if batch.status in _ENDS:
            await self._finish(batch, _ENDS[batch.status])

    async def _validate(self, batch: Batch) -> Batch:
        checked = await asyncio.to_thread(check, self._opener(batch), self._rules(batch))
        logger.info("batch %s: %d lines, %d errors", batch.id, checked.num_lines, len(checked.errors))
        if checked.errors:
            return await self._change(
                batch, status=Status.FAILED, failed_at=self._now(), errors=checked.errors, model=checked.model
            )
        return await self._change(
            batch,
            status=Status.IN_PROGRESS,
            in_progress_at=self._now(),
            num_lines=checked.num_lines,
            model=checked.model,
        )

    async def _work(self, batch: Batch) -> Batch:
        """Work lines off until all have ended, the batch is cancelled or its time is over."""
        work = asyncio.create_task(
            self._work_off(batch) if self._worker is None else self._worker.work_off(self._work_of(batch))
        )
        stopped = asyncio.create_task(self._stops[batch.id].wait())
        try:
            await asyncio.wait(
                {work, stopped},
                timeout=max(0.0, batch.expires_at - self._clock()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            is_done = work.done()
            if is_done:
                work.result()
        finally:
            work.cancel()
            stopped.cancel()
            await asyncio.gather(work, stopped, return_exceptions=True)
            await self.recorder.drained()  # a line that was being booked has ended
        if is_done:
            return await self._change(batch, status=Status.FINALIZING, finalizing_at=self._now())
        return await self._thread.run(self._store.batch, batch.id)

    async def _work_off(self, batch: Batch) -> None:
        ended = await self._thread.run(self._store.ended_lines, batch.id)
        if ended:
            logger.info("batch %s goes on: %d of %d lines have ended", batch.id, len(ended), batch.num_lines)
        lines, reader = read_lines(self._opener(batch), self._rules(batch)), OneThread()
        try:
            async with asyncio.TaskGroup() as group:
                while (line := await reader.run(next, lines, None)) is not None:
                    assert isinstance(line, InputLine), "a batch in progress has a valid input file"
                    if line.number in ended:
                        continue
                    place = await self._places.take(batch.owner)
                    # Not in the task itself: one that is cancelled before it starts would keep its place.
                    group.create_task(self._do(batch, line, place)).add_done_callback(place.done)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            await reader.run(lines.close)  # behind a line that is being read still
            reader.close()

    async def _do(self, batch: Batch, line: InputLine, place: Place) -> None:
        answered = await self._answered(batch, line.body, place)
        result = result_of(batch.id, line, answered)
        await self.recorder.record(result)
        self._rate.add(batch.owner, result.num_output_tokens)

    async def _answered(self, batch: Batch, body: Json, place: Place) -> Answered:
        """The answer to a line, however long it takes until somebody has room for it."""
        num_failures = 0
        while True:
            try:
                answered = await self._answer(batch.owner, batch.endpoint, body)
            except LimitReached as error:
                async with place.lent():
                    # Not all at the same moment: what one of them may use the others may not.
                    await asyncio.sleep(max(error.retry_after_s, MIN_PAUSE_S) * random.uniform(0.5, 1.5))
                continue
            except Overloaded as error:
                pause_s = error.retry_after_s
            except (Unavailable, EngineStopped):
                pause_s = UNAVAILABLE_PAUSE_S
            else:
                num_failures += 1
                if answered.status_code < 500 or num_failures == LINE_ATTEMPTS:
                    return answered
                pause_s = UNAVAILABLE_PAUSE_S
            await asyncio.sleep(min(max(pause_s, MIN_PAUSE_S), MAX_PAUSE_S))

    def _work_of(self, batch: Batch) -> BatchWork:
        def on_end(result: LineResult) -> None:
            self._rate.add(batch.owner, result.num_output_tokens)

        return BatchWork(batch, self._opener(batch), self._rules(batch), self._store, self._thread, on_end)

    async def _finish(self, batch: Batch, end: Status) -> None:
        if self._worker is not None and end is not Status.COMPLETED:
            await self._worker.stop(self._work_of(batch))
        written = await asyncio.to_thread(write_files, batch, end, self._store, self._folder, self._rules(batch))
        now = self._now()
        keep_s = batch.output_expires_after_s or self._config.keep_s
        files = [
            _stored(file, batch, f"{batch.id}_{kind}.jsonl", now, keep_s)
            for kind, file in (("output", written.output), ("error", written.errors))
            if file is not None
        ]
        try:
            await self._thread.run(
                self._store.end_batch,
                batch.id,
                files,
                status=end,
                output_file_id=written.output and written.output.id,
                error_file_id=written.errors and written.errors.id,
                **{f"{end.value}_at": now},
            )
        except STORAGE_FAILURES:
            for file in files:  # nobody knows them
                await self._thread.run(self._folder.delete, file.id)
            raise
        logger.info("batch %s: %s", batch.id, end.value)
        if self._worker is not None:
            await self._worker.forget(batch.id)

    async def _fail(self, batch_id: str) -> None:
        if self._worker is not None:
            with suppress(*STORAGE_FAILURES):
                await self._worker.stop(self._work_of(await self._thread.run(self._store.batch, batch_id)))
        error = LineError(code="server_error", message="the server failed on this batch; its log has the reason")
        await self._thread.run(
            self._store.end_batch, batch_id, [], status=Status.FAILED, failed_at=self._now(), errors=(error,)
        )

    async def _change(self, batch: Batch, **changes: object) -> Batch:
        """Change the batch unless it was cancelled meanwhile; the batch as it is then."""
        return await self._thread.run(self._store.change_batch, batch.id, batch.status, **changes)

    def _opener(self, batch: Batch) -> OpenFile:
        return partial(self._folder.open, batch.input_file_id)

    def _rules(self, batch: Batch) -> InputRules:
        return InputRules(
            endpoint=batch.endpoint, max_lines=self._config.max_lines, max_line_bytes=self._config.max_line_bytes
        )

    def _now(self) -> int:
        return int(self._clock())


def _stored(file: WrittenFile, batch: Batch, name: str, now: int, keep_s: int | None) -> StoredFile:
    return StoredFile(
        id=file.id,
        owner=batch.owner,
        bytes=file.num_bytes,
        created_at=now,
        expires_at=None if keep_s is None else now + keep_s,
        filename=name,
        purpose=OUTPUT_PURPOSE,
    )
