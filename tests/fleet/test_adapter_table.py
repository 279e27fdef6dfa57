from __future__ import annotations

from itertools import permutations

from app.engine.request import Adapter
from app.fleet import AdapterEntry, adapters_in, merged

OLD, NEW = Adapter(name="sql", path="/sql", digest="1"), Adapter(name="sql", path="/sql", digest="2")


def test_the_latest_entry_of_each_name_holds_in_whatever_order_tables_come() -> None:
    tables = [
        {"sql": AdapterEntry(0.0, OLD), "chat": AdapterEntry(0.0, OLD)},
        {"sql": AdapterEntry(5.0, NEW)},
        {"chat": AdapterEntry(6.0, None)},
    ]
    for order in permutations(tables):
        found = merged(order)
        assert found == {"sql": AdapterEntry(5.0, NEW), "chat": AdapterEntry(6.0, None)}
        assert adapters_in(found) == [NEW]
