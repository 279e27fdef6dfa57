"""Runs one job until every item has ended. The job's input and its executor are interchangeable."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from app.errors import Failure
from app.jobs.backlog import Backlog, ItemT, Loss
from app.jobs.job import EngineOutput, InvalidItem, ItemResult
from app.jobs.results import ResultStore

RATE_WINDOW_S = 30

PieceT = TypeVar("PieceT")

# Starts a pass through the input, which yields lists of the items that have not ended. Items that cannot run are
# `InvalidItem`s. A pass may first wait for information that it needs to read the items.
Source = Callable[[], AsyncGenerator[Sequence[ItemT | InvalidItem], None]]

logger = logging.getLogger(__name__)


class ReadingBroke(Exception):
    """Raised if a pass through the input ended early. Another pass may read more."""


class JobRun(Generic[ItemT]):
    """One run of a job. The reader, the executor and the clock share one event loop."""

    def __init__(
        self,
        results: ResultStore,
        invalid: Callable[[InvalidItem], ItemResult],
        *,
        on_results: Callable[[Sequence[ItemResult]], None] = lambda _: None,
        on_tokens: Callable[[int], None] = lambda _: None,
        progress: RunProgress | None = None,
        deaths: Mapping[int, int] | None = None,
    ) -> None:
        """`results` stores new results, and `on_results` then receives them. `on_tokens` receives output token counts.

        `invalid` makes the result of an item that cannot run or will not be retried. `progress` shows a line on stderr.
        `deaths` maps an item's number to the count of earlier processes that died while computing it.
        """
        self._results = results
        self._invalid = invalid
        self._on_results = on_results
        self._on_tokens = on_tokens
        self._progress = progress
        self._appending = asyncio.Lock()  # held while a thread writes a large line
        self.backlog: Backlog[ItemT] = Backlog(results.ended, deaths)
        self._num_before = len(results.ended)
        self.began_at: float | None = None
        self.ended_at: float | None = None

    async def run(self, executor: Executor[ItemT], source: Source[ItemT]) -> None:
        """Compute all items and return once every item has ended. Errors of the executor are raised unchanged.

        Raises:
            ResultsUnwritable: the store cannot be written.
            Failure: the input cannot be read.
        """
        parts = [self._read(executor, source), self._clock(executor), *executor.parts()]
        try:
            await _until(executor.over(), parts)
            await asyncio.to_thread(self._results.sync)
        finally:
            self.ended_at = time.monotonic()
            if self._progress is not None and sys.stderr.isatty():
                print(file=sys.stderr)

    # ------------------------------------------------------------------ reports from the executor

    def ready(self) -> None:
        """Start to measure the run's time. Called by the executor once it can compute items."""
        if self.began_at is None:
            self.began_at = time.monotonic()
            if self._progress is not None:
                self._progress.begin(self.began_at, self._num_before)

    def begun(self, items: Sequence[int]) -> None:
        """Record that items have begun. Safe to repeat."""
        self._results.begun.update(items)

    async def ended(self, result: ItemResult, *, is_large: bool = False) -> None:
        """Store an item's result; with `is_large`, write it in a thread. Raises ResultsUnwritable."""
        self.begun([result.number])
        async with self._appending:
            if is_large:
                new = await asyncio.to_thread(self._results.append, [result])
            else:
                new = self._results.append([result])
        self._on_results(new)
        self._count_tokens(result.num_output_tokens)

    def generated(self, output: EngineOutput, results: Iterable[ItemResult]) -> None:
        """Store an engine's new tokens and the results of items that have ended. Raises ResultsUnwritable."""
        self.begun(output.begun)
        self._append(results)
        self._results.progress(output.token_ids)
        self._count_tokens(output.num_tokens)

    def lost(self, loss: Loss) -> None:
        """Record an engine's death, and store errors for items that will not be retried. Raises ResultsUnwritable."""
        self._append(map(self._invalid, loss.given_up))
        self._results.recovery.engines_lost += 1
        self.interrupted(loss.begun)

    def interrupted(self, items: Iterable[int]) -> None:
        """Record that items had begun when they lost their engine. They will be resumed or recomputed."""
        self._results.note_interrupted(items)

    def _append(self, results: Iterable[ItemResult]) -> None:
        self._on_results(self._results.append(results))

    def _count_tokens(self, num_tokens: int) -> None:
        self._on_tokens(num_tokens)
        if self._progress is not None:
            self._progress.generated(num_tokens)

    # ------------------------------------------------------------------ the input

    async def _read(self, executor: Executor[ItemT], source: Source[ItemT]) -> None:
        """Add all unfinished items to the backlog. If a pass ends early, further passes read the remaining items."""
        trouble, num_fruitless = "", 0
        max_fruitless_passes = 3
        while num_fruitless < max_fruitless_passes:
            num_before = self._num_unread
            try:
                await self._read_once(executor, source)
            except ReadingBroke as broke:
                trouble = str(broke)
                logger.warning("reading the input stopped early; another pass will read the rest: %s", trouble)
            if self._num_unread == 0:
                await executor.end_of_input()
                return
            num_fruitless = num_fruitless + 1 if self._num_unread == num_before else 0
        raise Failure(
            f"{self._num_unread:,} rows could not be read, although the input was read several times; check whether a "
            f"file has changed. {trouble}"
        )

    @property
    def _num_unread(self) -> int:
        return self._results.num_items - len(self._results.ended) - self.backlog.num_known

    async def _read_once(self, executor: Executor[ItemT], source: Source[ItemT]) -> None:
        async with aclosing(source()) as pieces:
            async for piece in pieces:
                invalid = [item for item in piece if isinstance(item, InvalidItem)]
                invalid += self.backlog.add(item for item in piece if not isinstance(item, InvalidItem))
                self._append(map(self._invalid, invalid))
                await executor.has_changed()
                await executor.wait_for_room()

    # ------------------------------------------------------------------ the clock

    async def _clock(self, executor: Executor[ItemT]) -> None:
        """Sync the results every second. Show progress every second on a terminal, or every 10 seconds in a log."""
        sync_every_s = 1.0
        line_every_s = 10.0
        lines_every_s = sync_every_s if sys.stderr.isatty() else line_every_s
        shown_at = -math.inf
        while True:
            now = time.monotonic()
            if self._progress is not None and now - shown_at >= lines_every_s:
                num_ended = len(self._results.ended)
                pace = self._progress.line(now, num_ended) if self.began_at else "no engine is ready yet"
                _show(f"{pace}, {executor.state}")
                shown_at = now
            await asyncio.sleep(sync_every_s)
            self._results.progress({})  # saves tokens that an earlier call skipped because of a recent write
            await asyncio.to_thread(self._results.sync)


class Executor(ABC, Generic[ItemT]):
    """Computes the items of a run, in one event loop."""

    def __init__(self, run: JobRun[ItemT]) -> None:
        self._run = run
        self._backlog: Backlog[ItemT] = run.backlog
        self._input_is_over = False
        self._changed = asyncio.Condition()

    @abstractmethod
    def parts(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return coroutines to run concurrently until the run is over. The first error in any of them ends the run."""

    @property
    def state(self) -> str:
        """A phrase about the executor's state for the progress line."""
        return ""

    @property
    @abstractmethod
    def num_wanted(self) -> int:
        """Number of items that should wait in the backlog, so that no engine waits for the input."""

    async def wait_for_room(self) -> None:
        """Wait until the backlog has fewer than `num_wanted` waiting items."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._backlog.num_waiting < self.num_wanted)

    async def has_changed(self) -> None:
        """Wake all waiting parts. Call this after items were added or taken."""
        async with self._changed:
            self._changed.notify_all()

    async def end_of_input(self) -> None:
        """Record that no more items will be added, and wake all waiting parts."""
        self._input_is_over = True
        await self.has_changed()

    async def over(self) -> None:
        """Wait until the run is over: by default, until the input is over and no item waits or is in progress."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_over)

    @property
    def _is_over(self) -> bool:
        return self._input_is_over and self._backlog.is_empty


class RecentRate:
    """The rate of events over the last `window_s` seconds, with a resolution of one second. Does not read a clock."""

    def __init__(self, window_s: int, *, began_at: float) -> None:
        """`began_at` is the time when counting began. All times are seconds of the caller's clock."""
        self._window_s = window_s
        self._began_at = began_at
        self._seconds: deque[tuple[int, int]] = deque(maxlen=window_s)  # (second, number)

    def add(self, number: int, *, at: float) -> None:
        """Count `number` events at the time `at`."""
        second = int(at)
        if self._seconds and self._seconds[-1][0] == second:
            number += self._seconds.pop()[1]
        self._seconds.append((second, number))

    def per_second(self, now: float) -> float:
        """Return the rate over the window, or since counting began if the window is longer."""
        counted_s = min(max(now - self._began_at, 1.0), self._window_s)
        return sum(number for second, number in self._seconds if second > now - self._window_s) / counted_s


class RunProgress:
    """The speed of a run over the last half minute, and the estimated time until it is done."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._num_tokens = 0  # tokens since the last line
        self.begin(0.0, 0)

    def begin(self, now: float, num_ended: int) -> None:
        """Start to measure the speed at `now`."""
        self._num_ended = num_ended  # items that had ended at the last line
        self._rows, self._tokens = (RecentRate(RATE_WINDOW_S, began_at=now) for _ in range(2))

    def generated(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens

    def line(self, now: float, num_ended: int) -> str:
        """Return the next progress line. Speeds cover the events since earlier calls, so call this regularly."""
        self._rows.add(num_ended - self._num_ended, at=now)
        self._tokens.add(self._num_tokens, at=now)
        self._num_ended, self._num_tokens = num_ended, 0
        rows_per_s, tokens_per_s = self._rows.per_second(now), self._tokens.per_second(now)
        left = self._num_rows - num_ended
        eta = f"{_duration(left / rows_per_s)} left" if rows_per_s > 0 else "speed not known yet"
        share = num_ended / self._num_rows
        return (
            f"{num_ended:,} of {self._num_rows:,} rows ({share:.0%}), "
            f"{rows_per_s:,.1f} rows/s, {tokens_per_s:,.0f} tokens/s, {eta}"
        )


async def read_in_thread(pieces: Generator[PieceT, None, None]) -> AsyncGenerator[PieceT, None]:
    """Run a blocking generator in a daemon thread and yield its pieces.

    One thread reads all pieces, because each new thread may use another arena of the allocator, and every arena grows
    to the size of the largest pieces. Close this generator if you stop early. Closing waits up to 20 s until the thread
    has left the blocking generator, because shutting down Ray while the thread is inside would crash the process.
    """
    loop = asyncio.get_running_loop()
    is_asked: SimpleQueue[asyncio.Future[PieceT | None] | None] = SimpleQueue()  # None ends the thread

    def settle(asked: asyncio.Future[PieceT | None], piece: PieceT | None, failure: Exception | None) -> None:
        if asked.cancelled():
            return
        if failure is None:
            asked.set_result(piece)
        else:
            asked.set_exception(failure)

    def read() -> None:
        while (asked := is_asked.get()) is not None:
            piece, failure = None, None
            try:
                piece = next(pieces, None)
            except Exception as error:
                failure = error
            with suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(settle, asked, piece, failure)

    threading.Thread(target=read, name="input", daemon=True).start()
    asked: asyncio.Future[PieceT | None] = loop.create_future()
    asked.set_result(None)  # the thread is not in the generator yet
    reader_patience_s = 20.0
    try:
        while True:
            asked = loop.create_future()
            is_asked.put(asked)
            piece = await asyncio.shield(asked)
            if piece is None:
                return
            yield piece
    finally:
        is_asked.put(None)
        await asyncio.wait({asked}, timeout=reader_patience_s)
        if asked.done():
            asked.exception()  # marks the error as retrieved: it was raised above, or nobody will read it
            pieces.close()


def _show(line: str) -> None:
    is_terminal = sys.stderr.isatty()
    print(f"\r\x1b[K{line}" if is_terminal else line, end="" if is_terminal else "\n", file=sys.stderr, flush=True)


async def _until(over: Coroutine[Any, Any, None], parts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run the parts concurrently until `over` returns or a part fails, then cancel the rest. Raises the first error."""
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


def _duration(seconds: float) -> str:
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"
