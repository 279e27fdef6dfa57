"""Each request is in the ledger once: reports that are lost, answers that are lost, processes that are killed."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import NoReturn

import pytest

from app.api.auth.keys import AccountLimits, KeyRing
from app.api.auth.limits import SharedPools
from app.config import KeyConfig
from app.errors import Unavailable
from app.usage import CallUsage, UsageAnswer, UsageCounter, UsageExchange, UsageReport, Used, UsedFor, shares
from app.usage.exchange import SILENCE_S
from app.usage.journal import UsageJournal, remains
from app.usage.records import BudgetTotals
from app.usage.shares import LEASE_S
from tests.kit.engine import FakeClock
from tests.kit.jobs import Echo, service_in
from tests.kit.service import entry
from tests.kit.usage import NOON, TODAY, LedgerOwner
from tests.usage.killed_counter import CALL
from tests.waiting import until

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[LedgerOwner]:
    with closing(LedgerOwner(tmp_path)) as owner:
        yield owner


def exchange_of(counter: UsageCounter, owner: LedgerOwner, folder: Path, *budgeted: str) -> UsageExchange:
    keys = [KeyConfig.model_validate(entry(name, name, tokens_per_day=10**6)) for name in budgeted]
    return UsageExchange(counter, owner, folder / "usage", AccountLimits(KeyRing(keys)))


def files(folder: Path) -> list[str]:
    return sorted(path.suffix for path in (folder / "usage").iterdir())


def at_noon() -> FakeClock:
    clock = FakeClock()
    clock.at = NOON
    return clock


async def test_reports_and_answers_that_are_lost_change_no_sum(tmp_path: Path, owner: LedgerOwner) -> None:
    choose, counter = random.Random(3), UsageCounter(at_noon())
    exchange = exchange_of(counter, owner, tmp_path, "alice")
    await exchange.open_journal()

    def lose() -> None:
        if choose.random() < 0.4:
            raise Unavailable("lost")

    owner.before = owner.after = lose
    num_lost = num_added = 0
    for _ in range(200):
        for _ in range(choose.randrange(3)):
            counter.add("alice", CALL)
            num_added += 1
        try:
            await exchange.exchange()
        except Unavailable:
            num_lost += 1
    assert num_lost > 50
    owner.before = owner.after = lambda: None
    while counter.uncounted():
        await exchange.exchange()
    assert owner.total().num_requests == num_added
    assert counter.totals("alice") == BudgetTotals(8 * num_added, 8 * num_added, 0.25 * num_added)
    assert files(tmp_path) == [f".{counter.number}", ".lock"], "what counts is forgotten"


async def test_what_is_known_of_a_key_is_whole_while_a_report_is_under_way(tmp_path: Path, owner: LedgerOwner) -> None:
    counter = UsageCounter(at_noon())
    exchange = exchange_of(counter, owner, tmp_path, "alice")
    seen: list[BudgetTotals] = []
    owner.before = owner.after = lambda: seen.append(counter.totals("alice"))
    counter.add("alice", CALL)
    await exchange.exchange()
    seen.append(counter.totals("alice"))
    assert seen == [BudgetTotals(8, 8, 0.25)] * 3
    counter.add("bob", CALL)
    assert counter.totals("alice") == BudgetTotals(8, 8, 0.25), "of that key alone"


async def test_budgets_begin_anew_with_their_day_and_month_before_the_ledger_says_so(
    tmp_path: Path, owner: LedgerOwner
) -> None:
    clock = at_noon()
    counter = UsageCounter(clock)
    exchange = exchange_of(counter, owner, tmp_path, "alice")
    counter.add("alice", CALL)
    await exchange.exchange()
    clock.advance(86_400)
    counter.add("alice", CALL)
    assert counter.totals("alice") == BudgetTotals(8, 16, 0.5)
    clock.advance(3 * 86_400)
    assert counter.totals("alice") == BudgetTotals(0, 0, 0.0)
    owner.today = counter.today
    await exchange.exchange()
    assert counter.totals("alice") == BudgetTotals(0, 0, 0.0), "what has come late is of the month before"
    assert owner.total().num_requests == 2


async def test_an_owner_that_does_not_answer_is_not_asked_for_the_next_file(
    tmp_path: Path, owner: LedgerOwner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("app.usage.exchange._TIMEOUT_S", 0.001)
    for _ in range(2):
        dead = UsageCounter(at_noon())
        await exchange_of(dead, owner, tmp_path).open_journal()
        dead.add("alice", CALL)
        assert dead.journal is not None
        dead.journal.close()
    asked = []

    async def never(report: UsageReport) -> NoReturn:
        asked.append(report.process)
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(owner, "report_usage", never)
    with pytest.raises(Unavailable, match="did not answer"):
        await exchange_of(UsageCounter(), owner, tmp_path).report_remains()
    assert (len(asked), caplog.text) == (1, "")


@pytest.mark.parametrize("seed", range(3))
def test_a_process_that_is_killed_at_any_moment_loses_no_request_and_doubles_none(tmp_path: Path, seed: int) -> None:
    choose, log = random.Random(seed), tmp_path / "log"
    log.touch()
    folder = tmp_path / "batches"
    command = [sys.executable, "-m", "tests.usage.killed_counter", str(folder), str(log)]
    for number in range(1, 3):
        process = subprocess.Popen(command, cwd=PROJECT)
        try:
            wanted = log.stat().st_size + choose.randrange(20, 200)
            while log.stat().st_size < wanted:
                assert process.poll() is None, "it ended before it could be killed"
                time.sleep(0.001)
            time.sleep(choose.random() * 0.01)
        finally:
            process.kill()
            process.wait()
        with closing(LedgerOwner(folder)) as owner:
            asyncio.run(exchange_of(UsageCounter(), owner, folder).report_remains())
            total, num_said = owner.total(), log.stat().st_size
        # Killed between the two, it has not said its last one. Later ones of the loop have not begun.
        assert num_said <= total.num_requests <= num_said + number
        assert total == Used(*(total.num_requests * each for each in (1, 5, 2, 3, 0.25)))
        assert files(folder) == []


async def test_nobody_takes_what_a_living_process_has_written(tmp_path: Path, owner: LedgerOwner) -> None:
    counters = [UsageCounter(at_noon()) for _ in range(2)]
    exchanges = [exchange_of(counter, owner, tmp_path) for counter in counters]
    for counter, exchange in zip(counters, exchanges, strict=True):
        await exchange.open_journal()
        counter.add("alice", CALL)
    await exchanges[0].report_remains()
    assert owner.total() == Used()
    assert counters[1].journal is not None
    counters[1].journal.close()
    await exchanges[0].report_remains()
    assert owner.total() == CALL.used
    await exchanges[0].exchange()
    assert owner.total() == CALL.used + CALL.used


async def test_what_a_dead_process_has_left_stays_until_the_owner_takes_it(tmp_path: Path, owner: LedgerOwner) -> None:
    counter = UsageCounter(at_noon())
    exchange = exchange_of(UsageCounter(at_noon()), owner, tmp_path)
    await exchange_of(counter, owner, tmp_path).open_journal()
    counter.add("alice", CALL)
    assert counter.journal is not None
    counter.journal.close()

    def fail() -> None:
        raise Unavailable("being opened")

    owner.before = fail
    with pytest.raises(Unavailable):
        await exchange.report_remains()
    assert files(tmp_path) == [".1", ".lock"]
    owner.before = lambda: None
    await exchange.report_remains()
    assert (owner.total(), files(tmp_path)) == (CALL.used, [])


@pytest.mark.parametrize("seed", range(5))
async def test_reports_that_fail_at_any_point_leave_what_dead_processes_have_used_to_others(
    tmp_path: Path, owner: LedgerOwner, seed: int
) -> None:
    choose, num_used = random.Random(seed), 0
    for _ in range(6):
        counter = UsageCounter(at_noon())
        journal = UsageJournal(tmp_path / "usage", counter.process, 1)
        for report in range(1, choose.randint(2, 4)):
            journal.write(UsedFor("alice", "demo", "online", TODAY), CALL.used)
            num_used += 1
            before = journal.switch_to(journal.file_of(report + 1))
            assert before is not None
            os.close(before)
        journal.close()

    def fail() -> None:
        if choose.random() < 0.3:
            raise choose.choice([Unavailable("lost"), OSError(errno.EIO, "of a file")])

    owner.before = owner.after = fail
    exchanges = [exchange_of(UsageCounter(at_noon()), owner, tmp_path) for _ in range(2)]
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        with suppress(Unavailable):
            await choose.choice(exchanges).report_remains()
        assert len(os.listdir("/proc/self/fd")) == num_open, "all locks are free for others"
    assert (owner.total().num_requests, files(tmp_path)) == (num_used, [])


async def test_without_a_new_file_for_the_next_report_the_one_before_counts_and_later_ones_are_written(
    tmp_path: Path, owner: LedgerOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter, other = UsageCounter(at_noon()), exchange_of(UsageCounter(at_noon()), owner, tmp_path)
    exchange = exchange_of(counter, owner, tmp_path)
    await exchange.open_journal()
    counter.add("alice", CALL)
    with monkeypatch.context() as full:
        full.setattr(UsageJournal, "file_of", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        await exchange.exchange()
    assert (owner.total().num_requests, files(tmp_path)) == (1, [".lock"])
    await exchange.exchange()
    counter.add("alice", CALL)
    assert files(tmp_path) == [".2", ".lock"]
    assert counter.journal is not None
    counter.journal.close()
    await other.report_remains()
    assert (owner.total().num_requests, files(tmp_path)) == (2, [])


async def test_a_line_that_a_full_disk_has_cut_off_takes_no_other_with_it(tmp_path: Path, owner: LedgerOwner) -> None:
    counter = UsageCounter(at_noon())
    await exchange_of(counter, owner, tmp_path).open_journal()
    counter.add("alice", CALL)
    [path] = (tmp_path / "usage").glob("*.1")
    with path.open("ab") as written:
        written.write(b'\n["alice", "demo", "onl')
    counter.add("bob", CallUsage("demo", True, Used(1, 1, 0, 1)))
    assert counter.journal is not None
    counter.journal.close()
    dead = remains(tmp_path / "usage", counter.process)
    assert dead is not None
    [report] = dead.reports()
    dead.close()
    assert report.used == {
        UsedFor("alice", "demo", "online", TODAY): CALL.used,
        UsedFor("bob", "demo", "background", TODAY): Used(1, 1, 0, 1),
    }


async def test_without_a_folder_to_write_to_usage_is_counted_all_the_same(
    tmp_path: Path, owner: LedgerOwner, caplog: pytest.LogCaptureFixture
) -> None:
    counter = UsageCounter(at_noon())
    (tmp_path / "usage").write_text("in the way")
    exchange = exchange_of(counter, owner, tmp_path)
    await exchange.open_journal()
    assert "usage cannot be journaled in" in caplog.text
    counter.add("alice", CALL)
    await exchange.exchange()
    assert owner.total() == CALL.used


async def test_limits_are_exchanged_within_the_period_when_a_request_waits_and_usage_is_not(
    tmp_path: Path, owner: LedgerOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.usage.exchange.PERIOD_S", 3600.0)
    reports: list[UsageReport] = []
    pools, counter = SharedPools(), UsageCounter(at_noon())
    report_usage = owner.report_usage

    async def noted(report: UsageReport) -> UsageAnswer:
        reports.append(report)
        return await report_usage(report)

    monkeypatch.setattr(owner, "report_usage", noted)
    exchange = UsageExchange(counter, owner, tmp_path / "usage", AccountLimits(KeyRing([], pools)))
    exchanging = asyncio.create_task(exchange.run())
    for number in range(1, 4):
        await until(lambda: len(reports) == number)  # noqa: B023
        counter.add("alice", CALL)
        pools.request_report()
    await until(lambda: len(reports) == 4)
    exchanging.cancel()
    assert not any(report.used for report in reports), "each would be a transaction of the owner"
    await exchange.exchange()
    assert owner.total().num_requests == 3


async def test_reports_carry_parts_of_limits_and_a_dead_process_leaves_its_own_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "SETTLING_S", 0.0)
    clock, key = FakeClock(), KeyConfig.model_validate(entry(tokens_per_minute=600))
    exchanges, uses, counters = [], [], [UsageCounter(), UsageCounter()]
    async with service_in(tmp_path, Echo()) as owner:
        for counter in counters:
            ring = KeyRing([key], SharedPools(first_share=0.5), clock=clock)
            limits = AccountLimits(ring)
            exchanges.append(UsageExchange(counter, owner, tmp_path / "usage", limits, clock=clock))
            uses.append(lambda limits=limits: next(iter(limits.changes(None).uses.values())))
            await exchanges[-1].open_journal()
        for _ in range(3):
            for exchange in exchanges:
                await exchange.exchange()
        assert [(use().share, round(use().held)) for use in uses] == [(0.5, 300), (0.5, 300)]
        assert counters[1].journal is not None
        counters[1].journal.close()
        await exchanges[0].report_remains()
        for _ in range(2):  # it has nothing to tell, and is asked
            await exchanges[0].exchange()
        assert uses[0]().share == 1.0
    for silence_s, share in ((SILENCE_S + 1, 1.0), (LEASE_S, 0.5)):
        clock.advance(silence_s)
        with pytest.raises(Unavailable):
            await exchanges[0].exchange()
        assert uses[0]().share == share
