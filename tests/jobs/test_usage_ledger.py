"""The ledger of usage in the catalog: each report once, sums by any fields, totals of a day and a month."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from app.jobs.catalog import Catalog, Superseded
from app.usage import UsageQuery, UsageReport, Used, UsedFor
from app.usage.records import BudgetTotals

A_REQUEST = Used(1, 10, 4, 5, 0.5)


def report(number: int, *days: str, process: str = "p", key: str = "alice", model: str = "demo") -> UsageReport:
    used = {UsedFor(key, model, "online", day): A_REQUEST for day in days}
    return UsageReport(process=process, number=number, used=used, reserved={"alice": BudgetTotals()})


def sums(catalog: Catalog, *group_by: str, first: str = "2026-01-01", last: str = "2026-12-31") -> dict[object, int]:
    query = UsageQuery(first_day=first, last_day=last, group_by=group_by)
    return {group if len(group) > 1 else group[0]: used.num_requests for group, used in catalog.ledger.usage(query)}


def test_a_report_counts_once_also_after_the_process_of_the_ledger_has_died(tmp_path: Path) -> None:
    first, second = report(1, "2026-11-27"), report(2, "2026-11-27")
    with closing(Catalog(tmp_path)) as catalog:
        for each in (first, first, second):
            answer = catalog.ledger.add(each, "2026-11-27")
    with closing(Catalog(tmp_path)) as catalog:
        for each in (second, first):
            answer = catalog.ledger.add(each, "2026-11-27")
            assert (answer.number, answer.totals) == (2, {"alice": BudgetTotals(30, 30, 1.0)})
        assert sums(catalog, "key") == {"alice": 2}
        catalog.ledger.add(report(1, "2026-11-27", process="other"), "2026-11-27")
        assert sums(catalog, "key") == {"alice": 3}


def test_totals_are_of_this_day_and_this_month(tmp_path: Path) -> None:
    with closing(Catalog(tmp_path)) as catalog:
        add = catalog.ledger.add
        answer = add(report(1, "2026-10-31", "2026-11-01", "2026-11-02"), "2026-11-02")
        assert answer.totals == {"alice": BudgetTotals(15, 30, 1.0)}
        assert add(report(2, "2026-11-02"), "2026-11-02").totals == {"alice": BudgetTotals(30, 45, 1.5)}
        assert add(report(2), "2026-11-03").totals == {"alice": BudgetTotals(0, 45, 1.5)}
        assert add(report(3, "2026-11-30"), "2026-12-01").totals == {"alice": BudgetTotals(0, 0, 0.0)}
        assert add(report(3), "2026-12-01").number == 3


def test_usage_is_added_up_by_the_fields_that_are_asked_for(tmp_path: Path) -> None:
    with closing(Catalog(tmp_path)) as catalog:
        catalog.ledger.add(report(1, "2026-11-01", "2026-11-02"), "2026-11-02")
        catalog.ledger.add(report(2, "2026-11-02", key="bob", model="large"), "2026-11-02")
        assert sums(catalog, "key") == {"alice": 2, "bob": 1}
        assert sums(catalog, "model", "day") == {
            ("demo", "2026-11-01"): 1, ("demo", "2026-11-02"): 1, ("large", "2026-11-02"): 1,
        }  # fmt: skip
        assert sums(catalog, "key", first="2026-11-02", last="2026-11-02") == {"alice": 1, "bob": 1}
        assert sums(catalog, "request_class", last="2026-10-31") == {}
        many = UsageQuery(first_day="", last_day="9", group_by=("day", "key"), max_rows=1)
        assert len(catalog.ledger.usage(many)) == 2, "one more than was asked for: there are more"


def test_what_was_used_long_ago_is_forgotten(tmp_path: Path) -> None:
    with closing(Catalog(tmp_path)) as catalog:
        catalog.ledger.add(report(1, "2025-01-01", "2026-11-01"), "2025-01-01")
        catalog.ledger.forget("2026-01-01")
        assert sums(catalog, "day", first="2020-01-01") == {"2026-11-01": 1}


def test_a_folder_in_which_processes_have_begun_to_count_is_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "usage").mkdir()
    (tmp_path / "usage" / "p.1").touch()
    Catalog(tmp_path).close()


def test_a_process_that_has_lost_the_folder_adds_nothing(tmp_path: Path) -> None:
    with closing(Catalog(tmp_path)) as former, closing(Catalog(tmp_path)) as catalog:
        with pytest.raises(Superseded):
            former.ledger.add(report(1, "2026-11-27"), "2026-11-27")
        assert sums(catalog, "key") == {}
