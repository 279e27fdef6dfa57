"""The LoRA adapters of one model, as ingresses and replicas tell each other: each process keeps a table and merges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from app.engine.request import Adapter


class AdapterEntry(NamedTuple):
    """What was last said of a name."""

    at: float  # seconds of wall time; 0: the config says so
    adapter: Adapter | None  # None: no longer served


AdapterTable = Mapping[str, AdapterEntry]  # by name; never changed, only replaced


def merged(tables: Iterable[AdapterTable]) -> dict[str, AdapterEntry]:
    """Of each name the latest entry, so the order in which processes tell each other does not matter."""
    found: dict[str, AdapterEntry] = {}
    for table in tables:
        for name, entry in table.items():
            if name not in found or entry.at > found[name].at:
                found[name] = entry
    return found


def adapters_in(table: AdapterTable) -> list[Adapter]:
    """Those that are served."""
    return [entry.adapter for entry in table.values() if entry.adapter is not None]
