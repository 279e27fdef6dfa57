"""Simulates how closely ingresses enforce the limits of a shared key: `python -m benchmarks.service.fleet --limits`.

Uses the service's own accounts and owner of the shares; time is simulated. The same requests also go to one account
with the whole limit, and the tokens that this account admits are the reference. The reference of a budget is itself.
"""

from __future__ import annotations

import heapq
import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from app.api.auth.keys import AccountLimits, KeyRing
from app.api.auth.limits import SLOT_WAIT_S, Account, SharedPools
from app.config import KeyConfig
from app.errors import BudgetSpent, LimitReached
from app.jobs.usage_ledger import SCHEMA, UsageLedger
from app.usage import CallUsage, UsageAnswer, UsageCounter, UsageReport, Used
from app.usage.exchange import HURRY_S, PERIOD_S, UsageReporter
from app.usage.records import day_of
from app.usage.shares import Shares

MINUTE_S = 60.0
# The owner does not answer between these seconds of a run.
DEAD_FROM_S, DEAD_UNTIL_S = 120.0, 180.0
NUM_AT_ONCE, BUDGET_WAVES_S = 150, (0.5, 20.0, 60.0)  # runs with a budget: NUM_AT_ONCE requests at each of these times


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The settings of one run: limits of the key, number of ingresses, and load."""

    num_ingresses: int
    skew: float = 0.0  # share of requests that go to the first ingress; the rest goes to a random ingress
    owner_dies: bool = False
    load: float = 3.0  # requests over the requests that the tightest limit allows
    tokens_per_minute: int | None = 120_000
    requests_per_minute: int | None = None
    max_concurrency: int | None = None
    tokens_per_day: int | None = None  # with a budget, requests come in waves and retry when told to
    answer_s: float = 0.005  # from a decision of the owner until the ingress receives the decision
    seconds: float = 300.0


@dataclass(slots=True)
class Admitted:
    """The tokens used by admitted requests, by the minute in which the request was admitted."""

    by_minute: dict[int, int]
    num_running: int = 0
    most_running: int = 0


class _Request(NamedTuple):
    num_tokens: int  # the most that it may use
    used: CallUsage


class _Ingress:
    def __init__(
        self,
        config: KeyConfig,
        clock: Callable[[], float],
        request_report: Callable[[_Ingress], None],
        *,
        first_share: float,
    ) -> None:
        pools = SharedPools(first_share=first_share, shares_budgets=True)
        self.counter = pools.usage = UsageCounter(clock)
        ring = KeyRing([config], pools, clock=clock)
        [self.account] = ring.accounts
        limits = AccountLimits(ring)
        self.reporter = UsageReporter(self.counter, limits, clock=clock)
        self.begun_at = self.next_at = 0.0  # times of the last and the next exchange
        self.turn = 0  # number of the next exchange; exchanges planned earlier are stale
        limits.on_report_request(lambda: request_report(self))


class Owner:
    """The owner of ledger and shares. The ledger survives a death of the owner, the shares do not."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        connection = sqlite3.connect(":memory:", isolation_level=None)
        connection.row_factory = sqlite3.Row
        connection.executescript(SCHEMA)
        self._ledger = UsageLedger(connection, _transaction)
        self.shares: Shares | None = Shares(clock)

    def answer(self, report: UsageReport) -> UsageAnswer | None:
        """Return the answer to a report, or None while the owner is dead."""
        if self.shares is None:
            return None
        return self.shares.answer(report, self._ledger.add(report, day_of(self._clock())))


@contextmanager
def _transaction() -> Iterator[None]:
    yield


class _Run:
    def __init__(self, case: Case, seed: int) -> None:
        self._case = case
        self._rng = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.num_exchanges = 0
        config = KeyConfig(
            name="key",
            sha256="0" * 64,
            tokens_per_minute=case.tokens_per_minute,
            requests_per_minute=case.requests_per_minute,
            max_concurrency=case.max_concurrency,
            tokens_per_day=case.tokens_per_day,
        )
        share = 1 / case.num_ingresses
        self._ingresses = [
            _Ingress(config, self._clock, self._report_early, first_share=share) for _ in range(case.num_ingresses)
        ]
        self._single = _Ingress(config, self._clock, lambda ingress: None, first_share=1.0)
        self._owner = Owner(self._clock)
        self.shared, self.single = Admitted({}), Admitted({})

    def _clock(self) -> float:
        return self.now

    def _at(self, at: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), event))

    def run(self) -> None:
        case = self._case
        for number, ingress in enumerate(self._ingresses):
            begins_s = (number + self._rng.random()) * PERIOD_S / case.num_ingresses
            self._plan(ingress, begins_s)
        if case.owner_dies:
            self._at(DEAD_FROM_S, lambda: setattr(self._owner, "shares", None))
            self._at(DEAD_UNTIL_S, lambda: setattr(self._owner, "shares", Shares(self._clock)))
        if case.tokens_per_day is None:
            self._at(0.0, self._arrive)
        else:
            for wave_s in BUDGET_WAVES_S:
                for _ in range(NUM_AT_ONCE):
                    self._at(wave_s, partial(self._insist, self._request()))
        while self._events and self.now < case.seconds:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def _plan(self, ingress: _Ingress, at: float) -> None:
        """Plan the next exchange of an ingress; it replaces the planned one."""
        ingress.turn += 1
        ingress.next_at = at
        self._at(at, partial(self._exchange, ingress, ingress.turn))

    def _report_early(self, ingress: _Ingress) -> None:
        """Bring the next exchange forward as `UsageExchange` does, but not before a pending answer has arrived."""
        at = max(self.now, ingress.begun_at + self._case.answer_s + HURRY_S)
        if at < ingress.next_at:
            self._plan(ingress, at)

    def _exchange(self, ingress: _Ingress, turn: int) -> None:
        if turn != ingress.turn:
            return
        ingress.begun_at = self.now
        self.num_exchanges += 1
        answer = self._owner.answer(ingress.reporter.report())
        if answer is not None:
            self._at(self.now + self._case.answer_s, partial(ingress.reporter.take, answer))
        else:
            ingress.reporter.fail()
        self._plan(ingress, self.now + self._case.answer_s + PERIOD_S)

    def _arrive(self) -> None:
        ingress, request = self._ingress(), self._request()
        lasts_s = self._rng.uniform(0.5, 9.5)
        self._ask(self._single.account, self.single, request, lasts_s)
        self._come(ingress.account, request, lasts_s, self.now + SLOT_WAIT_S)
        self._at(self.now + self._rng.expovariate(self._num_per_s), self._arrive)

    def _insist(self, request: _Request) -> None:
        """Ask, and ask again after the `retry_after_s` of a refusal."""
        refusal = self._ask(self._ingress().account, self.shared, request, self._rng.uniform(0.5, 9.5))
        if refusal is not None and not isinstance(refusal, BudgetSpent):
            self._at(self.now + refusal.retry_after_s, partial(self._insist, request))

    def _come(self, account: Account, request: _Request, lasts_s: float, until_s: float) -> None:
        """Wait for a slot until `until_s` at most, as `Account.wait_for_slot` does, then ask."""
        slots = account.slots
        if slots is None or not slots.may_receive_slot or self.now >= until_s:
            self._ask(account, self.shared, request, lasts_s)
            return
        account.pools.note_change(account.name)
        has_gone_on = False

        def go_on() -> None:
            nonlocal has_gone_on
            if not has_gone_on:
                has_gone_on = True
                slots.leave(go_on)
                self._come(account, request, lasts_s, until_s)

        slots.wait(go_on)
        self._at(until_s, go_on)

    def _ingress(self) -> _Ingress:
        is_hot = self._rng.random() < self._case.skew
        return self._ingresses[0] if is_hot else self._rng.choice(self._ingresses)

    def _request(self) -> _Request:
        num_prompt, max_tokens = self._rng.randint(50, 150), 400
        used = CallUsage("model", False, Used(1, num_prompt, 0, self._rng.randint(50, max_tokens)))
        return _Request(num_prompt + max_tokens, used)

    @property
    def _num_per_s(self) -> float:
        case, mean_tokens, mean_s = self._case, 325, 5.0
        allowed = [
            (case.tokens_per_minute or 0) / MINUTE_S / mean_tokens,
            (case.requests_per_minute or 0) / MINUTE_S,
            (case.max_concurrency or 0) / mean_s,
        ]
        return case.load * min(each for each in allowed if each)

    def _ask(self, account: Account, admitted: Admitted, request: _Request, lasts_s: float) -> LimitReached | None:
        """Begin a request and return None, or return the refusal."""
        running, used = ExitStack(), request.used
        try:
            reservation = running.enter_context(account.reserve())
            reservation.reserve(request.num_tokens)
        except LimitReached as refusal:
            running.__exit__(type(refusal), refusal, None)
            return refusal
        reservation.usages.append(lambda: used)
        minute = int(self.now / MINUTE_S)
        admitted.by_minute[minute] = admitted.by_minute.get(minute, 0) + used.used.num_tokens
        admitted.num_running += 1
        admitted.most_running = max(admitted.most_running, admitted.num_running)

        def end() -> None:
            admitted.num_running -= 1
            running.close()  # this may let a waiting request begin

        self._at(self.now + lasts_s, end)
        return None


def measure(case: Case, *, seed: int) -> dict[str, float]:
    """Return admitted tokens over the reference: for the whole run, and for its lowest and highest minute."""
    run = _Run(case, seed)
    run.run()
    shared, single = run.shared.by_minute, run.single.by_minute
    ratios = [shared.get(minute, 0) / allowed for minute, allowed in single.items()]
    return {
        "whole": round(sum(shared.values()) / sum(single.values()), 3),
        "lowest_minute": round(min(ratios), 3),
        "highest_minute": round(max(ratios), 3),
        "most_at_once": run.shared.most_running,
        "exchanges_per_s": round(run.num_exchanges / case.seconds / case.num_ingresses, 1),
    }


def measure_budget(case: Case, *, seed: int) -> dict[str, float]:
    """Return the tokens used over the budget, after all requests have ended or were refused for good."""
    assert case.tokens_per_day is not None, "the case has a budget"
    run = _Run(case, seed)
    run.run()
    return {"used_of_budget": round(sum(run.shared.by_minute.values()) / case.tokens_per_day, 3)}


def measure_all(*, seed: int) -> dict[str, Any]:
    """Return the figures of all cases for 1, 3, 8 and 32 ingresses."""
    figures: dict[str, Any] = {"seed": seed}
    for num_ingresses in (1, 3, 8, 32):
        for name, fields in CASES.items():
            case = Case(num_ingresses=num_ingresses, **fields)
            figures[f"{num_ingresses} ingresses, {name}"] = measure(case, seed=seed)
        for name, fields in BUDGET_CASES.items():
            case = Case(num_ingresses=num_ingresses, **fields)
            figures[f"{num_ingresses} ingresses, {name}"] = measure_budget(case, seed=seed)
    return figures


_SKEWED: dict[str, Any] = {"skew": 0.8}
_AT_ONCE: dict[str, Any] = {"tokens_per_minute": None, "max_concurrency": 200}
CASES: dict[str, dict[str, Any]] = {
    "tokens, even": {},
    "tokens, skewed": _SKEWED,
    "tokens, even, the owner dead for a minute": {"owner_dies": True},
    "tokens, skewed, the owner dead for a minute": {"owner_dies": True, **_SKEWED},
    "tokens, skewed, half of the limit asked for": {"load": 0.5, **_SKEWED},
    "requests, skewed": {"tokens_per_minute": None, "requests_per_minute": 600, **_SKEWED},
    "200 at once, even": _AT_ONCE,
    "200 at once, skewed": {**_AT_ONCE, **_SKEWED},
    "200 at once, skewed, the owner dead for a minute": {**_AT_ONCE, **_SKEWED, "owner_dies": True},
    "40 at once, even": {**_AT_ONCE, "max_concurrency": 40},
}
_BUDGET: dict[str, Any] = {"tokens_per_minute": None, "tokens_per_day": 5_000, "answer_s": 0.2, "seconds": 80.0}
BUDGET_CASES: dict[str, dict[str, Any]] = {
    "150 requests at once on a budget of 5,000": _BUDGET,
    "150 requests at once on a budget of 5,000, skewed": {**_BUDGET, **_SKEWED},
    "150 requests at once on a budget of 50,000": {**_BUDGET, "tokens_per_day": 50_000},
}
