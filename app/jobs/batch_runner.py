"""Works batches off: from `validating` to their end, from wherever a crash has left them.

A storage that fails or is nearly full pauses a batch, and so does an owner's share that is used up: it is tried again
until it works, and no result is deleted meanwhile. What is done by then, or by the batch's expiry, is in its output
file.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, closing
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import Any

from app.batches import BatchLimits, JobState
from app.config import BatchesConfig
from app.disk import STORAGE_FAILURES, STORAGE_PAUSE_S, OneThread
from app.errors import described, traceback_of
from app.jobs.catalog import Catalog
from app.jobs.executors import FleetExecution
from app.jobs.files import FileStore
from app.jobs.items import InputRules, OpenFile, check, pieces_of, read_items
from app.jobs.job import Counts, Item, ItemError, ItemResult, Job, StoredFile, counted
from app.jobs.outputs import BatchFiles, write_batch_files
from app.jobs.results import ResultStore
from app.jobs.runner import RecentRate, read_in_thread
from app.jobs.space import RESERVE_OF_WORK, shortage_of_disk, shortage_of_share

logger = logging.getLogger(__name__)

SPACE_LOOK_EVERY_S = 1.0
# Parts of the disk's reserve that stay free. A batch that is paused for a full disk still finds room for its files.
_RESERVE_OF_FILES = 0.25

# What a batch becomes at its end, by what it was when its items stopped.
_ENDS = {
    JobState.FINALIZING: JobState.COMPLETED,
    JobState.CANCELLING: JobState.CANCELLED,
    JobState.IN_PROGRESS: JobState.EXPIRED,
}


class BatchRunner:
    """One task for each batch that has not ended."""

    def __init__(
        self,
        catalog: Catalog,
        files: FileStore,
        folder: Path,
        thread: OneThread,
        execution: FleetExecution,
        limits: BatchLimits,
        config: BatchesConfig,
        clock: Callable[[], float],
        on_end: Callable[[], None],
    ) -> None:
        """`catalog` is used in `thread` only; stores of results are folders in `folder`, by the batches' ids.

        `clock` gives seconds since 1970. `on_end` is called at each end of a batch.
        """
        self._catalog = catalog
        self._files = files
        self._folder = folder
        self._thread = thread
        self._execution = execution
        self._limits = limits
        self._config = config
        self._clock = clock
        self._on_end = on_end
        self._rates: dict[str, RecentRate] = {}  # of output tokens, by owner
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._owners: dict[str, str] = {}  # by the batch's id, as all here
        # By owner: reading or writing whole files takes seconds of a thread, and all owners share the threads.
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._stops: dict[str, asyncio.Event] = {}
        self._pauses: dict[str, ItemError] = {}
        self._logged_at: dict[tuple[type, int | None], float] = {}  # failures of the storage, by kind
        self._results: dict[str, ResultStore] = {}  # of batches that have begun and not ended
        self._counted: dict[str, asyncio.Event] = {}  # set once the counts of a batch are known, or cannot be now
        self.num_completed = 0  # items of this process, and with an error
        self.num_failed = 0

    @property
    def num_batches(self) -> Counter[str]:
        """Batches that have not ended, by owner."""
        return Counter(self._owners.values())

    def stored_bytes(self) -> Counter[str]:
        """What files, and the results of batches that have not ended, take on the disk, by owner."""
        taken = Counter(self._catalog.bytes_by_owner)
        for job_id, results in self._results.items():
            taken[self._owners[job_id]] += results.num_bytes
        return taken

    def pause(self, job_id: str) -> ItemError | None:
        """Why a batch that has not ended waits for the storage; None when it does not."""
        return self._pauses.get(job_id)

    @property
    def num_paused(self) -> int:
        """Batches that wait for the storage."""
        return len(self._pauses)

    def tokens_per_s(self, owner: str) -> float:
        """How fast an owner's output tokens have come in the last minute."""
        return self._rates[owner].per_second(self._clock()) if owner in self._rates else 0.0

    def counts(self, job_id: str) -> Counts | None:
        """What has come of a batch that has begun and not ended."""
        results = self._results.get(job_id)
        return None if results is None else results.counts

    async def sweep(self) -> list[Job]:
        """Remove the results of batches that have ended: they are in their output files. For use before any work.

        Those of a batch that was given up without files stay as long as the catalog knows it. Returns the batches that
        have not ended.
        """
        # What is there before what is kept: nothing of a process that has taken the folder since can be removed.
        there = {path.name for path in await asyncio.to_thread(lambda: [*self._folder.glob("*")])}
        unfinished = await self._thread.run(self._catalog.unfinished)
        given_up = await self._thread.run(self._catalog.given_up_ids)
        for name in there.difference(given_up, (job.id for job in unfinished)):
            await asyncio.to_thread(shutil.rmtree, self._folder / name, ignore_errors=True)
        return unfinished

    async def resume(self, jobs: Sequence[Job]) -> None:
        """Go on with batches of an earlier process. Returns once their counts are known: no client sees fewer items."""
        for job in jobs:
            self.start(job)
        begun = [job.id for job in jobs if job.status is not JobState.VALIDATING]
        await asyncio.gather(*(self._counted[job_id].wait() for job_id in begun))

    def start(self, job: Job) -> None:
        """Work off a batch that the catalog knows."""
        job_id = job.id
        self._owners[job_id] = job.owner
        self._stops[job_id] = asyncio.Event()
        self._counted[job_id] = asyncio.Event()
        # In a context of its own: a batch is no part of the request that began it. Ray Serve keeps a request's id in
        # the context; calls with the same id, waiting for a replica at the same time, displace one another.
        task = self._tasks[job_id] = asyncio.create_task(self._run(job_id), context=Context())
        task.add_done_callback(lambda _: self._ended(job_id))

    def stop(self, job_id: str) -> None:
        """The batch was set to `cancelling`: its items in flight are aborted."""
        if job_id in self._stops:
            self._stops[job_id].set()

    async def close(self) -> None:
        """Stop all work. What was not done is as after a crash: it goes on when the folder is opened again."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, job_id: str) -> None:
        del self._tasks[job_id], self._owners[job_id], self._stops[job_id]
        self._counted.pop(job_id).set()
        self._results.pop(job_id, None)
        self._pauses.pop(job_id, None)
        self._on_end()

    async def _run(self, job_id: str) -> None:
        steps: list[Callable[[str], Awaitable[None]]] = [self._give_up, self._fail, self._advance]
        while steps:
            try:
                await steps[-1](job_id)
                return
            except FileNotFoundError as error:
                logger.error("batch %s: a file that it needs is gone: %s", job_id, described(error))
                steps.pop()
            except STORAGE_FAILURES as error:
                self._pauses[job_id] = _STORAGE_FAILED
                self._log_failure(job_id, error)
                self._counted[job_id].set()
                await asyncio.sleep(STORAGE_PAUSE_S)
            except Exception as error:
                logger.error("batch %s failed: %s", job_id, traceback_of(error))
                steps.pop()

    async def _advance(self, job_id: str) -> None:
        job = await self._thread.run(self._catalog.job, job_id)
        if job.status is JobState.VALIDATING:
            job = await self._validate(job)
        if job.status is JobState.IN_PROGRESS:
            job = await self._work(job)
        if job.status in _ENDS:
            await self._finish(job, _ENDS[job.status])

    async def _fail(self, job_id: str) -> None:
        job = await self._thread.run(self._catalog.job, job_id)
        if not job.status.has_ended:
            await self._finish(job, JobState.FAILED, errors=(_SERVER_ERROR,))

    async def _give_up(self, job_id: str) -> None:
        """End a batch without files: they cannot be written, for another reason than the storage. Its results stay."""
        logger.error("batch %s: ends without files; what was done stays in %s", job_id, self._folder / job_id)
        failed = {"status": JobState.FAILED, "failed_at": self._now(), "errors": (_SERVER_ERROR,)}
        await self._thread.run(self._catalog.end_job, job_id, [], **failed)

    async def _validate(self, job: Job) -> Job:
        async with self._turns[job.owner]:
            checked = await asyncio.to_thread(check, self._opener(job), self._rules(job))
        logger.info("batch %s: %d items, %d errors", job.id, checked.num_items, len(checked.errors))
        if checked.errors:
            return await self._change(
                job, status=JobState.FAILED, failed_at=self._now(), errors=checked.errors, model=checked.model
            )
        return await self._change(
            job,
            status=JobState.IN_PROGRESS,
            in_progress_at=self._now(),
            num_items=checked.num_items,
            model=checked.model,
        )

    async def _work(self, job: Job) -> Job:
        """Work items off until all have ended, the batch is cancelled or its time is over."""
        results = await self._open_results(job)
        with closing(results):
            if results.counts.num_items:
                logger.info(
                    "batch %s goes on: %d of %d items have ended", job.id, results.counts.num_items, job.num_items
                )
            is_done = await self._run_until_stopped(job, results)
            await asyncio.to_thread(results.sync)
        if is_done:
            return await self._change(job, status=JobState.FINALIZING, finalizing_at=self._now())
        return await self._thread.run(self._catalog.job, job.id)

    async def _run_until_stopped(self, job: Job, results: ResultStore) -> bool:
        """Whether every item has ended. While there is no room for results nothing runs."""
        is_done = results.is_complete
        stopped = asyncio.create_task(self._stops[job.id].wait())
        try:
            while not is_done and not stopped.done() and (left_s := job.expires_at - self._clock()) > 0:
                if self._is_paused(job.id, await self._shortage(job, results)):
                    await asyncio.wait({stopped}, timeout=min(left_s, STORAGE_PAUSE_S))
                else:
                    is_done = await self._run_while_room(job, results, stopped, left_s)
            return is_done
        finally:
            stopped.cancel()
            await asyncio.gather(stopped, return_exceptions=True)

    async def _run_while_room(
        self, job: Job, results: ResultStore, stopped: asyncio.Task[Any], timeout_s: float
    ) -> bool:
        """Whether every item has ended before there is no room, or the batch is stopped, or the time is over.

        Without room no item begins, and those under way end: computed again, they would be paid twice.
        """
        is_full = asyncio.Event()
        run = asyncio.create_task(self._compute(job, results, is_full))
        full = asyncio.create_task(self._until_full(job, results, is_full))
        try:
            await asyncio.wait({run, stopped}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for task in (run, full):
                if task.done():
                    task.result()
            return results.is_complete
        finally:
            run.cancel()
            full.cancel()
            await asyncio.gather(run, full, return_exceptions=True)

    async def _until_full(self, job: Job, results: ResultStore, is_full: asyncio.Event) -> None:
        """Set `is_full` when there is no room, or the look for it fails."""
        try:
            shortage = None
            while shortage is None:
                await asyncio.sleep(SPACE_LOOK_EVERY_S)
                shortage = await self._shortage(job, results)
            self._is_paused(job.id, shortage)
        finally:
            is_full.set()

    async def _shortage(self, job: Job, results: ResultStore) -> str | None:
        of_share = shortage_of_share(self._config.max_total_bytes, self.stored_bytes(), job.owner)
        return of_share or await asyncio.to_thread(
            shortage_of_disk, self._folder, results.num_bytes, share_of_reserve=RESERVE_OF_WORK
        )

    def _is_paused(self, job_id: str, shortage: str | None) -> bool:
        was_paused = self._pauses.pop(job_id, None) is not None
        if shortage is None:
            if was_paused:
                logger.info("batch %s goes on: there is room again", job_id)
            return False
        self._pauses[job_id] = ItemError(code="storage_full", message=shortage)
        if not was_paused:
            logger.warning("batch %s waits for room: %s", job_id, shortage)
        return True

    def _log_failure(self, job_id: str, error: Exception) -> None:
        kind, now = (type(error), getattr(error, "errno", None)), time.monotonic()
        storage_log_every_s = 60.0  # of the same failure: many batches meet it, each again and again
        if now >= self._logged_at.get(kind, -math.inf) + storage_log_every_s:
            self._logged_at[kind] = now
            reason = described(error)
            logger.error(
                "batch %s: the storage failed, and is tried again every %g s: %s", job_id, STORAGE_PAUSE_S, reason
            )

    async def _compute(self, job: Job, results: ResultStore, is_full: asyncio.Event) -> None:
        async def unfinished() -> AsyncGenerator[list[Item], None]:
            items = read_items(self._opener(job), self._rules(job))
            async with aclosing(read_in_thread(pieces_of(items))) as pieces:
                async for piece in pieces:
                    yield [item for item in piece if item.number not in results.ended]

        count_tokens = partial(self._count_tokens, job.owner)
        await self._execution.run(job, results, unfinished, self._count, count_tokens, is_full)

    def _count(self, results: Sequence[ItemResult]) -> None:
        num_failed = sum(result.is_error for result in results)
        self.num_failed += num_failed
        self.num_completed += len(results) - num_failed

    def _count_tokens(self, owner: str, num_tokens: int) -> None:
        now = self._clock()
        self._rates.setdefault(owner, RecentRate(60, began_at=now)).add(num_tokens, at=now)

    async def _finish(self, job: Job, end: JobState, **changes: object) -> None:
        results = await self._open_results(job)
        with closing(results):
            await self._room_for_files(job, results)
            async with self._turns[job.owner]:
                written = await asyncio.to_thread(self._write_files, job, end, results, self._now())
            files = [file for file in (written.output, written.errors) if file is not None]
            try:
                await self._thread.run(
                    self._catalog.end_job,
                    job.id,
                    files,
                    status=end,
                    output_file_id=written.output and written.output.id,
                    error_file_id=written.errors and written.errors.id,
                    **counted(results.counts),
                    **changes,
                    **{f"{end.value}_at": self._now()},
                )
            except STORAGE_FAILURES:
                await self._delete_unknown(job, files)
                raise
        logger.info("batch %s: %s", job.id, end.value)
        await asyncio.to_thread(shutil.rmtree, self._folder / job.id, ignore_errors=True)

    async def _room_for_files(self, job: Job, results: ResultStore) -> None:
        look = partial(shortage_of_disk, self._folder, results.num_bytes, share_of_reserve=_RESERVE_OF_FILES)
        while True:
            if not self._is_paused(job.id, await asyncio.to_thread(look)):
                return
            await asyncio.sleep(STORAGE_PAUSE_S)

    async def _delete_unknown(self, job: Job, files: Sequence[StoredFile]) -> None:
        """Delete files of a batch that the catalog does not name: they are written again, or were by another."""
        ended = await self._thread.run(self._catalog.job, job.id)
        for file in files:
            if file.id not in (ended.output_file_id, ended.error_file_id):
                await asyncio.to_thread(self._files.delete, file.id)

    def _write_files(self, job: Job, end: JobState, results: ResultStore, now: int) -> BatchFiles:
        keep_s = job.output_expires_after_s or self._config.keep_s
        with closing(read_items(self._opener(job), self._rules(job))) as items:
            return write_batch_files(job, end, results, items, self._files, now=now, keep_s=keep_s)

    async def _open_results(self, job: Job) -> ResultStore:
        results = await asyncio.to_thread(ResultStore, self._folder / job.id, job.num_items)
        self._results[job.id] = results
        self._counted[job.id].set()
        return results

    async def _change(self, job: Job, **changes: object) -> Job:
        return await self._thread.run(self._catalog.change_job, job.id, job.status, **changes)

    def _opener(self, job: Job) -> OpenFile:
        return partial(self._files.open, job.input_file_id)

    def _rules(self, job: Job) -> InputRules:
        return InputRules(
            endpoint=job.endpoint, max_items=self._limits.max_lines, max_line_bytes=self._limits.max_line_bytes
        )

    def _now(self) -> int:
        return int(self._clock())


_SERVER_ERROR = ItemError(code="server_error", message="the server failed on this batch; its log has the reason")

_STORAGE_FAILED = ItemError(code="storage_failed", message="the server cannot use its storage now, and tries again")
