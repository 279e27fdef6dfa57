"""Group commit: lines that end while one transaction is written share the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from app.jobs.line import LineResult


class Recorder:
    """Between the many lines in flight and the one writer."""

    def __init__(self, commit: Callable[[Sequence[LineResult]], Awaitable[None]]) -> None:
        self._commit = commit
        self._waiting: list[tuple[LineResult, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self.num_completed = 0  # lines that this process has written, and with an error
        self.num_failed = 0

    async def record(self, result: LineResult) -> None:
        """Returns once the result is on disk; raises what writing it raised."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((result, written))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        await written

    async def drained(self) -> None:
        """Returns when nothing that was given is still to be written."""
        if self._writing is not None:
            await asyncio.wait({self._writing})

    async def _write(self) -> None:
        try:
            while self._waiting:
                group, self._waiting = self._waiting, []
                await self._write_group(group)
        finally:
            self._writing = None

    async def _write_group(self, group: Sequence[tuple[LineResult, asyncio.Future[None]]]) -> None:
        failure: BaseException | None = None
        try:
            await self._commit([result for result, _ in group])
        except BaseException as error:
            failure = error
        else:
            self.num_failed += sum(result.is_error for result, _ in group)
            self.num_completed += sum(not result.is_error for result, _ in group)
        for _, written in group:
            if written.done():  # whoever waited was cancelled
                continue
            if failure is None:
                written.set_result(None)
            else:
                written.set_exception(failure)
