"""Runs batches from `validating` to their end, and resumes batches after a crash.

A batch is paused while the storage fails or is nearly full, and while its owner's share is used up. The runner retries
until the storage works or the batch expires. An expired batch still delivers its results so far.
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
# The fraction of the disk's reserve that output files leave free; lower than for items, so that paused batches can end.
_RESERVE_OF_FILES = 0.25

# The final state of a batch, by its state when its last item stopped.
_ENDS = {
    JobState.FINALIZING: JobState.COMPLETED,
    JobState.CANCELLING: JobState.CANCELLED,
    JobState.IN_PROGRESS: JobState.EXPIRED,
}


class BatchRunner:
    """Runs one task for each batch that has not ended."""

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
        """`catalog` is used in `thread` only. `folder` holds one folder of results per batch, named by the batch id.

        `clock` returns seconds since 1970. `on_end` is called when a batch ends.
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
        self._rates: dict[str, RecentRate] = {}  # output tokens per second, by owner
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by batch id, like most dicts below
        self._owners: dict[str, str] = {}
        # One lock per owner. Reading or writing a whole file occupies a thread for seconds, so each owner may occupy
        # only one of the threads that all owners share.
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._stops: dict[str, asyncio.Event] = {}
        self._pauses: dict[str, ItemError] = {}
        self._logged_at: dict[tuple[type, int | None], float] = {}  # times of logged storage failures, by kind
        self._results: dict[str, ResultStore] = {}  # open stores of the batches that have begun but not ended
        self._counted: dict[str, asyncio.Event] = {}  # set once a batch's counts are known or cannot be read
        self.num_completed = 0  # items that this process completed without an error
        self.num_failed = 0  # items that this process ended with an error

    @property
    def num_batches(self) -> Counter[str]:
        """The number of batches that have not ended, by owner."""
        return Counter(self._owners.values())

    def stored_bytes(self) -> Counter[str]:
        """Return the bytes that each owner's files, stored responses and unfinished batch results occupy."""
        taken = Counter(self._catalog.bytes_by_owner)
        for job_id, results in self._results.items():
            taken[self._owners[job_id]] += results.num_bytes
        return taken

    def pause(self, job_id: str) -> ItemError | None:
        """Return the reason why a batch is paused, or None if it is not paused."""
        return self._pauses.get(job_id)

    @property
    def num_paused(self) -> int:
        return len(self._pauses)

    def tokens_per_s(self, owner: str) -> float:
        """Return an owner's output tokens per second over the last minute."""
        return self._rates[owner].per_second(self._clock()) if owner in self._rates else 0.0

    def counts(self, job_id: str) -> Counts | None:
        """Return the item counts of a running batch, or None for a batch that has not begun or has ended."""
        results = self._results.get(job_id)
        return None if results is None else results.counts

    async def sweep(self) -> list[Job]:
        """Remove the results of ended batches and return the unfinished batches. Call before any batch starts.

        The output files already contain the removed results. The results of a batch that failed without files are kept
        until the catalog forgets the batch.
        """
        # List the folder before the query. Otherwise a batch that another process starts in between loses its results.
        there = {path.name for path in await asyncio.to_thread(lambda: [*self._folder.glob("*")])}
        unfinished = await self._thread.run(self._catalog.unfinished)
        given_up = await self._thread.run(self._catalog.given_up_ids)
        for name in there.difference(given_up, (job.id for job in unfinished)):
            await asyncio.to_thread(shutil.rmtree, self._folder / name, ignore_errors=True)
        return unfinished

    async def resume(self, jobs: Sequence[Job]) -> None:
        """Resume an earlier process's batches. Returns once their counts are known, so that clients see no drop."""
        for job in jobs:
            self.start(job)
        begun = [job.id for job in jobs if job.status is not JobState.VALIDATING]
        await asyncio.gather(*(self._counted[job_id].wait() for job_id in begun))

    def start(self, job: Job) -> None:
        """Start the task of a batch that is in the catalog."""
        job_id = job.id
        self._owners[job_id] = job.owner
        self._stops[job_id] = asyncio.Event()
        self._counted[job_id] = asyncio.Event()
        # Run the task in a new context. The current one carries Ray Serve's id of the request that created the batch,
        # and calls with the same id displace one another while they wait for a replica.
        task = self._tasks[job_id] = asyncio.create_task(self._run(job_id), context=Context())
        task.add_done_callback(lambda _: self._ended(job_id))

    def stop(self, job_id: str) -> None:
        """Abort the items in flight of a batch whose status was set to `cancelling`."""
        if job_id in self._stops:
            self._stops[job_id].set()

    async def close(self) -> None:
        """Stop all batches. Unfinished batches resume when the folder is opened again, as after a crash."""
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
                logger.error("batch %s: a required file is missing: %s", job_id, described(error))
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
        """Fail a batch whose files cannot be written although the storage works. Keeps its results."""
        logger.error("batch %s failed without output files; its results are in %s", job_id, self._folder / job_id)
        failed = {"status": JobState.FAILED, "failed_at": self._now(), "errors": (_SERVER_ERROR,)}
        await self._thread.run(self._catalog.end_job, job_id, [], **failed)

    async def _validate(self, job: Job) -> Job:
        async with self._turns[job.owner]:
            checked = await asyncio.to_thread(check, self._opener(job), self._rules(job))
        logger.info("batch %s has been checked: %d items, %d errors", job.id, checked.num_items, len(checked.errors))
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
        """Compute items until all have ended, the batch is cancelled, or the batch expires."""
        results = await self._open_results(job)
        with closing(results):
            if results.counts.num_items:
                logger.info(
                    "batch %s resumes: %d of %d items are finished", job.id, results.counts.num_items, job.num_items
                )
            is_done = await self._run_until_stopped(job, results)
            await asyncio.to_thread(results.sync)
        if is_done:
            return await self._change(job, status=JobState.FINALIZING, finalizing_at=self._now())
        return await self._thread.run(self._catalog.job, job.id)

    async def _run_until_stopped(self, job: Job, results: ResultStore) -> bool:
        """Compute items, pausing while the storage has no room for results. Returns whether every item has ended."""
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
        """Compute items until room or time runs out or the batch is stopped. Returns whether every item has ended.

        Without room, no new items start, but running items finish, because recomputing them would double their cost.
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
        """Set `is_full` once there is no room for results, or if the check itself fails."""
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
                logger.info("batch %s resumes, because storage space is available again", job_id)
            return False
        self._pauses[job_id] = ItemError(code="storage_full", message=shortage)
        if not was_paused:
            logger.warning("batch %s is paused for lack of storage space: %s", job_id, shortage)
        return True

    def _log_failure(self, job_id: str, error: Exception) -> None:
        kind, now = (type(error), getattr(error, "errno", None)), time.monotonic()
        storage_log_every_s = 60.0  # per kind of failure, because many batches repeat the same failure
        if now >= self._logged_at.get(kind, -math.inf) + storage_log_every_s:
            self._logged_at[kind] = now
            reason = described(error)
            logger.error("the storage failed for batch %s; retrying every %g s: %s", job_id, STORAGE_PAUSE_S, reason)

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
        logger.info("batch %s has ended with the status %s", job.id, end.value)
        await asyncio.to_thread(shutil.rmtree, self._folder / job.id, ignore_errors=True)

    async def _room_for_files(self, job: Job, results: ResultStore) -> None:
        look = partial(shortage_of_disk, self._folder, results.num_bytes, share_of_reserve=_RESERVE_OF_FILES)
        while True:
            if not self._is_paused(job.id, await asyncio.to_thread(look)):
                return
            await asyncio.sleep(STORAGE_PAUSE_S)

    async def _delete_unknown(self, job: Job, files: Sequence[StoredFile]) -> None:
        """Delete a batch's files that are not in the catalog. A retry or another process writes new ones."""
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


_SERVER_ERROR = ItemError(
    code="server_error", message="the server failed to run this batch; see its log for the reason"
)

_STORAGE_FAILED = ItemError(code="storage_failed", message="the server cannot use its storage now; it is retrying")
