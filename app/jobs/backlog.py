"""Tracks a run's unfinished items: items that are waiting, items on an engine, and items whose engine died.

When an engine dies, any item on it may be the cause. After two deaths, an item becomes a suspect. It then runs alone,
after all other items, so that its neighbours are not blamed. After four deaths, two of them alone, it is not retried.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, KeysView, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from app.culprits import Culprits
from app.jobs.job import InvalidItem
from app.jobs.results import ItemSet

MAX_DEATHS = 4


class WaitingItem(Protocol):
    """An item ready to be computed: an `Item` for a service, or a `PreparedItem` for an engine."""

    @property
    def number(self) -> int: ...

    @property
    def id(self) -> str: ...

    @property
    def num_requests(self) -> int: ...


ItemT = TypeVar("ItemT", bound=WaitingItem)


@dataclass(slots=True)
class _OnEngine(Generic[ItemT]):
    items: dict[int, ItemT] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    is_alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The items that an engine's death affected."""

    given_up: tuple[InvalidItem, ...]  # items that will not be retried
    begun: tuple[int, ...]  # numbers of the items that had begun and will be retried


class Backlog(Generic[ItemT]):
    """The items of a run that were read from the input and have no result yet. Use it in one event loop only."""

    def __init__(self, ended: ItemSet, deaths: Mapping[int, int] | None = None) -> None:
        """`ended` holds the items with a result; the caller keeps adding to it, and the backlog only reads it.

        `deaths` maps an item's number to the count of earlier processes that died while computing it.
        """
        self._ended = ended
        self._waiting: deque[ItemT] = deque()
        self.num_waiting = 0  # requests of the items in `_waiting`
        self._suspects: deque[ItemT] = deque()
        self._engines: dict[int, _OnEngine[ItemT]] = {}
        self._known: set[int] = set()  # waiting or on an engine
        deaths_before_alone = 2
        self._culprits: Culprits[int] = Culprits(max_losses=MAX_DEATHS, alone_after=deaths_before_alone)
        for number, num_deaths in (deaths or {}).items():
            for _ in range(num_deaths):
                self._culprits.note_loss(number)

    @property
    def num_suspects(self) -> int:
        """Number of items that may have killed an engine and are waiting to run alone."""
        return len(self._suspects)

    @property
    def num_known(self) -> int:
        """Number of items that are waiting or on an engine."""
        return len(self._known)

    @property
    def is_empty(self) -> bool:
        """Whether no item waits or is on an engine."""
        return not self._known

    def add(self, items: Iterable[ItemT]) -> list[InvalidItem]:
        """Add items from the input that are new and have not ended. Returns items that must not be retried."""
        given_up = []
        for item in items:
            if item.number in self._ended or item.number in self._known:
                continue
            if self._culprits.is_culprit(item.number):
                given_up.append(self._given_up(item))
                continue
            self._known.add(item.number)
            self._queue(item, is_suspect=self._culprits.is_suspect(item.number))
        return given_up

    def items_on(self, engine: int) -> KeysView[int]:
        """Return a live view of the numbers of the items on an engine."""
        return self._on(engine).items.keys()

    def num_requests_on(self, engine: int) -> int:
        """Return the number of requests of the items that are on an engine."""
        return sum(item.num_requests for item in self._on(engine).items.values())

    def has_items_for(self, engine: int, *, input_is_over: bool) -> bool:
        """Return whether `take` would return items for an engine with room."""
        on_engine = self._on(engine)
        takes_suspect = input_is_over and bool(self._suspects) and not on_engine.items
        return not on_engine.is_alone and (bool(self._waiting) or takes_suspect)

    def take(self, engine: int, *, room: int, input_is_over: bool) -> list[ItemT]:
        """Assign waiting items to an engine, or one suspect once nothing else is left, and return them.

        Stops once the items have at least `room` requests.
        """
        if not self.has_items_for(engine, input_is_over=input_is_over):
            return []
        on_engine = self._on(engine)
        taken: list[ItemT] = []
        if not self._waiting:
            taken, on_engine.is_alone = [self._suspects.popleft()], True
        while self._waiting and room > 0:
            taken.append(self._waiting.popleft())
            self.num_waiting -= taken[-1].num_requests
            room -= taken[-1].num_requests
        on_engine.items.update((item.number, item) for item in taken)
        return taken

    def is_alone(self, engine: int) -> bool:
        """Return whether the engine is running a single suspect."""
        return self._on(engine).is_alone

    def begin(self, engine: int, items: Iterable[int]) -> None:
        """Record that the engine has started to compute these items."""
        self._on(engine).begun.update(items)

    def settle(self, engine: int, items: Iterable[int]) -> None:
        """Remove items that have ended on the engine and clear their record of deaths."""
        on_engine = self._on(engine)
        for number in items:
            del on_engine.items[number]
            on_engine.begun.discard(number)
            self._forget(number)
        on_engine.is_alone = on_engine.is_alone and bool(on_engine.items)

    def give_back(self, engine: int, item: int) -> bool:
        """Move an item that the engine refused to the end of the queue, so that it does not delay other items.

        Returns whether the item had begun.
        """
        on_engine = self._on(engine)
        had_begun = item in on_engine.begun
        on_engine.begun.discard(item)
        self._queue(on_engine.items.pop(item), is_suspect=on_engine.is_alone)
        on_engine.is_alone = False
        return had_begun

    def lose(self, engine: int) -> Loss:
        """Requeue a dead engine's items, in order, at the front of the queue, except suspects and items given up."""
        on_engine = self._engines.pop(engine, _OnEngine())
        given_up, again = [], []
        for number, item in on_engine.items.items():
            self._culprits.note_loss(number)
            if self._culprits.is_culprit(number):
                given_up.append(self._given_up(item))
                self._forget(number)
            elif self._culprits.is_suspect(number):
                self._suspects.append(item)
            else:
                again.append(item)
        self._waiting.extendleft(reversed(again))
        self.num_waiting += sum(item.num_requests for item in again)
        begun = on_engine.begun - {invalid.number for invalid in given_up}
        return Loss(given_up=tuple(given_up), begun=tuple(begun))

    def _queue(self, item: ItemT, *, is_suspect: bool) -> None:
        if is_suspect:
            self._suspects.append(item)
        else:
            self._waiting.append(item)
            self.num_waiting += item.num_requests

    def _forget(self, number: int) -> None:
        self._known.discard(number)
        self._culprits.forget(number)

    def _on(self, engine: int) -> _OnEngine[ItemT]:
        return self._engines.setdefault(engine, _OnEngine())

    def _given_up(self, item: ItemT) -> InvalidItem:
        num_deaths = self._culprits.num_losses(item.number)
        reason = f"the engine died {num_deaths} times while computing this item, twice while computing nothing else"
        return InvalidItem(number=item.number, id=item.id, reason=reason)
