"""The ledger of usage by key, model, class and day, in the catalog's database. Counts each report once."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

from app.usage.records import (
    SUMS,
    BudgetTotals,
    UsageAnswer,
    UsageQuery,
    UsageReport,
    UsageRows,
    Used,
    UsedFor,
    month_of,
    values_of,
)

_GROUPS, _COLUMNS = UsedFor._fields, (*UsedFor._fields, *SUMS)
_ADDED = ", ".join(f"{name} = {name} + excluded.{name}" for name in SUMS)

# One transaction writes a report's usage and the process's last report number. A report that is sent again therefore
# adds nothing. This happens if the answer was lost, or if the process died and another process sends its report.
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS usage ({", ".join(_COLUMNS)}, PRIMARY KEY (day, key, model, request_class))
    WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS usage_reports (process PRIMARY KEY, number, day) WITHOUT ROWID;
"""


class UsageLedger:
    """The two tables of usage. Caches this month's usage in memory, because every answer contains its totals."""

    def __init__(self, connection: sqlite3.Connection, transaction: Callable[[], AbstractContextManager[None]]) -> None:
        """`transaction` opens a transaction of the catalog. It raises OSError if this process may not write."""
        self._connection = connection
        self._transaction = transaction
        self._month = ""
        self._by_day: dict[str, dict[str, Used]] = {}  # this month's usage, by key and day

    def add(self, report: UsageReport, today: str) -> UsageAnswer:
        """Add a report, unless it was added before. Returns the totals of the keys in `report.reserved`."""
        query = "SELECT number FROM usage_reports WHERE process = ?"
        row = self._connection.execute(query, (report.process,)).fetchone()
        number = 0 if row is None else int(row["number"])
        self._turn_to(today)
        if report.used and report.number > number:
            number = report.number
            with self._transaction():
                self._connection.executemany(
                    f"""INSERT INTO usage VALUES ({", ".join("?" * len(_COLUMNS))})
                        ON CONFLICT DO UPDATE SET {_ADDED}""",
                    [(*used_for, *values_of(used)) for used_for, used in report.used.items()],
                )
                self._connection.execute(
                    "INSERT OR REPLACE INTO usage_reports VALUES (?, ?, ?)", (report.process, number, today)
                )
            self._note(report.used.items())
        totals = {key: self._totals(key, today) for key in report.reserved}
        return UsageAnswer(number=max(number, report.number), day=today, totals=totals)

    def usage(self, query: UsageQuery) -> UsageRows:
        """Return the usage grouped and sorted by `query.group_by`, with at most `max_rows` rows plus one."""
        assert set(query.group_by) <= set(_GROUPS), "checked before"
        groups, sums = ", ".join(query.group_by), ", ".join(f"sum({name})" for name in SUMS)
        rows = self._connection.execute(
            f"SELECT {groups}, {sums} FROM usage WHERE day BETWEEN ? AND ? GROUP BY {groups} ORDER BY {groups} LIMIT ?",
            (query.first_day, query.last_day, query.max_rows + 1),
        )
        num_groups = len(query.group_by)
        return [(tuple(row[:num_groups]), Used(*row[num_groups:])) for row in rows]

    def forget(self, before_day: str) -> None:
        """Delete the usage before a day, and the report numbers of processes that have not reported since."""
        for table in ("usage", "usage_reports"):
            if self._connection.execute(f"SELECT 1 FROM {table} WHERE day < ? LIMIT 1", (before_day,)).fetchone():
                with self._transaction():
                    self._connection.execute(f"DELETE FROM {table} WHERE day < ?", (before_day,))

    def _turn_to(self, today: str) -> None:
        if self._month == month_of(today):
            return
        self._month, self._by_day = month_of(today), {}
        rows = self._connection.execute("SELECT * FROM usage WHERE day >= ?", (f"{self._month}-01",))
        width = len(_GROUPS)
        self._note((UsedFor(*row[:width]), Used(*row[width:])) for row in rows)

    def _note(self, used: Iterable[tuple[UsedFor, Used]]) -> None:
        for used_for, each in used:
            if month_of(used_for.day) == self._month:
                days = self._by_day.setdefault(used_for.key, {})
                days[used_for.day] = days.get(used_for.day, Used()) + each

    def _totals(self, key: str, today: str) -> BudgetTotals:
        days: Mapping[str, Used] = self._by_day.get(key, {})
        month = sum(days.values(), start=Used())
        return BudgetTotals(days.get(today, Used()).num_tokens, month.num_tokens, month.cost)
