"""Counts the usage of one process's requests that the ledger does not include yet."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from app.usage.journal import UsageJournal
from app.usage.records import (
    BACKGROUND,
    ONLINE,
    BudgetTotals,
    CallUsage,
    UsageAnswer,
    UsageReport,
    Used,
    UsedFor,
    day_of,
    month_of,
)


class UsageCounter:
    """Counts the usage of this process's finished calls. A key's totals are the ledger's plus the unreported usage.

    Without a ledger, the counter holds all usage since the process started.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns seconds since 1970."""
        self.process = uuid.uuid4().hex
        self.journal: UsageJournal | None = None
        self._clock = clock
        self._counted: dict[str, dict[UsedFor, Used]] = {}  # usage by key, since the last report
        self._sent = UsageReport(process=self.process, number=0)  # the last report, which may not be in the ledger yet
        self._known_number = 0  # number of the last report that the ledger includes
        self._known: dict[str, tuple[str, BudgetTotals]] = {}  # the ledger's totals and their day, by key

    def add(self, key: str, call: CallUsage) -> None:
        """Count a finished call's usage, and write it to the journal if one is open."""
        used_for = UsedFor(key, call.model, BACKGROUND if call.is_background else ONLINE, self.today)
        of_key = self._counted.setdefault(key, {})
        of_key[used_for] = of_key.get(used_for, Used()) + call.used
        if self.journal is not None:
            self.journal.write(used_for, call.used)

    @property
    def today(self) -> str:
        return day_of(self._clock())

    @property
    def now(self) -> float:
        """Seconds since 1970."""
        return self._clock()

    def totals(self, key: str) -> BudgetTotals:
        """Return a key's known usage today and this month: the ledger's totals plus this process's unreported usage."""
        today = self.today
        day, of_ledger = self._known.get(key, (today, BudgetTotals()))
        if month_of(day) != month_of(today):
            of_ledger = BudgetTotals()
        elif day != today:
            of_ledger = of_ledger._replace(tokens_today=0)
        return of_ledger.plus(_totals_of(self._uncounted(key), today))

    def uncounted(self) -> dict[UsedFor, Used]:
        """Return all usage that may not be in the ledger yet."""
        sums = dict(self._in_flight)
        for of_key in self._counted.values():
            for used_for, used in of_key.items():
                sums[used_for] = sums.get(used_for, Used()) + used
        return sums

    @property
    def begins_report(self) -> bool:
        """Whether the next report will carry new usage under a new number. False while the last one is unanswered."""
        return bool(self._counted) and not self._in_flight

    @property
    def keys_to_report(self) -> Collection[str]:
        """The keys whose new usage the next report will carry."""
        return self._counted.keys() if self.begins_report else ()

    @property
    def number(self) -> int:
        """Number of the report that will carry the usage that is being counted now."""
        return self._sent.number + 1

    def report(
        self, reserved: Mapping[str, BudgetTotals] | None = None, *, with_usage: bool = True, **fields: Any
    ) -> UsageReport:
        """Return the next report, with `fields` set. It repeats the previous usage until the ledger includes it.

        `reserved` holds, for each key with budgets, the amounts that running requests may still use. With
        `with_usage=False`, new usage is left for a later report.
        """
        number, used = self._sent.number, self._in_flight
        if with_usage and self.begins_report:
            number, used = self.number, self.uncounted()
            self._counted = {}
        left_out = {
            key: each.plus(_totals_of(self._counted.get(key, {}).items(), self.today))
            for key, each in (reserved or {}).items()
        }
        self._sent = UsageReport(process=self.process, number=number, used=used, reserved=left_out, **fields)
        return self._sent

    def take(self, answer: UsageAnswer) -> None:
        """Record the owner's answer."""
        self._known_number = answer.number
        self._known.update((key, (answer.day, totals)) for key, totals in answer.totals.items())

    @property
    def _in_flight(self) -> Mapping[UsedFor, Used]:
        return self._sent.used if self._known_number < self._sent.number else {}

    def _uncounted(self, key: str) -> Iterator[tuple[UsedFor, Used]]:
        yield from self._counted.get(key, {}).items()
        yield from ((used_for, used) for used_for, used in self._in_flight.items() if used_for.key == key)


def _totals_of(used: Iterable[tuple[UsedFor, Used]], today: str) -> BudgetTotals:
    """Sum up the usage of today and of this month."""
    totals = BudgetTotals()
    for used_for, each in used:
        if month_of(used_for.day) == month_of(today):
            tokens_today = each.num_tokens if used_for.day == today else 0
            totals = totals.plus(BudgetTotals(tokens_today, each.num_tokens, each.cost))
    return totals
