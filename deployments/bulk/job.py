"""A bulk run from a looked-through input to its summary: Ray Data reads, the pool computes, the folder keeps."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Coroutine, Generator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import ray

from app.assembly import resolve_model_path
from app.bulk.backlog import Backlog, Loss
from app.bulk.input_files import Input
from app.bulk.output_folder import OutputFolder
from app.bulk.record import Record
from app.bulk.row_generator import Harvest
from app.bulk.rows import PreparedRow
from app.bulk.summary import Pace, Summary
from app.errors import Failure, InvalidSetup
from deployments.bulk.options import Options
from deployments.bulk.pipeline import Preparation, prepared_rows
from deployments.bulk.pool import EnginePool

MAX_FRUITLESS_PASSES = 3
SYNC_EVERY_S = 1.0
LINE_EVERY_S = 10.0
READER_PATIENCE_S = 20.0

Batch = list[PreparedRow | Record]

logger = logging.getLogger(__name__)


def answer_rows(found: Input, folder: OutputFolder, options: Options) -> Summary:
    """Give every row its record and finish the folder.

    Raises:
        InvalidSetup: the model or the cluster cannot do it.
        Failure: the output cannot be written, engines or readers die again and again.
    """
    job = BulkJob(found, folder, options)
    if len(folder.settled) < found.num_rows:
        _join_or_start_ray(options)
        try:
            asyncio.run(job.run())
        finally:
            ray.shutdown()
    summary = job.summary()
    folder.finish(asdict(summary))
    return summary


class BulkJob:
    """One run. Its parts share an event loop: the reader, the engines' callers and the clock."""

    def __init__(self, found: Input, folder: OutputFolder, options: Options) -> None:
        self._found = found
        self._folder = folder
        self._options = options
        self._backlog = Backlog(folder.settled)
        self._pace = Pace(found.num_rows)
        self._num_before = len(folder.settled)
        self._num_tokens_before = folder.counts.completion_tokens
        self._began = self._ended = 0.0

    async def run(self) -> None:
        """Returns when every row is settled. Raises as `answer_rows`."""
        pool = EnginePool(
            self._options.served,
            self._backlog,
            on_harvest=self._harvest,
            on_loss=self._lose,
            on_ready=self._begin,
        )
        workers = [pool.work(number) for number in range(pool.size)]
        try:
            await _until(pool.over(), [self._read(pool), self._clock(pool), *workers])
        finally:
            self._ended = time.monotonic()
            if sys.stderr.isatty():
                print(file=sys.stderr)

    def summary(self) -> Summary:
        """What has come of it. Call it when every row is settled."""
        counts, recovery = self._folder.counts, self._folder.recovery
        seconds = max(self._ended - (self._began or self._ended), 1e-9)  # no engine was needed: no time
        return Summary(
            rows=counts.rows,
            ok=counts.rows - counts.failed,
            failed=counts.failed,
            prompt_tokens=counts.prompt_tokens,
            completion_tokens=counts.completion_tokens,
            seconds=round(seconds, 3),
            rows_per_s=round((counts.rows - self._num_before) / seconds, 2),
            tokens_per_s=round((counts.completion_tokens - self._num_tokens_before) / seconds, 2),
            runs=recovery.runs,
            engines_lost=recovery.engines_lost,
            recomputed_rows=recovery.recomputed_rows,
        )

    # ------------------------------------------------------------------ what engines bring

    def _begin(self) -> None:
        if not self._began:
            self._began = time.monotonic()
            self._pace.begin(self._began, self._num_before)

    def _harvest(self, harvest: Harvest) -> None:
        self._folder.begun.update(harvest.begun)
        self._folder.append(harvest.records)
        self._pace.generated(harvest.num_tokens)

    def _lose(self, loss: Loss) -> None:
        self._folder.append(loss.given_up)
        recovery = self._folder.recovery
        recovery.engines_lost += 1
        recovery.recomputed_rows += loss.num_recomputed
        self._folder.save_recovery()

    # ------------------------------------------------------------------ the input

    async def _read(self, pool: EnginePool) -> None:
        """Everything that is not settled into the backlog, in further passes what a pass has left out."""
        trouble, num_fruitless = "", 0
        while num_fruitless < MAX_FRUITLESS_PASSES:
            num_before = self._num_unread
            try:
                await self._read_once(pool)
            except ray.exceptions.RayError as error:
                trouble = str(error).strip().splitlines()[-1]
                logger.warning("reading the input broke off and begins again with what is left: %s", trouble)
            if self._num_unread == 0:
                await pool.end_of_input()
                return
            num_fruitless = num_fruitless + 1 if self._num_unread == num_before else 0
        raise Failure(
            f"{self._num_unread:,} rows could not be read, however often the input was gone through: has a file "
            f"changed? {trouble}"
        )

    @property
    def _num_unread(self) -> int:
        return self._found.num_rows - len(self._folder.settled) - self._backlog.num_known

    async def _read_once(self, pool: EnginePool) -> None:
        model = self._options.served.engine.model
        how = Preparation(
            tokenizer_path=resolve_model_path(model.path),
            revision=model.revision,
            model_name=self._options.served.name,
            facts=await pool.facts(),
            rows=self._options.rows,
            limits=self._options.limits,
        )
        batches = prepared_rows(self._found, self._folder.settled, how)
        reader = BatchReader(batches)
        try:
            while (batch := await reader.next()) is not None:
                self._folder.append(item for item in batch if isinstance(item, Record))
                self._backlog.add(item for item in batch if isinstance(item, PreparedRow))
                await pool.has_changed()
                await pool.wait_for_room()
        finally:
            await reader.close()

    # ------------------------------------------------------------------ the clock

    async def _clock(self, pool: EnginePool) -> None:
        """Once a second what was written goes to the disk; on a terminal the line is renewed, in a log now and then."""
        lines_every_s = SYNC_EVERY_S if sys.stderr.isatty() else LINE_EVERY_S
        shown_at = -math.inf
        while True:
            now = time.monotonic()
            if now - shown_at >= lines_every_s:
                engines = f"{pool.num_ready} of {pool.size} engines"
                ready = f"{self._pace.line(now, len(self._folder.settled))}, {engines}" if self._began else ""
                self._show(ready or f"waiting for an engine: {engines} ready")
                shown_at = now
            await asyncio.sleep(SYNC_EVERY_S)
            self._folder.sync()

    def _show(self, line: str) -> None:
        is_terminal = sys.stderr.isatty()
        print(f"\r\x1b[K{line}" if is_terminal else line, end="" if is_terminal else "\n", file=sys.stderr, flush=True)


class BatchReader:
    """Pulls batches of rows in a thread that does not keep a job from ending."""

    def __init__(self, batches: Generator[Batch, None, None]) -> None:
        self._batches = batches
        self._loop = asyncio.get_running_loop()
        self._awaited: asyncio.Future[Batch | None] = self._loop.create_future()
        self._awaited.set_result(None)  # no thread is inside

    async def next(self) -> Batch | None:
        """The next batch; None after the last."""
        self._awaited = self._loop.create_future()
        threading.Thread(target=self._read, name="input", daemon=True).start()
        return await asyncio.shield(self._awaited)

    async def close(self) -> None:
        """Wait until the thread has come out of Ray Data, which then tidies up: a shutdown of Ray would crash it."""
        await asyncio.wait({self._awaited}, timeout=READER_PATIENCE_S)
        if self._awaited.done():
            self._awaited.exception()  # whoever waited has heard it, or is gone
            self._batches.close()

    def _read(self) -> None:
        batch, failure = None, None
        try:
            batch = next(self._batches, None)
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._settle, batch, failure)

    def _settle(self, batch: Batch | None, failure: Exception | None) -> None:
        if failure is None:
            self._awaited.set_result(batch)
        else:
            self._awaited.set_exception(failure)


async def _until(over: Coroutine[Any, Any, None], parts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run the parts side by side until `over` returns; the first error of any is raised. Then all are cancelled."""
    end = asyncio.create_task(over)
    running = {end, *map(asyncio.create_task, parts)}
    try:
        while not end.done():
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _join_or_start_ray(options: Options) -> None:
    """The cluster that RAY_ADDRESS names (as in a job), else one of our own. Raises InvalidSetup if it is too small."""
    replicas = options.served.replicas
    num_cpus = replicas.num_replicas * replicas.num_cpus
    if "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=False, logging_level="ERROR")
    else:
        ray.init(
            address="local",
            # A reservation is a number, not a core: a machine with fewer cores does it too, only slower.
            num_cpus=max(os.cpu_count() or 1, math.ceil(num_cpus)),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    found = ray.cluster_resources().get("GPU", 0)
    if found < replicas.num_gpus:
        raise InvalidSetup(
            f"an engine needs {replicas.num_gpus:g} GPUs and the cluster has {found:g}; see replicas.num_gpus"
        )
