"""What the processes of one model tell each other: each keeps a table, and of each name the last writer wins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from app.engine.request import Adapter


class Entry(NamedTuple):
    """What was last said of a name."""

    at: float  # seconds of wall time; 0: the config says so
    value: Any  # None: nothing holds any more


Table = Mapping[str, Entry]  # by name; never changed, only replaced


def merged(tables: Iterable[Table]) -> dict[str, Entry]:
    """Of each name the latest entry, so the order in which processes tell each other does not matter."""
    found: dict[str, Entry] = {}
    for table in tables:
        for name, entry in table.items():
            if name not in found or entry.at > found[name].at:
                found[name] = entry
    return found


def with_entry(table: Table, name: str, value: Any, *, now: float) -> dict[str, Entry]:
    """A table that says this of a name."""
    before = table.get(name)
    # Later than the one before also where that was made by a clock that is ahead.
    return {**table, name: Entry(max(now, 0.0 if before is None else before.at + 0.001), value)}


def adapters_in(table: Table) -> list[Adapter]:
    """The LoRA adapters that are served."""
    return [entry.value for entry in table.values() if isinstance(entry.value, Adapter)]
