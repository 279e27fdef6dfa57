"""Limits that count once over several processes: how near they are kept, and what is never exceeded."""

from __future__ import annotations

import pickle
import random
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from app.api.auth.keys import AccountLimits, KeyRing
from app.api.auth.limits import OWED_PART, UNASSIGNED_PART, Reservation, SharedPools
from app.config import KeyConfig
from app.errors import LimitReached
from app.usage import CallUsage, UsageAnswer, UsageCounter, UsageReport, Used
from app.usage.exchange import UsageReporter
from app.usage.records import SLOTS, BudgetTotals, LimitId, LimitUse, Share
from app.usage.shares import LEASE_S, SETTLING_S, Shares
from benchmarks.service.shares import BUDGET_CASES, CASES, Case, measure, measure_budget
from tests.kit.engine import FakeClock
from tests.kit.service import entry

TOKENS = LimitId("alice", "tokens", 600)
AT_ONCE = LimitId("alice", SLOTS, 5)


@pytest.mark.parametrize(
    ("num_ingresses", "name"),
    [
        *((number, name) for number in (3, 8) for name in CASES),
        *((1, name) for name in ("tokens, skewed", "40 at once, even")),
        *((32, name) for name in ("tokens, even", "200 at once, even", "40 at once, even")),
    ],
)
def test_what_is_admitted_is_what_is_allowed(name: str, num_ingresses: int) -> None:
    fields = CASES[name]
    if "max_concurrency" in fields and "owner_dies" not in fields:
        # Nothing of a limit at once lasts for minutes: requests end within 10 s, and parts move within LEASE_S.
        fields = fields | {"seconds": LEASE_S + 60.0}
    figures = measure(Case(num_ingresses=num_ingresses, **fields), seed=7)
    assert 0.95 <= figures["whole"] <= 1.05, figures
    assert figures["highest_minute"] <= 1.2, figures
    if most := CASES[name].get("max_concurrency"):
        assert figures["most_at_once"] <= most, figures


@pytest.mark.parametrize("num_ingresses", [1, 3, 8])
@pytest.mark.parametrize("name", BUDGET_CASES)
def test_a_budget_is_used_and_not_exceeded(name: str, num_ingresses: int) -> None:
    figures = measure_budget(Case(num_ingresses=num_ingresses, **BUDGET_CASES[name]), seed=7)
    assert 0.85 <= figures["used_of_budget"] <= 1.0


class Process:
    """One that sends requests of a key with these limits."""

    def __init__(self, clock: FakeClock, *, first_share: float, **limits: Any) -> None:
        self._clock = clock
        pools = SharedPools(first_share=first_share, shares_budgets=True)
        self.counter = pools.usage = UsageCounter(clock)
        ring = KeyRing([KeyConfig.model_validate(entry(**limits))], pools, clock=clock)
        [self.account] = ring.accounts
        self._reporter = UsageReporter(self.counter, AccountLimits(ring), clock=clock)
        self.running: list[tuple[ExitStack, Reservation]] = []
        self.num_used = 0

    def ask(self, num_tokens: int, *, is_kept: bool = False) -> bool:
        """Whether a request of so many tokens has begun."""
        running, account = ExitStack(), self.account
        try:
            reservation = running.enter_context(account.reserve_for_stored() if is_kept else account.reserve())
            reservation.reserve(num_tokens, cost=num_tokens / 100)
        except LimitReached as refusal:
            running.__exit__(type(refusal), refusal, None)
            return False
        self.running.append((running, reservation))
        return True

    def end(self, index: int, part: float) -> None:
        """A request that runs ends, and has used this part of its tokens."""
        running, reservation = self.running.pop(index)
        num_tokens = int(part * reservation.num_reserved)
        self.num_used += num_tokens
        call = CallUsage("demo", False, Used(1, num_tokens, 0, 0, num_tokens / 100))
        reservation.usages.append(lambda: call)
        running.close()

    def report(self) -> UsageReport:
        return self._reporter.report()

    def learn(self, answer: UsageAnswer | None) -> None:
        """None: it has come to no answer."""
        if answer is None:
            self._reporter.fail()
        else:
            self._reporter.take(answer)


class Ledger:
    """Of one key, in memory. It outlives the owner of the shares."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.shares = Shares(clock)
        self.num_tokens = 0
        self._numbers: dict[str, int] = {}

    def answer(self, report: UsageReport) -> UsageAnswer:
        if report.number > self._numbers.get(report.process, 0):
            self._numbers[report.process] = report.number
            self.num_tokens += sum(used.num_tokens for used in report.used.values())
        totals = BudgetTotals(self.num_tokens, self.num_tokens, self.num_tokens / 100)
        answer = UsageAnswer(number=report.number, day="1970-01-01", totals={"alice": totals})
        return self.shares.answer(report, answer)

    def die(self) -> None:
        self.shares = Shares(self._clock)


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_requests_reports_lost_answers_and_deaths_exceeds_a_budget(seed: int) -> None:
    choose, clock = random.Random(seed), FakeClock()
    ledger = Ledger(clock)
    budgets = {"tokens_per_day": 1000, "money_per_month": 10.0}
    processes = [Process(clock, first_share=share, **budgets) for share in (0.5, 0.5, 0.0)]
    num_refused = 0
    for _ in range(400):
        process = choose.choice(processes)
        if process.running and choose.random() < 0.4:
            process.end(choose.randrange(len(process.running)), choose.random() ** 4)
        elif choose.random() < 0.6:
            num_refused += not process.ask(choose.randint(1, 60), is_kept=process is processes[-1])
        else:
            report = process.report()
            arrives, is_answered = choose.random() < 0.9, choose.random() < 0.9
            answer = ledger.answer(report) if arrives else None
            if choose.random() < 0.5:  # it takes requests before it has the answer
                num_refused += not process.ask(choose.randint(1, 60), is_kept=process is processes[-1])
            process.learn(answer if is_answered else None)
        if choose.random() < 0.01:
            ledger.die()
        clock.advance(choose.expovariate(2.0))
        used = sum(each.num_used + each.account.reserved.tokens_today for each in processes)
        assert used <= 1000 * (1 + UNASSIGNED_PART + OWED_PART) <= 1100
    assert num_refused


def settled(*processes: Process, ledger: Ledger, clock: FakeClock) -> None:
    """Until each has its parts and nothing to tell."""
    for _ in range(int(SETTLING_S) + 6):
        for process in processes:
            process.learn(ledger.answer(process.report()))
        clock.advance(1.0)


LIMITED = {"tokens_per_minute": 600, "max_concurrency": 4, "tokens_per_day": 10_000}


def test_a_report_has_only_what_has_changed() -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    first, second = processes = [Process(clock, first_share=0.5, **LIMITED) for _ in range(2)]
    settled(*processes, ledger=ledger, clock=clock)
    report = first.report()
    assert (report.limits, report.reserved, report.has_all_limits) == ({}, {}, False)
    first.learn(ledger.answer(report))
    assert first.ask(100)
    report = first.report()
    assert {limit_id.what for limit_id in report.limits} == {"tokens", SLOTS, "tokens_per_day"}
    assert report.reserved == {"alice": BudgetTotals(100, 100, 1.0)}
    first.learn(None)
    assert first.report().has_all_limits, "the owner may not know what the last report had"
    ledger.die()
    answer = ledger.answer(second.report())
    assert answer.wants_all, "it knows nothing of this process"
    second.learn(answer)
    assert second.report().has_all_limits


def test_a_silent_process_is_asked_for_what_another_needs_and_for_nothing_else() -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    busy, idle = processes = [Process(clock, first_share=0.5, **LIMITED) for _ in range(2)]
    settled(*processes, ledger=ledger, clock=clock)
    assert busy.ask(1)
    busy.learn(ledger.answer(busy.report()))
    answer = ledger.answer(idle.report())
    assert not answer.asks_for
    idle.learn(answer)
    assert busy.ask(280)
    assert not busy.ask(300)
    for _ in range(4):
        busy.learn(ledger.answer(busy.report()))
        answer = ledger.answer(idle.report())
        assert answer.asks_for == {"alice"}
        idle.learn(answer)
        clock.advance(1.0)
    assert busy.ask(300)
    busy.end(0, 0.0)
    for _ in range(60):
        for process in processes:
            process.learn(ledger.answer(process.report()))
        clock.advance(1.0)
    assert not idle.report().limits
    assert idle.ask(290), "it has its part again"


def test_what_a_silent_process_has_fills_up_meanwhile() -> None:
    """The owner must not give to others what has come to it."""
    clock = FakeClock()
    ledger = Ledger(clock)
    one, other = processes = [Process(clock, first_share=0.5, tokens_per_minute=600) for _ in range(2)]
    settled(*processes, ledger=ledger, clock=clock)
    assert one.ask(300)
    one.end(0, 1.0)
    for _ in range(60):  # `one` tells nothing after the first of these
        for process in processes:
            process.learn(ledger.answer(process.report()))
        clock.advance(1.0)
    assert one.ask(290)
    for _ in range(3):
        assert not other.ask(320)
        other.learn(ledger.answer(other.report()))


class Fleet:
    """Processes that report to an owner, whose answers they take at once."""

    def __init__(self, *processes: str) -> None:
        self.clock = FakeClock()
        self.owner = Shares(self.clock)
        self.uses = dict.fromkeys(processes, LimitUse(0.0, 0.0, 0.0))
        self.told = dict.fromkeys(processes, 0)

    def report(self, process: str, limit_id: LimitId, **asked: Any) -> Share | None:
        use = self.uses[process]._replace(**{"wanted": 0.0, "refused": 0.0} | asked)
        report = UsageReport(
            process=process, number=0, limits={limit_id: use}, num_processes=self.told[process],
            takes_slack=process != "batches",
        )  # fmt: skip
        answer = self.owner.answer(report, UsageAnswer(number=0, day=""))
        self.told[process] = answer.num_processes
        share = answer.shares.get(limit_id)
        if share is not None:
            held = use.held if limit_id.what == SLOTS else use.held + share.amount
            use = use._replace(share=share.share, held=held)
        self.uses[process] = use
        return share

    def end(self, process: str) -> None:
        """Another process reports what this one has left."""
        self.owner.answer(UsageReport(process=process, number=1), UsageAnswer(number=1, day=""))
        del self.uses[process]

    def settle(self, limit_id: LimitId) -> None:
        """All report for as long as a new owner only listens, and until all have their parts."""
        for _ in range(int(SETTLING_S) + 3):
            for process in self.uses:
                self.report(process, limit_id)
            self.clock.advance(1.0)

    @property
    def sum_of_shares(self) -> float:
        return sum(use.share for use in self.uses.values())

    @property
    def sum_held(self) -> float:
        return sum(use.held for use in self.uses.values())


def test_a_limit_that_nobody_uses_is_shared_evenly_and_moves_to_where_it_is_wanted() -> None:
    fleet = Fleet("a", "b", "c")
    assert fleet.report("a", TOKENS) is None, "others may be there"
    fleet.settle(TOKENS)
    assert [round(use.share, 3) for use in fleet.uses.values()] == [0.333] * 3
    assert [round(use.held) for use in fleet.uses.values()] == [200] * 3
    for _ in range(4):
        for process in fleet.uses:
            wanted = 100.0 if process == "b" else 0.0
            fleet.report(process, TOKENS, wanted=wanted, refused=wanted)
            assert fleet.sum_of_shares <= 1 + 1e-9
            assert fleet.sum_held <= 600 + 1e-6
        fleet.clock.advance(1.0)
    assert fleet.uses["b"].share > 0.95
    assert fleet.uses["b"].held > 570


def test_what_fits_into_no_part_is_collected_where_it_is_asked_for() -> None:
    """Of four a minute eight processes have half of one each, which is none."""
    fleet, limit_id = Fleet(*"abcdefgh"), LimitId("alice", "requests", 4)
    fleet.settle(limit_id)
    for process in fleet.uses:
        fleet.report(process, limit_id, wanted=1.0, refused=1.0)
    fleet.clock.advance(0.1)
    for process in fleet.uses:
        fleet.report(process, limit_id, wanted=1.0, refused=1.0)
    assert sorted(round(use.held) for use in fleet.uses.values()) == [0] * 4 + [1] * 4


def test_a_request_of_a_whole_minutes_worth_gets_it_where_it_is_asked_for_and_takes_nothing_from_small_ones() -> None:
    fleet = Fleet("a", "b", "c")
    fleet.settle(TOKENS)
    for _ in range(4):
        fleet.report("b", TOKENS, wanted=2000.0, refused=2000.0)
        for process in ("a", "c"):
            fleet.report(process, TOKENS)
        fleet.clock.advance(1.0)
    assert fleet.uses["b"].held == pytest.approx(600)
    for _ in range(4):
        for process in ("a", "b", "c"):
            fleet.report(process, TOKENS, wanted=2100.0, refused=100.0)
        fleet.clock.advance(1.0)
    assert all(use.held >= 100 for use in fleet.uses.values()), fleet.uses


def test_a_process_with_more_requests_than_places_keeps_them_from_others_until_they_end() -> None:
    fleet = Fleet("a", "b")
    fleet.settle(AT_ONCE)
    assert sorted(use.share for use in fleet.uses.values()) == [2, 3]
    fleet.uses["a"] = fleet.uses["a"]._replace(held=fleet.uses["a"].share)
    running = int(fleet.uses["a"].held)
    for _ in range(8):
        fleet.report("b", AT_ONCE, wanted=50.0)
        fleet.report("a", AT_ONCE)
        fleet.clock.advance(1.0)
        assert fleet.uses["b"].share <= 5 - running
    fleet.uses["a"] = fleet.uses["a"]._replace(held=0.0)
    for _ in range(8):
        fleet.report("a", AT_ONCE)
        fleet.report("b", AT_ONCE, wanted=50.0)
        fleet.clock.advance(1.0)
    assert (fleet.uses["a"].share, fleet.uses["b"].share) == (0, 5)


def test_a_process_whose_requests_always_wait_gives_places_to_one_whose_requests_wait_too() -> None:
    fleet = Fleet("a", "b")
    fleet.settle(AT_ONCE)
    for _ in range(20):  # b needs nothing, and a has all places
        fleet.report("a", AT_ONCE, wanted=9.0, refused=1.0)
        fleet.report("b", AT_ONCE)
        fleet.clock.advance(0.5)
        fleet.uses["a"] = fleet.uses["a"]._replace(held=fleet.uses["a"].share)
    assert fleet.uses["a"].held == 5
    for _ in range(20):
        for process in ("a", "b"):
            fleet.report(process, AT_ONCE, wanted=9.0, refused=1.0)
            # A request ends, and the one that waits takes its place if the process still has it.
            fleet.uses[process] = fleet.uses[process]._replace(held=fleet.uses[process].share)
            assert fleet.sum_held <= 5
        fleet.clock.advance(0.5)
    assert min(use.held for use in fleet.uses.values()) >= 1


def test_records_of_another_version_are_read() -> None:
    report = UsageReport(process="a", number=3, num_processes=2, takes_slack=False, has_all_limits=False)
    state = report.__getstate__()  # type: ignore[misc]
    older = object.__new__(UsageReport)
    older.__setstate__(state[:-1])
    assert older == replace(report, has_all_limits=True)
    newer = object.__new__(UsageReport)
    newer.__setstate__([*state, "a field that is not known here"])
    assert newer == report == pickle.loads(pickle.dumps(report))


@pytest.mark.parametrize("limit_id", [AT_ONCE._replace(limit=1), TOKENS], ids=str)
def test_items_of_batches_have_what_no_request_asks_for_and_no_more(limit_id: LimitId) -> None:
    fleet = Fleet("a", "batches")
    fleet.settle(limit_id)
    assert [round(use.share, 3) for use in fleet.uses.values()] == [1, 0]
    for wanted_by_a in (0.0, 1000.0):
        for _ in range(40):
            fleet.report("a", limit_id, wanted=wanted_by_a)
            fleet.report("batches", limit_id, wanted=1000.0)
            fleet.clock.advance(1.0)
        shares = [round(use.share, 3) for use in fleet.uses.values()]
        assert shares == ([1, 0] if wanted_by_a else [0, 1])


def test_a_kept_response_takes_what_other_processes_have_before_it_has_come() -> None:
    """No part of an idle key's tokens is in the process of batches, and one a minute is asked for there."""
    clock = FakeClock()
    ledger = Ledger(clock)
    ingress, batches = processes = [Process(clock, first_share=share, tokens_per_minute=600) for share in (1.0, 0.0)]

    def exchange(seconds: int) -> None:
        for _ in range(seconds):
            for process in processes:
                process.learn(ledger.answer(process.report()))
            clock.advance(1.0)

    exchange(int(SETTLING_S) + 3)
    for _ in range(3):
        with batches.account.reserve_for_stored() as kept:
            kept.reserve(100)
            exchange(3)
            assert not ingress.ask(550), "the tokens that the response has taken are not there any more"
        exchange(60)
        assert ingress.ask(550)
        ingress.end(0, 0.0)
        exchange(60)
    assert not batches.ask(100), "a line of a batch waits"
    with batches.account.reserve_for_stored() as kept:
        kept.reserve(400)
        with pytest.raises(LimitReached):
            kept.reserve(300)


def test_nearly_all_of_a_budget_that_nobody_asks_for_is_where_requests_come_in() -> None:
    fleet, budget = Fleet("a", "batches"), LimitId("alice", "tokens_per_day", 1100)
    fleet.settle(budget)
    assert [round(use.held) for use in fleet.uses.values()] == [1000, 100]
    for _ in range(4):
        for process, wanted in (("a", 0.0), ("batches", 900.0)):
            fleet.report(process, budget, wanted=wanted, refused=wanted)
            assert fleet.sum_held <= 1100
        fleet.clock.advance(1.0)
    assert fleet.uses["batches"].held >= 900


def test_a_kept_response_of_an_idle_key_may_owe_a_twentieth_of_a_budget() -> None:
    clock = FakeClock()
    batches = Process(clock, first_share=0.0, tokens_per_day=1000)
    assert not batches.ask(1), "a line of a batch waits until the owner gives a part"
    assert batches.ask(50, is_kept=True)
    assert not batches.ask(1, is_kept=True)


def test_a_new_owner_gives_nothing_before_it_has_heard_of_all_parts() -> None:
    fleet = Fleet("a", "b", "c")
    fleet.settle(TOKENS)
    fleet.owner = Shares(fleet.clock)
    for _ in range(int(SETTLING_S) + 2):
        assert fleet.report("a", TOKENS, wanted=1000.0) is None
        assert fleet.report("b", TOKENS) is None
        fleet.clock.advance(1.0)
    fleet.end("c")
    assert fleet.report("b", TOKENS) is not None, "the third has died meanwhile"


def test_the_part_of_a_process_that_ends_goes_to_others_at_once_and_of_one_that_is_silent_later() -> None:
    fleet = Fleet("a", "b", "c")
    fleet.settle(TOKENS)
    fleet.end("c")
    fleet.report("a", TOKENS, wanted=1000.0)
    assert fleet.uses["a"].share > 0.6
    fleet.clock.advance(LEASE_S - 1)
    fleet.report("a", TOKENS, wanted=1000.0 * LEASE_S)
    assert fleet.uses["a"].share < 0.7, "the second may still have its part"
    fleet.clock.advance(2)
    fleet.report("a", TOKENS, wanted=1000.0)
    assert fleet.uses["a"].share == 1.0


def test_what_others_have_reserved_of_a_budget_is_told_until_they_end() -> None:
    clock = FakeClock()
    owner = Shares(clock)

    def told(process: str, reserved: int) -> int:
        report = UsageReport(process=process, number=0, reserved={"alice": BudgetTotals(reserved, reserved, 0.0)})
        answer = owner.answer(report, UsageAnswer(number=0, day="", totals={"alice": BudgetTotals(1000, 1000, 0.0)}))
        return answer.totals["alice"].tokens_today

    assert [told("a", 10), told("b", 200), told("a", 30), told("b", 0), told("a", 0)] == [1000, 1010, 1200, 1030, 1000]
    told("b", 200)
    clock.advance(LEASE_S + 1)
    assert told("a", 0) == 1000, "it is silent"
