from __future__ import annotations

from itertools import permutations

from app.engine.request import Adapter
from app.fleet import Entry, adapters_in, merged, with_entry

OLD, NEW = Adapter(name="sql", path="/sql", digest="1"), Adapter(name="sql", path="/sql", digest="2")


def test_the_latest_entry_of_each_name_holds_in_whatever_order_tables_come() -> None:
    tables = [{"sql": Entry(0.0, OLD), "chat": Entry(0.0, OLD)}, {"sql": Entry(5.0, NEW)}, {"chat": Entry(6.0, None)}]
    for order in permutations(tables):
        found = merged(order)
        assert found == {"sql": Entry(5.0, NEW), "chat": Entry(6.0, None)}
        assert adapters_in(found) == [NEW]


def test_a_new_entry_holds_also_where_the_one_before_was_made_by_a_clock_that_is_ahead() -> None:
    table = {"sql": Entry(1000.0, OLD), "chat": Entry(3.0, OLD)}
    changed = with_entry(table, "sql", NEW, now=5.0)
    assert merged([changed, table]) == merged([table, changed]) == changed
    assert changed["sql"].value is NEW
    assert with_entry(table, "chat", None, now=5.0)["chat"] == Entry(5.0, None)
