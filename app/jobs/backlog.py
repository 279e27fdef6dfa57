"""Which rows wait, which are on which engine, and what becomes of those whose engine dies. Plain bookkeeping.

A row is blamed for every engine that died with it. From the second time on it runs alone, after all others, so that the
row at fault is found without its neighbours; whoever has lost its engine four times, twice alone, is given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, KeysView
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from app.jobs.item_set import RowSet
from app.jobs.record import Record

DEATHS_BEFORE_ALONE = 2
MAX_DEATHS = 4


class WaitingRow(Protocol):
    """A row that can be computed, in whatever form: `PreparedRow` for an engine, `Question` for a service."""

    @property
    def number(self) -> int: ...

    def failed(self, reason: str) -> Record: ...


RowT = TypeVar("RowT", bound=WaitingRow)


@dataclass(slots=True)
class _OnEngine(Generic[RowT]):
    rows: dict[int, RowT] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    is_alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What the death of an engine comes to."""

    given_up: tuple[Record, ...]  # rows that are not tried again
    begun: tuple[int, ...]  # rows that had begun and are tried again


class Backlog(Generic[RowT]):
    """The rows of a run between the input and their records. One event loop uses it."""

    def __init__(self, settled: RowSet) -> None:
        """`settled` are the rows that have a record; the caller adds to it, this class only asks."""
        self._settled = settled
        self._waiting: deque[RowT] = deque()
        self._suspects: deque[RowT] = deque()
        self._engines: dict[int, _OnEngine[RowT]] = {}
        self._known: set[int] = set()  # waiting or on an engine
        self._deaths: dict[int, int] = {}  # row → engines that died with it

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_known(self) -> int:
        """Waiting or on an engine."""
        return len(self._known)

    @property
    def is_empty(self) -> bool:
        """Neither waiting nor on an engine."""
        return not self._known

    def add(self, rows: Iterable[RowT]) -> None:
        """Rows from the input; one that is settled or known already is passed over."""
        for row in rows:
            if row.number not in self._settled and row.number not in self._known:
                self._known.add(row.number)
                self._waiting.append(row)

    def rows_on(self, engine: int) -> KeysView[int]:
        """The rows that an engine has and has not given back."""
        return self._on(engine).rows.keys()

    def has_rows_for(self, engine: int, *, input_is_over: bool) -> bool:
        """Whether `take` would give an engine with room any rows."""
        on_engine = self._on(engine)
        takes_suspect = input_is_over and bool(self._suspects) and not on_engine.rows
        return not on_engine.is_alone and (bool(self._waiting) or takes_suspect)

    def take(self, engine: int, *, room: int, input_is_over: bool) -> list[RowT]:
        """The next rows for an engine that has room for so many; a suspect only for an empty engine, and alone."""
        if not self.has_rows_for(engine, input_is_over=input_is_over):
            return []
        on_engine = self._on(engine)
        if self._waiting:
            taken = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        else:
            taken, on_engine.is_alone = [self._suspects.popleft()], True
        on_engine.rows.update((row.number, row) for row in taken)
        return taken

    def begin(self, engine: int, rows: Iterable[int]) -> None:
        """These rows have their first token."""
        self._on(engine).begun.update(rows)

    def settle(self, engine: int, rows: Iterable[int]) -> None:
        """These rows have come back from the engine."""
        on_engine = self._on(engine)
        for number in rows:
            del on_engine.rows[number]
            on_engine.begun.discard(number)
            self._forget(number)
        on_engine.is_alone = on_engine.is_alone and bool(on_engine.rows)

    def give_back(self, engine: int, row: int) -> bool:
        """The row waits again, before others; nobody is blamed. Whether it had begun."""
        on_engine = self._on(engine)
        had_begun = row in on_engine.begun
        on_engine.begun.discard(row)
        self._waiting.appendleft(on_engine.rows.pop(row))
        return had_begun

    def lose(self, engine: int) -> Loss:
        """The engine is dead: its rows wait again, those that were there first first."""
        on_engine = self._engines.pop(engine, _OnEngine())
        given_up, again = [], []
        for number, row in on_engine.rows.items():
            deaths = self._deaths[number] = self._deaths.get(number, 0) + 1
            if deaths >= MAX_DEATHS:
                self._forget(number)
                reason = f"the engine died {deaths} times while it computed this row, twice with nothing else on it"
                given_up.append(row.failed(reason))
            elif deaths >= DEATHS_BEFORE_ALONE:
                self._suspects.append(row)
            else:
                again.append(row)
        self._waiting.extendleft(reversed(again))
        begun = on_engine.begun - {record.row for record in given_up}
        return Loss(given_up=tuple(given_up), begun=tuple(begun))

    def _forget(self, number: int) -> None:
        self._known.discard(number)
        self._deaths.pop(number, None)

    def _on(self, engine: int) -> _OnEngine[RowT]:
        return self._engines.setdefault(engine, _OnEngine())
