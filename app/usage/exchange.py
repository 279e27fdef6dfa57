"""Reports a process's usage and limits to the owner of the ledger every second, and applies the owner's answers."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

from app.errors import Unavailable, described
from app.usage.counter import UsageCounter
from app.usage.journal import DeadJournal, UsageJournal, processes, remains
from app.usage.records import Limits, Owner, UsageAnswer, UsageReport
from app.usage.shares import LEASE_S

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
HURRY_S = 0.1  # minimum time between two reports when one is requested early
PERIODS_BETWEEN_SCANS = 5  # number of periods between two searches for journals of dead processes
SILENCE_S = 5.0  # once the owner has been silent for this long, no more allowance is expected from other processes
_TIMEOUT_S = 5.0


class UsageReporter:
    """Builds one process's reports and applies the answers. Reports omit unchanged keys, so idle keys cost nothing."""

    def __init__(self, counter: UsageCounter, limits: Limits, *, clock: Callable[[], float]) -> None:
        self._counter = counter
        self._limits = limits
        self._clock = clock
        self._answered_at = clock()
        self._num_processes = 0
        self._reports_all = True  # whether the owner's values for this process may be outdated
        self._day = ""  # the day of the last report

    def report(self, *, with_usage: bool = True) -> UsageReport:
        """Return the next report; see `UsageCounter.report`. Call `take` or `fail` once its outcome is known."""
        counter, limits = self._counter, self._limits
        # Budgets are renewed every day, which changes the parts of all processes.
        everything = self._reports_all or counter.today != self._day
        changes = limits.changes(None if everything else counter.keys_to_report if with_usage else ())
        self._reports_all, self._day = True, counter.today
        return counter.report(
            changes.reserved,
            with_usage=with_usage,
            limits=changes.uses,
            has_all_limits=changes.are_all,
            num_processes=self._num_processes,
            takes_slack=limits.takes_slack,
        )

    def take(self, answer: UsageAnswer) -> None:
        """Apply the owner's answer."""
        self._answered_at, self._num_processes = self._clock(), answer.num_processes
        self._reports_all = answer.wants_all
        self._counter.take(answer)
        self._limits.take(answer.shares, asked=answer.asks_for)

    def fail(self, *, timeout_s: float = 0.0) -> None:
        """Record that the owner did not answer within `timeout_s`. The next report will include all limits."""
        silence_s = self._clock() - self._answered_at
        if silence_s > SILENCE_S:
            self._limits.lose_owner(has_share=silence_s < LEASE_S - timeout_s)


class UsageExchange:
    """Reports a counter's usage, and the usage that dead processes left in the journals of the same folder."""

    def __init__(
        self,
        counter: UsageCounter,
        owner: Owner,
        folder: Path,
        limits: Limits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folder` holds the journals and must outlive the process. Each machine may have its own folder."""
        self._counter = counter
        self._owner = owner
        self._folder = folder
        self._reporter = UsageReporter(counter, limits, clock=clock)
        self._hurried = asyncio.Event()
        limits.on_report_request(self._hurried.set)
        self._num_failures = 0

    async def run(self) -> NoReturn:
        """Exchange reports and answers until cancelled. Failures are logged and retried."""
        await self.open_journal()
        while True:
            for _ in range(PERIODS_BETWEEN_SCANS):
                await self._log_failures(self.exchange)
                await self._wait_for_period()
            await self._log_failures(self.report_remains)

    async def _wait_for_period(self) -> None:
        """Wait for the next period. Meanwhile, exchange limits whenever an early report is requested."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + PERIOD_S
        await asyncio.sleep(HURRY_S)
        while loop.time() < ends_at:
            try:
                async with asyncio.timeout_at(ends_at):
                    await self._hurried.wait()
            except TimeoutError:
                return
            await self._log_failures(self.exchange_limits)
            await asyncio.sleep(HURRY_S)

    async def open_journal(self) -> None:
        """Start to journal the counted usage. If the folder is unusable, log an error and run without a journal."""
        counter = self._counter
        try:
            counter.journal = await asyncio.to_thread(UsageJournal, self._folder, counter.process, counter.number)
        except OSError as error:
            logger.error(
                "usage cannot be journaled in %s: %s; if this process is killed, about one second of its usage is lost",
                self._folder,
                described(error),
            )

    async def exchange_limits(self) -> None:
        """Report limits and apply the answer. Omits new usage, which the owner would have to write to its ledger."""
        await self._exchange(self._reported(with_usage=False))

    async def exchange(self) -> None:
        """Report usage and limits, and apply the answer. Raises the errors of `_send`; the next call will retry."""
        counter, journal = self._counter, self._counter.journal
        switches_file, next_file = False, None
        if journal is not None and (counter.begins_report or not journal.has_file):
            switches_file, next_file = True, await self._file_of(journal, counter.number + counter.begins_report)
        report = self._reported(with_usage=True)
        if journal is not None and switches_file and (before := journal.switch_to(next_file)) is not None:
            await asyncio.to_thread(os.close, before)
        await self._exchange(report)

    def _reported(self, *, with_usage: bool) -> UsageReport:
        self._hurried.clear()
        return self._reporter.report(with_usage=with_usage)

    async def _exchange(self, report: UsageReport) -> None:
        try:
            answer = await self._send(report)
        except Exception:
            self._reporter.fail(timeout_s=_TIMEOUT_S)
            raise
        self._reporter.take(answer)
        if self._counter.journal is not None and report.used:
            await asyncio.to_thread(self._counter.journal.forget, report.number)

    async def _file_of(self, journal: UsageJournal, number: int) -> int | None:
        """Open a report's journal file in a thread, because this is slow on some storage. Returns None if it fails."""
        try:
            return await asyncio.to_thread(journal.file_of, number)
        except OSError as error:
            journal.report_failure(error)
            return None

    async def report_remains(self) -> None:
        """Report the usage in the journals of dead processes. Raises the owner's errors; a later call will continue."""
        for process in await asyncio.to_thread(processes, self._folder):
            dead = await asyncio.to_thread(remains, self._folder, process)
            if dead is None:
                continue
            try:
                await self._report(dead)
            except OSError as error:  # other processes' files may still be readable
                logger.error("the usage of a dead process cannot be read: %s", described(error))
            finally:
                await asyncio.to_thread(dead.close)

    async def _report(self, dead: DeadJournal) -> None:
        for report in await asyncio.to_thread(dead.reports):
            await self._send(report)
        await asyncio.to_thread(dead.forget)

    async def _send(self, report: UsageReport) -> UsageAnswer:
        """Send a report to the owner. Raises the owner's errors, and Unavailable if the owner does not answer in time.

        It does not raise TimeoutError, which callers would mistake for a file error, as a subclass of OSError.
        """
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._owner.report_usage(report)
        except TimeoutError:
            raise Unavailable(f"the batches process did not answer within {_TIMEOUT_S:g} s") from None

    async def _log_failures(self, step: Callable[[], Awaitable[None]]) -> None:
        num_usual = 10  # about this many failures are normal while the owner is starting
        try:
            await step()
        except Exception as error:
            self._num_failures += 1
            if self._num_failures == num_usual:
                logger.warning("usage is stored locally until the batches process accepts it: %s", described(error))
        else:
            self._num_failures = 0
