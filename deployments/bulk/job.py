"""A bulk run from a looked-through input to its summary: Ray Data reads, the pool computes, the folder keeps."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from deployments.bulk.pipeline import MAX_PREPARERS, PREPARER_CPUS, Preparation, prepared_rows
from deployments.bulk.pool import EnginePool

MAX_PASSES = 3
SYNC_EVERY_S = 1.0
LINE_EVERY_S = 10.0

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
        pool = EnginePool(self._options.served, self._backlog, on_harvest=self._harvest, on_loss=self._lose)
        clock = asyncio.create_task(self._clock())
        try:
            await _all_or_first_error([self._read(pool), *(pool.work(number) for number in range(pool.size))], clock)
        finally:
            self._ended = time.monotonic()
        self._show(self._pace.line(self._ended, len(self._folder.settled)), is_last=True)

    def summary(self) -> Summary:
        """What has come of it. Call it when every row is settled."""
        counts, recovery = self._folder.counts, self._folder.recovery
        seconds = max(self._ended - self._began, 1e-9)
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
        facts = await pool.facts()
        self._began = time.monotonic()
        model = self._options.served.engine.model
        how = Preparation(
            tokenizer_path=resolve_model_path(model.path),
            revision=model.revision,
            model_name=self._options.served.name,
            facts=facts,
            rows=self._options.rows,
            limits=self._options.limits,
        )
        trouble = ""
        for _ in range(MAX_PASSES):
            try:
                await self._read_once(pool, how)
            except ray.exceptions.RayError as error:
                trouble = str(error).strip().splitlines()[-1]
                logger.warning("reading the input broke off and begins again with what is left: %s", trouble)
            if self._num_unread == 0:
                await pool.end_of_input()
                return
        raise Failure(
            f"{self._num_unread:,} rows could not be read in {MAX_PASSES} passes over the input: has a file changed? "
            f"{trouble}"
        )

    @property
    def _num_unread(self) -> int:
        return self._found.num_rows - len(self._folder.settled) - self._backlog.num_known

    async def _read_once(self, pool: EnginePool, how: Preparation) -> None:
        batches = prepared_rows(self._found, self._folder.settled, how)
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="input") as reader:
            while (batch := await loop.run_in_executor(reader, _next_batch, batches)) is not None:
                self._folder.append(item for item in batch if isinstance(item, Record))
                self._backlog.add(item for item in batch if isinstance(item, PreparedRow))
                await pool.has_more()
                await pool.wait_for_room()

    # ------------------------------------------------------------------ the clock

    async def _clock(self) -> None:
        """Once a second what was written goes to the disk; on a terminal the line is renewed, in a log now and then."""
        lines_every_s = SYNC_EVERY_S if sys.stderr.isatty() else LINE_EVERY_S
        shown_at = time.monotonic()
        self._show("loading the model", is_last=False)
        while True:
            await asyncio.sleep(SYNC_EVERY_S)
            self._folder.sync()
            now = time.monotonic()
            if self._began and now - shown_at >= lines_every_s:
                self._show(self._pace.line(now, len(self._folder.settled)), is_last=False)
                shown_at = now

    def _show(self, line: str, *, is_last: bool) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line}", end="\n" if is_last else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def _next_batch(batches: Iterator[list[PreparedRow | Record]]) -> list[PreparedRow | Record] | None:
    return next(batches, None)


async def _all_or_first_error(parts: Sequence[Coroutine[Any, Any, None]], clock: asyncio.Task[None]) -> None:
    """Run all parts to their end; the first error of any, or of the clock, ends all and is raised."""
    tasks = [asyncio.create_task(part) for part in parts]
    everything = asyncio.gather(*tasks)
    try:
        await asyncio.wait([everything, clock], return_when=asyncio.FIRST_COMPLETED)
        if clock.done():
            clock.result()
        await everything
    finally:
        for task in (*tasks, clock):
            task.cancel()
        await asyncio.gather(*tasks, clock, return_exceptions=True)


def _join_or_start_ray(options: Options) -> None:
    """The cluster that RAY_ADDRESS names (as in a job), else one of our own. Raises InvalidSetup if it is too small."""
    replicas = options.served.replicas
    num_cpus = replicas.num_replicas * replicas.num_cpus + MAX_PREPARERS * PREPARER_CPUS
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
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    found = ray.cluster_resources().get("GPU", 0)
    if found < replicas.num_gpus:
        raise InvalidSetup(f"an engine needs {replicas.num_gpus:g} GPUs and the cluster has {found:g}; see replicas.num_gpus")
