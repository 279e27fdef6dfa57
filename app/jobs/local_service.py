"""The batch service on a local folder. It owns the folder's lock, the catalog, the runner and unfinished uploads."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from app.batches import (
    AnswerPart,
    BatchLimits,
    BatchService,
    JobState,
    NewBatch,
    NewFile,
    NewResponse,
    PageOf,
    PrepareStoredAnswer,
    list_object,
)
from app.config import BatchesConfig
from app.disk import STORAGE_FAILURES, OneThread, may_pass, take_lock
from app.errors import (
    BodyTooLarge,
    InvalidRequest,
    NotFound,
    Overloaded,
    StorageFull,
    Unavailable,
    described,
    traceback_of,
)
from app.jobs.answer_log import Take
from app.jobs.batch_runner import BatchRunner
from app.jobs.catalog import Catalog, Superseded
from app.jobs.executors import FleetExecution
from app.jobs.files import FileDraft, FileStore
from app.jobs.job import INPUT_PURPOSE, Job, StoredFile, batch_object, counted, file_object, new_job_id, stats_object
from app.jobs.space import MIN_CHARGED_BYTES, RESERVE_OF_WORK, room_left, shortage_of_disk, shortage_of_share
from app.jobs.stored_responses import StoredResponses
from app.json_pieces import Json
from app.usage import UsageAnswer, UsageQuery, UsageReport
from app.usage.records import UsageRows, day_of
from app.usage.shares import Shares
from app.webhooks.client import WebhookClient
from app.webhooks.dispatcher import RetrySchedule, WebhookDispatcher
from app.webhooks.receiver import WebhookReceiver

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

LOCK_RETRY_S = 0.5
OPENING_RETRY_S = 5.0  # the pause after a storage failure while the folder is being opened
HOUSEKEEPING_S = 60.0
GENERATION_CHECK_S = 1.0  # how long a process may still compute items after it has lost the folder
UPLOAD_TIMEOUT_S = 600.0  # how long an upload may wait for its next piece
RETRY_AFTER_S = 5.0
LOCK = "lock"  # the name of the lock file in `path`


@dataclass(slots=True, eq=False)
class _Upload:
    owner: str
    draft: FileDraft
    touched_at: float


@dataclass(frozen=True, slots=True)
class _Open:
    """The parts that exist while this process holds the folder."""

    catalog: Catalog
    files: FileStore
    runner: BatchRunner
    dispatcher: WebhookDispatcher
    responses: StoredResponses


class LocalBatchService(BatchService):
    """A `BatchService` on a folder that one process at a time holds. In other processes, calls raise Unavailable."""

    def __init__(
        self,
        path: Path,
        config: BatchesConfig,
        execution: FleetExecution,
        answer: PrepareStoredAnswer,
        *,
        clock: Callable[[], float] = time.time,
        limits: BatchLimits = BatchLimits(),  # noqa: B008 - frozen
        client: WebhookClient | None = None,
        retries: RetrySchedule = RetrySchedule(),  # noqa: B008 - frozen
    ) -> None:
        """`path` is the folder; it is created if missing. `clock` returns seconds since 1970.

        `execution` computes batch items, and `answer` computes stored responses. `client` sends webhooks; by default,
        it is created from `config`. `retries` determines when failed webhooks are sent again.
        """
        self._path = path
        self._config = config
        self._execution = execution
        self._answer = answer
        self._limits = limits
        self._retries = retries
        self._clock = clock
        self._client = client or WebhookClient(config.webhooks.allowed_networks)
        self._thread = OneThread()
        self._open: _Open | None = None
        self._uploads: dict[str, _Upload] = {}
        self._finishing: set[_Upload] = set()  # uploads that are being added to the catalog
        self._admission = asyncio.Lock()  # held from checking a limit until the new upload or batch is counted
        self._begun: set[asyncio.Task[Any]] = set()  # tasks that finish even if their caller is cancelled
        self._shares = Shares(time.monotonic)
        self._life: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()

    async def __aenter__(self) -> LocalBatchService:
        """Start the service and wait until this process holds the folder."""
        self.start()
        await self.opened()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def start(self) -> None:
        """Start a task that opens the folder once it is free, and resumes its work. Requires a running event loop."""
        self._life = asyncio.create_task(self._live())

    async def opened(self) -> None:
        """Wait until this process holds the folder and has resumed its work. Raises the error if that fails."""
        assert self._life is not None, "it was started"
        opening = asyncio.create_task(self._opened.wait())
        try:
            await asyncio.wait({opening, self._life}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            opening.cancel()
        self.check_health()

    def check_health(self) -> None:
        """Raise the error that stopped the service, if any."""
        if self._life is not None and self._life.done():
            self._life.result()

    async def counts(self) -> dict[str, int]:
        """Return counts of work since this process opened the folder, and of pending webhooks and paused batches."""
        opened = self._open
        if opened is None:
            return {}
        runner, dispatcher = opened.runner, opened.dispatcher
        return {
            "num_lines_completed": runner.num_completed,
            "num_lines_failed": runner.num_failed,
            "num_webhook_attempts": dispatcher.num_attempts,
            "num_webhooks_delivered": dispatcher.num_delivered,
            "num_webhooks_given_up": dispatcher.num_given_up,
            "num_webhooks_pending": await self._thread.run(opened.catalog.outbox.num_pending),
            "num_paused": runner.num_paused,
        }

    async def close(self) -> None:
        """Stop all work. Unfinished batches resume when the folder is opened again."""
        if self._life is not None:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)
        self._client.close()
        self._thread.close()

    async def _live(self) -> None:
        await self._thread.run(partial(self._path.mkdir, mode=0o700, parents=True, exist_ok=True))
        lock = take_lock(self._path / LOCK)
        if lock is None:
            logger.warning("another process is using the batches folder %s; waiting for its lock", self._path)
        while lock is None:  # poll, because the system does not notify when another process releases the lock
            await asyncio.sleep(LOCK_RETRY_S)
            lock = take_lock(self._path / LOCK)
        try:
            while not self._opened.is_set():
                try:
                    await self._hold()
                except STORAGE_FAILURES as error:
                    if self._opened.is_set() or not may_pass(error):
                        raise
                    logger.error("the batches folder %s cannot be opened: %s; retrying", self._path, error)
                    await asyncio.sleep(OPENING_RETRY_S)
        finally:
            os.close(lock)

    async def _hold(self) -> None:
        config, thread = self._config, self._thread
        catalog, files = await thread.run(_open_folder, self._path)
        dispatcher = WebhookDispatcher(
            catalog.outbox, thread, self._client, config.webhooks, self._retries, self._clock, random.Random()
        )
        results_folder = "jobs"  # holds a `ResultStore` for each batch that has not ended
        results = self._path / results_folder
        runner = BatchRunner(
            catalog, files, results, thread, self._execution, self._limits, config, self._clock, dispatcher.wake
        )
        responses = StoredResponses(
            self._path / "responses", catalog, thread, self._answer,
            admit=self._admit_response, shortage=self._shortage_for_response,
            clock=self._clock, keep_s=config.keep_s, wait_s=self._limits.window_s,
        )  # fmt: skip
        try:
            unfinished = await runner.sweep()
            for job in unfinished:
                logger.info("batch %s resumes: %s", job.id, job.status.value)
            await runner.resume(unfinished)
            await responses.resume()
            self._open = opened = _Open(catalog, files, runner, dispatcher, responses)
            self._opened.set()
            async with asyncio.TaskGroup() as group:
                group.create_task(dispatcher.work())
                group.create_task(self._stop_when_superseded(catalog))
                while True:
                    await self._clean_up(opened)
                    await asyncio.sleep(HOUSEKEEPING_S)
        finally:
            self._open = None
            await responses.close()
            await runner.close()
            await asyncio.gather(*self._begun, return_exceptions=True)
            for upload in self._uploads.values():
                upload.draft.abandon()
            self._uploads.clear()
            await thread.run(catalog.close)

    async def _stop_when_superseded(self, catalog: Catalog) -> None:
        """Raise Superseded once another process opens the folder. A process may lose its lock without noticing."""
        while True:
            await asyncio.sleep(GENERATION_CHECK_S)
            try:
                await self._thread.run(catalog.check_generation)
            except Superseded:
                logger.error("another process has taken over the batches folder %s; this process stops", self._path)
                raise
            except STORAGE_FAILURES as error:
                logger.error("the generation of the batches folder could not be read: %s", described(error))

    async def _clean_up(self, opened: _Open) -> None:
        """Remove expired files and responses, abandoned uploads, batches that ended long ago, and old usage."""
        late = time.monotonic() - UPLOAD_TIMEOUT_S
        batch_kept_s = 30 * 86_400.0  # counted from a batch's end; also the default for files
        usage_kept_s = 400 * 86_400.0  # a year and a month, so that a month can be compared with the one a year earlier
        try:
            for upload_id in [key for key, upload in self._uploads.items() if upload.touched_at < late]:
                await self._thread.run(self._uploads.pop(upload_id).draft.abandon)
            for file_id in await self._thread.run(opened.catalog.expired_file_ids, self._clock()):
                await self._thread.run(opened.catalog.remove_file, file_id)
                await self._delete_content(opened, file_id)
            await self._thread.run(opened.catalog.forget_ended, self._clock() - batch_kept_s)
            await self._thread.run(opened.catalog.ledger.forget, day_of(self._clock() - usage_kept_s))
            await opened.responses.remove_expired()
        except STORAGE_FAILURES as error:
            logger.error("expired files and uploads could not be removed: %s", described(error))

    # Files

    async def begin_upload(self, owner: str) -> str:
        return await self._shielded(self._begin_upload(self._opened_now(), owner))

    async def _begin_upload(self, opened: _Open, owner: str) -> str:
        max_uploads = 64
        async with self._admission:
            uploads = Counter(upload.owner for upload in self._unfinished_uploads())
            self._check_room("uploads are in progress", max_uploads, uploads, owner)
            draft = await self._run(_begin_draft, self._path, opened.files)
            self._uploads[draft.id] = _Upload(owner, draft, time.monotonic())
            return draft.id

    async def append(self, upload_id: str, data: bytes) -> None:
        upload = self._upload(upload_id)
        upload.touched_at = time.monotonic()
        if upload.draft.num_bytes + len(data) > self._limits.max_file_bytes:
            most = f"{self._limits.max_file_bytes:,}"
            raise BodyTooLarge(f"the file has more than {most} bytes, the maximum on this server")
        self._check_share(upload.owner, len(data))
        await self._run(_write, self._path, upload.draft, data)

    async def finish_upload(self, upload_id: str, new: NewFile) -> Json:
        upload = self._upload(upload_id)
        opened = self._opened_now()
        self._check_share(upload.owner, max(0, MIN_CHARGED_BYTES - upload.draft.num_bytes))
        keep_s = new.expires_after_s or self._config.keep_s
        file = upload.draft.described(upload.owner, new.filename, new.purpose, self._now(), keep_s)
        del self._uploads[upload_id]
        await self._translated(self._shielded(self._finish(opened, upload, file)))
        return file_object(file)

    async def _finish(self, opened: _Open, upload: _Upload, file: StoredFile) -> None:
        self._finishing.add(upload)
        try:
            await self._keep(opened, upload.draft, file)
        finally:
            self._finishing.discard(upload)

    async def _keep(self, opened: _Open, draft: FileDraft, file: StoredFile) -> None:
        """Store a file and add it to the catalog. The slow sync does not block the catalog's thread."""
        try:
            await asyncio.to_thread(draft.keep)
        except STORAGE_FAILURES:
            await asyncio.to_thread(draft.abandon)
            raise
        try:
            await self._thread.run(opened.catalog.add_file, file)
        except STORAGE_FAILURES:
            await self._delete_content(opened, file.id)
            raise

    async def _delete_content(self, opened: _Open, file_id: str) -> None:
        """Delete the content of a file that is not in the catalog. If this fails, it is retried at the next startup."""
        try:
            await asyncio.to_thread(opened.files.delete, file_id)
        except OSError as error:
            logger.error("the content of %s could not be deleted: %s", file_id, described(error))

    async def abandon_upload(self, upload_id: str) -> None:
        upload = self._uploads.pop(upload_id, None)
        if upload is not None:
            await self._run(upload.draft.abandon)

    async def file(self, owner: str, file_id: str) -> Json:
        return file_object(await self._file(owner, file_id))

    async def files(self, page: PageOf) -> Json:
        opened = self._opened_now()
        files = await self._run(opened.catalog.files, page, self._clock())
        return list_object([file_object(file) for file in files], page)

    async def read(self, owner: str, file_id: str, offset: int, max_bytes: int) -> bytes:
        if offset >= (await self._file(owner, file_id)).bytes:
            return b""
        return await self._translated(asyncio.to_thread(_read, self._opened_now().files, file_id, offset, max_bytes))

    async def delete_file(self, owner: str, file_id: str) -> Json:
        await self._file(owner, file_id)
        await self._shielded(self._delete(self._opened_now(), file_id))
        return {"id": file_id, "object": "file", "deleted": True}

    async def _delete(self, opened: _Open, file_id: str) -> None:
        # Change the catalog first. After a crash between the two steps, the content is deleted at the next startup.
        await self._run(opened.catalog.remove_unread_file, file_id)
        await self._delete_content(opened, file_id)

    # Batches

    async def create_batch(self, new: NewBatch) -> Json:
        opened = self._opened_now()
        if new.webhook is not None:
            self._client.check(new.webhook)
        has_message = new.webhook is not None or self._config.webhooks.url is not None
        now = self._now()
        job = Job(
            id=new_job_id(),
            owner=new.owner,
            endpoint=new.endpoint,
            input_file_id=new.input_file_id,
            status=JobState.VALIDATING,
            created_at=now,
            expires_at=now + self._limits.window_s,
            metadata=None if new.metadata is None else dict(new.metadata),
            output_expires_after_s=new.output_expires_after_s,
        )
        await self._shielded(self._begin_batch(opened, job, has_message, new.webhook))
        return await self.batch(new.owner, job.id)

    async def _begin_batch(self, opened: _Open, job: Job, has_message: bool, receiver: WebhookReceiver | None) -> None:
        async with self._admission:
            runner = opened.runner
            self._check_share(job.owner, 1)
            self._check_room("batches are unfinished", self._limits.max_batches, runner.num_batches, job.owner)
            await self._run(_check_disk, self._path)
            await self._run(_add_job, opened.catalog, job, has_message, receiver, self._clock())
            runner.start(job)

    async def batch(self, owner: str, batch_id: str) -> Json:
        catalog = self._opened_now().catalog
        [shown] = await self._shown([await self._run(catalog.job, batch_id, owner)])
        return shown

    async def batches(self, page: PageOf) -> Json:
        return list_object(await self._shown(await self._run(self._opened_now().catalog.jobs, page)), page)

    async def cancel_batch(self, owner: str, batch_id: str) -> Json:
        opened = self._opened_now()
        job = await self._shielded(self._cancel(opened, owner, batch_id))
        [shown] = await self._shown([job])
        return shown

    async def _cancel(self, opened: _Open, owner: str, batch_id: str) -> Job:
        job = await self._run(_cancel, opened.catalog, owner, batch_id, self._now())
        if job.status not in (JobState.CANCELLING, JobState.CANCELLED):
            raise InvalidRequest(f"the batch is {job.status.value}; only unfinished batches can be cancelled")
        opened.runner.stop(batch_id)
        return job

    # Responses

    async def create_response(self, new: NewResponse) -> None:
        await self._translated(self._opened_now().responses.create(new))

    async def follow_response(
        self,
        owner: str,
        response_id: str,
        offset: int = 0,
        *,
        waits: bool = True,
        is_continued: bool = False,
        take: Take | None = None,
    ) -> AsyncGenerator[AnswerPart, None]:
        """See `BatchService`. `take` receives the bytes of a growing answer as described in `AnswerLog.parts`."""
        follow = self._opened_now().responses.follow
        try:
            async with aclosing(
                await follow(owner, response_id, offset, waits=waits, is_continued=is_continued, take=take)
            ) as parts:
                async for part in parts:
                    yield part
        except STORAGE_FAILURES as error:
            raise _unusable(error) from None

    async def cancel_response(self, owner: str, response_id: str) -> None:
        await self._translated(self._shielded(self._opened_now().responses.cancel(owner, response_id)))

    async def delete_response(self, owner: str, response_id: str) -> None:
        await self._translated(self._shielded(self._opened_now().responses.delete(owner, response_id)))

    async def _admit_response(self, owner: str, num_bytes: int, running: Callable[[], Counter[str]]) -> None:
        self._check_share(owner, max(num_bytes, MIN_CHARGED_BYTES))
        await self._run(_check_disk, self._path)
        self._check_room("responses are unfinished", self._limits.max_responses, running(), owner)

    async def _shortage_for_response(self, owner: str) -> str | None:
        if self._open is None:  # the folder is being opened
            return None
        self._check_share(owner, 0)
        try:
            return await asyncio.to_thread(shortage_of_disk, self._path, share_of_reserve=RESERVE_OF_WORK)
        except OSError:  # the next write reports the error
            return None

    async def stats(self, owner: str) -> Json:
        opened = self._opened_now()
        ended = await self._run(opened.catalog.ended_counts, owner)
        unfinished = [job for job in await self._run(opened.catalog.unfinished) if job.owner == owner]
        runner = opened.runner
        counts = [*ended, *((_with_current_counts(job, runner), 1) for job in unfinished)]
        return stats_object(counts, self._execution.slots.num_held(owner), runner.tokens_per_s(owner))

    # Usage

    async def report_usage(self, report: UsageReport) -> UsageAnswer:
        answer = await self._run(self._opened_now().catalog.ledger.add, report, day_of(self._clock()))
        return self._shares.answer(report, answer)

    async def usage(self, query: UsageQuery) -> UsageRows:
        return await self._run(self._opened_now().catalog.ledger.usage, query)

    async def _shown(self, jobs: Sequence[Job]) -> list[Json]:
        opened = self._opened_now()
        messages = await self._run(opened.catalog.outbox.shown, [job.id for job in jobs])
        shown = []
        for job in jobs:
            pause = opened.runner.pause(job.id)
            paused = None if pause is None else {"code": pause.code, "message": pause.message}
            now = batch_object(_with_current_counts(job, opened.runner))
            shown.append(now | {"paused": paused, "webhook": messages.get(job.id)})
        return shown

    def _opened_now(self) -> _Open:
        if self._open is None:
            raise Unavailable("files and batches are being opened, or another process is using them; try again")
        return self._open

    def _upload(self, upload_id: str) -> _Upload:
        upload = self._uploads.get(upload_id)
        if upload is None:
            raise Unavailable("the upload has ended or timed out; send the file again")
        return upload

    def _check_room(self, what: str, total: int, used: Counter[str], owner: str) -> None:
        if room_left(total, used, owner) >= 1:
            return
        share = f", {used[owner]} of them from this key, and a key must leave as many free as it uses" if owner else ""
        raise Overloaded(
            f"{used.total()} of at most {total} {what}{share}; try again later", retry_after_s=RETRY_AFTER_S
        )

    def _unfinished_uploads(self) -> list[_Upload]:
        return [*self._uploads.values(), *self._finishing]

    def _check_share(self, owner: str, num_bytes: int) -> None:
        opened = self._opened_now()
        used = opened.runner.stored_bytes() + opened.responses.growing_bytes()
        for upload in self._unfinished_uploads():
            used[upload.owner] += upload.draft.num_bytes
        shortage = shortage_of_share(self._config.max_total_bytes, used, owner, num_bytes)
        if shortage is not None:
            raise InvalidRequest(shortage, code="storage_full")

    async def _file(self, owner: str, file_id: str) -> StoredFile:
        return await self._run(self._opened_now().catalog.file, owner, file_id, self._clock())

    async def _run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._translated(self._thread.run(function, *args, **kwargs))

    async def _shielded(self, steps: Coroutine[Any, Any, T]) -> T:
        """Run the steps in a task and return their result. Cancelling the caller does not interrupt them."""
        task = asyncio.create_task(steps)
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)
        return await asyncio.shield(task)

    async def _translated(self, call: Awaitable[T]) -> T:
        """Await the call. Converts storage errors into an error that clients may see."""
        try:
            return await call
        except STORAGE_FAILURES as error:
            raise _unusable(error) from None

    def _now(self) -> int:
        return int(self._clock())


def _unusable(error: Exception) -> Unavailable:
    logger.error("the storage of files and batches failed: %s", traceback_of(error))
    return Unavailable("the server cannot use its storage now (see its log for the reason); try again")


# Most of these functions run in the catalog's thread, where no other call interrupts them.


def _open_folder(path: Path) -> tuple[Catalog, FileStore]:
    files = FileStore(path)
    catalog = Catalog(path)
    files.sweep(catalog.file_ids)
    return catalog, files


def _check_disk(path: Path, num_bytes: int = 0) -> None:
    shortage = shortage_of_disk(path, num_bytes)
    if shortage is not None:
        raise StorageFull(f"{shortage}; try again later", retry_after_s=RETRY_AFTER_S)


def _begin_draft(path: Path, files: FileStore) -> FileDraft:
    _check_disk(path)
    return files.draft()


def _write(path: Path, draft: FileDraft, data: bytes) -> None:
    _check_disk(path, len(data))
    draft.write(data)


def _add_job(catalog: Catalog, job: Job, has_message: bool, receiver: WebhookReceiver | None, now: float) -> None:
    file = catalog.file(job.owner, job.input_file_id, now)
    if file.purpose != INPUT_PURPOSE:
        raise InvalidRequest(
            f"the file's purpose is {file.purpose!r}; batches require files with the purpose {INPUT_PURPOSE!r}",
            param="input_file_id",
        )
    catalog.add_job(job, has_message=has_message, receiver=receiver)


def _cancel(catalog: Catalog, owner: str, batch_id: str, now: int) -> Job:
    job = catalog.job(batch_id, owner)
    if job.status in (JobState.VALIDATING, JobState.IN_PROGRESS):
        return catalog.change_job(batch_id, job.status, status=JobState.CANCELLING, cancelling_at=now)
    return job


def _with_current_counts(job: Job, runner: BatchRunner) -> Job:
    counts = None if job.status.has_ended else runner.counts(job.id)
    return job if counts is None else replace(job, **counted(counts))


def _read(files: FileStore, file_id: str, offset: int, max_bytes: int) -> bytes:
    try:
        return files.read(file_id, offset, max_bytes)
    except FileNotFoundError:
        raise NotFound(f"the file {file_id!r} no longer exists", code="file_not_found") from None
