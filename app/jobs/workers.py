"""What a run's engines and a service have in common: they take rows from a backlog and report what becomes of them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any, Generic, Protocol

from app.jobs.backlog import Backlog, Loss, RowT
from app.jobs.engine_worker import Harvest


class Account(Protocol):
    """Who hears what becomes of the rows: the run."""

    def ready(self) -> None:
        """Rows are computed from now on."""

    def begun(self, rows: Sequence[int]) -> None:
        """Rows are computed; some may have been named before."""

    def book(self, harvest: Harvest) -> None:
        """What has come. Raises Failure when it cannot be kept."""

    def lost(self, loss: Loss) -> None:
        """An engine has died. Raises Failure when that cannot be kept."""

    def interrupted(self, rows: Sequence[int]) -> None:
        """Rows that had begun begin again: whoever computed them is gone and comes back."""


class Workers(ABC, Generic[RowT]):
    """Computes the rows of a backlog. Everything happens in one event loop."""

    def __init__(self, backlog: Backlog[RowT], account: Account) -> None:
        self._backlog = backlog
        self._account = account
        self._input_is_over = False
        self._changed = asyncio.Condition()

    @abstractmethod
    def parts(self) -> Sequence[Coroutine[Any, Any, None]]:
        """What runs side by side until the run is over. The first error of any ends the run."""

    @property
    @abstractmethod
    def state(self) -> str:
        """In words, for the line of progress."""

    @property
    @abstractmethod
    def num_wanted(self) -> int:
        """As many rows should wait in the backlog, so that nobody waits for the input."""

    async def wait_for_room(self) -> None:
        """Return when the backlog is shorter than what is taken next."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._backlog.num_waiting < self.num_wanted)

    async def has_changed(self) -> None:
        """Wake whoever waits: rows were added or taken, or the input is over."""
        async with self._changed:
            self._changed.notify_all()

    async def end_of_input(self) -> None:
        """No more rows will be added."""
        self._input_is_over = True
        await self.has_changed()

    async def over(self) -> None:
        """Return when the input is over and no row waits or is under way."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_over)

    @property
    def _is_over(self) -> bool:
        return self._input_is_over and self._backlog.is_empty
