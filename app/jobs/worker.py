"""The seam to whoever works a batch off as a whole: all its lines at once, somewhere else, for a long time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from app.jobs.catalog import Store
from app.jobs.items import InputRules, OpenFile, read_lines
from app.jobs.job import Batch, LineError
from app.jobs.line import InputLine, LineResult
from app.jobs.one_thread import OneThread

_LINES_AT_ONCE = 16  # a thread is asked for so many; each may have megabytes


class BatchWorker(Protocol):
    """Works batches off. Whatever has been begun is found again after a crash, by what `work` keeps."""

    endpoints: Sequence[str]  # whose lines it can answer

    def num_in_flight(self, owner: str) -> int:
        """Lines of this owner that are with somebody who computes them."""

    async def work_off(self, work: BatchWork) -> None:
        """Return when every line has ended. Cancelled, it leaves what it has begun as it is."""

    async def stop(self, work: BatchWork) -> None:
        """End what was begun for a batch that is about to end, and book what has come of it. Takes no long time."""

    async def forget(self, batch_id: str) -> None:
        """The batch has ended: nothing of it is needed any more."""

    async def sweep(self, unfinished: Sequence[str]) -> None:
        """Remove what is left of batches that are none of these. For use before any work."""


class BatchWork:
    """A batch as its worker sees it: the lines that have not ended, and where their ends are booked."""

    def __init__(
        self,
        batch: Batch,
        open_file: OpenFile,
        rules: InputRules,
        store: Store,
        thread: OneThread,
        on_end: Callable[[LineResult], None],
    ) -> None:
        """`store` is used in `thread` only; `on_end` hears of each line's end once it is on disk."""
        self.batch = batch
        self._open_file = open_file
        self._rules = rules
        self._store = store
        self._thread = thread
        self._on_end = on_end

    async def ended(self) -> set[int]:
        """The numbers of the lines that have ended."""
        return await self._thread.run(self._store.ended_lines, self.batch.id)

    async def lines(self, ended: set[int]) -> AsyncGenerator[list[InputLine], None]:
        """The lines whose numbers are not among `ended`, in order, some at a time. Close it when you stop early."""
        reader = OneThread()
        lines = read_lines(self._open_file, self._rules)
        try:
            while some := await reader.run(_some, lines):
                yield [line for line in some if line.number not in ended]
        finally:
            await reader.run(lines.close)
            reader.close()

    async def end(self, results: Sequence[LineResult]) -> None:
        """Book the ends of lines; what has ended already stays as it was."""
        if results:
            await self._thread.run(self._store.record, results)
        for result in results:
            self._on_end(result)

    async def job_id(self) -> str | None:
        """What `keep_job_id` was told last, over all crashes."""
        return await self._thread.run(self._store.job_id, self.batch.id)

    async def keep_job_id(self, job_id: str) -> None:
        """On disk when this returns."""
        await self._thread.run(self._store.keep_job_id, self.batch.id, job_id)


def _some(lines: Iterator[InputLine | LineError]) -> list[InputLine]:
    some = []
    for line in islice(lines, _LINES_AT_ONCE):
        assert isinstance(line, InputLine), "a batch in progress has a valid input file"
        some.append(line)
    return some
