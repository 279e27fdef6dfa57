"""A bulk run from a looked-through input to its summary, whoever reads the rows and whoever computes them."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import asdict
from typing import Any, Generic

from app.errors import Failure
from app.jobs.backlog import Backlog, Loss, RowT
from app.jobs.engine_worker import Harvest
from app.jobs.piece_reader import BatchReader
from app.jobs.progress import Pace, Summary
from app.jobs.record import Record
from app.jobs.results import OutputFolder
from app.jobs.workers import Workers

MAX_FRUITLESS_PASSES = 3
SYNC_EVERY_S = 1.0
LINE_EVERY_S = 10.0

# A pass through the input: batches of all rows that are not settled. May wait until it knows how to read them.
Source = Callable[[], Awaitable[Generator[list[RowT | Record], None, None]]]

logger = logging.getLogger(__name__)


class ReadingBroke(Exception):
    """A pass through the input has ended before its time, and another may get further."""


class BulkJob(Generic[RowT]):
    """One run. Its parts share an event loop: the reader, whoever computes, and the clock."""

    def __init__(self, folder: OutputFolder) -> None:
        self._folder = folder
        self.backlog: Backlog[RowT] = Backlog(folder.settled)
        self._pace = Pace(folder.num_rows)
        self._num_before = len(folder.settled)
        self._num_tokens_before = folder.counts.completion_tokens
        self._began = self._ended = 0.0

    async def run(self, workers: Workers[RowT], source: Source[RowT]) -> None:
        """Returns when every row is settled; `workers` take from `backlog` and report to this job.

        Raises:
            Failure: the output cannot be written, the input not be read; and what `workers` raise.
        """
        try:
            await _until(workers.over(), [self._read(workers, source), self._clock(workers), *workers.parts()])
        finally:
            self._ended = time.monotonic()
            if sys.stderr.isatty():
                print(file=sys.stderr)

    def finish(self) -> Summary:
        """Every row is settled: what has come of it, told to the folder too. Raises Failure."""
        summary = self._summary()
        self._folder.finish(asdict(summary))
        return summary

    def _summary(self) -> Summary:
        counts, recovery = self._folder.counts, self._folder.recovery
        seconds = max(self._ended - (self._began or self._ended), 1e-9)  # nothing was computed: no time
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
            continued_rows=recovery.continued_rows,
            recomputed_rows=recovery.recomputed_rows,
        )

    # ------------------------------------------------------------------ what comes of rows

    def ready(self) -> None:
        """See `Account`."""
        if not self._began:
            self._began = time.monotonic()
            self._pace.begin(self._began, self._num_before)

    def begun(self, rows: Sequence[int]) -> None:
        """See `Account`."""
        self._folder.begun.update(rows)

    def book(self, harvest: Harvest) -> None:
        """See `Account`."""
        self.begun(harvest.begun)
        self._folder.append(harvest.records)
        self._folder.progress(harvest.token_ids)
        self._pace.generated(harvest.num_tokens)

    def lost(self, loss: Loss) -> None:
        """See `Account`."""
        self._folder.append(loss.given_up)
        self._folder.recovery.engines_lost += 1
        self.interrupted(loss.begun)

    def interrupted(self, rows: Sequence[int]) -> None:
        """See `Account`."""
        self._folder.note_interrupted(rows)

    # ------------------------------------------------------------------ the input

    async def _read(self, workers: Workers[RowT], source: Source[RowT]) -> None:
        """Everything that is not settled into the backlog, in further passes what a pass has left out."""
        trouble, num_fruitless = "", 0
        while num_fruitless < MAX_FRUITLESS_PASSES:
            num_before = self._num_unread
            try:
                await self._read_once(workers, source)
            except ReadingBroke as broke:
                trouble = str(broke)
                logger.warning("reading the input broke off and begins again with what is left: %s", trouble)
            if self._num_unread == 0:
                await workers.end_of_input()
                return
            num_fruitless = num_fruitless + 1 if self._num_unread == num_before else 0
        raise Failure(
            f"{self._num_unread:,} rows could not be read, however often the input was gone through: has a file "
            f"changed? {trouble}"
        )

    @property
    def _num_unread(self) -> int:
        return self._folder.num_rows - len(self._folder.settled) - self.backlog.num_known

    async def _read_once(self, workers: Workers[RowT], source: Source[RowT]) -> None:
        reader = BatchReader(await source())
        try:
            while (batch := await reader.next()) is not None:
                self._folder.append(item for item in batch if isinstance(item, Record))
                self.backlog.add(item for item in batch if not isinstance(item, Record))
                await workers.has_changed()
                await workers.wait_for_room()
        finally:
            await reader.close()

    # ------------------------------------------------------------------ the clock

    async def _clock(self, workers: Workers[RowT]) -> None:
        """Once a second what was written goes to the disk; on a terminal the line is renewed, in a log now and then."""
        lines_every_s = SYNC_EVERY_S if sys.stderr.isatty() else LINE_EVERY_S
        shown_at = -math.inf
        while True:
            now = time.monotonic()
            if now - shown_at >= lines_every_s:
                pace = self._pace.line(now, len(self._folder.settled)) if self._began else "nothing is computed yet"
                _show(f"{pace}, {workers.state}")
                shown_at = now
            await asyncio.sleep(SYNC_EVERY_S)
            self._folder.sync()


def _show(line: str) -> None:
    is_terminal = sys.stderr.isatty()
    print(f"\r\x1b[K{line}" if is_terminal else line, end="" if is_terminal else "\n", file=sys.stderr, flush=True)


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
