"""A table shared by the processes of one model. Each process stores a copy, and the latest entry for a name wins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from app.engine.request import Adapter


class Entry(NamedTuple):
    at: float  # Unix time of the entry; 0 for an entry from the config
    value: Any  # None if the name was removed


Table = Mapping[str, Entry]  # by name; immutable


def merged(tables: Iterable[Table]) -> dict[str, Entry]:
    """Return the latest entry for each name. The order of the tables does not matter."""
    found: dict[str, Entry] = {}
    for table in tables:
        for name, entry in table.items():
            if name not in found or entry.at > found[name].at:
                found[name] = entry
    return found


def with_entry(table: Table, name: str, value: Any, *, now: float) -> dict[str, Entry]:
    """Return a copy of the table with a new value for a name."""
    before = table.get(name)
    # The new entry must be later than the previous one, even if that was written by a machine whose clock is ahead.
    return {**table, name: Entry(max(now, 0.0 if before is None else before.at + 0.001), value)}


def adapters_in(table: Table) -> list[Adapter]:
    """Return the LoRA adapters in the table, without removed adapters."""
    return [entry.value for entry in table.values() if isinstance(entry.value, Adapter)]
