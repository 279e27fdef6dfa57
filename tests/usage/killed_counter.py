"""A process to be killed, which counts requests and reports them.

    python -m tests.usage.killed_counter FOLDER LOG

Writes a byte to LOG after every request that it has counted.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from app.usage import CallUsage, UsageCounter, UsageExchange, Used
from app.usage.records import LimitChanges, LimitId, Limits, Share
from tests.kit.usage import LedgerOwner

CALL = CallUsage("demo", False, Used(1, 5, 2, 3, 0.25))


class NoLimits(Limits):
    """Of keys without any. Those of the API would have each process import all of it."""

    takes_slack = True

    def on_report_request(self, request_report: Callable[[], None]) -> None:
        pass

    def changes(self, keys: Iterable[str] | None) -> LimitChanges:
        return LimitChanges({}, {}, are_all=True)

    def take(self, shares: Mapping[LimitId, Share], *, asked: Collection[str]) -> None:
        assert not shares
        assert not asked


async def main(folder: Path, log: int) -> None:
    counter = UsageCounter()
    exchange = UsageExchange(counter, LedgerOwner(folder), folder / "usage", NoLimits())
    await exchange.open_journal()
    while True:
        for _ in range(7):
            counter.add("alice", CALL)
            os.write(log, b".")
        await exchange.exchange()


if __name__ == "__main__":
    log = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    asyncio.run(main(Path(sys.argv[1]), log))
