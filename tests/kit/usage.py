"""The owner of a ledger without the rest of its process: the real tables in a folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from app.jobs.catalog import Catalog
from app.usage import Owner, UsageAnswer, UsageQuery, UsageReport, Used
from app.usage.records import UsageRows

TODAY = "2026-11-27"
NOON = 1_795_780_800.0  # of that day


class LedgerOwner(Owner):
    """Adds reports to the ledger in a folder."""

    def __init__(self, folder: Path, *, today: str = TODAY) -> None:
        folder.mkdir(exist_ok=True)
        self.catalog = Catalog(folder)
        self.today = today
        self.before: Callable[[], object] = lambda: None  # called before each report is added
        self.after: Callable[[], object] = lambda: None  # and before it is answered

    async def report_usage(self, report: UsageReport) -> UsageAnswer:
        self.before()
        answer = await asyncio.to_thread(self.catalog.ledger.add, report, self.today)
        self.after()
        return answer

    async def usage(self, query: UsageQuery) -> UsageRows:
        return self.catalog.ledger.usage(query)

    def close(self) -> None:
        self.catalog.close()

    def total(self) -> Used:
        """All that is in the ledger."""
        query = UsageQuery(first_day="", last_day="9", group_by=("key",))
        return sum((used for _, used in self.catalog.ledger.usage(query)), start=Used())
