"""The places for lines in flight, which all batches share, and whose lines have to wait for their owner's limits."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Places:
    """So many lines at once. While a line of an owner waits for a limit of theirs, none of their others is begun.

    So the lines that one owner has waiting are never more than there are places, and they take nobody's place.
    """

    def __init__(self, number: int) -> None:
        self._free = asyncio.Semaphore(number)
        self._num_taken: Counter[str] = Counter()
        self._num_waiting: Counter[str] = Counter()
        self._nobody_waits: dict[str, asyncio.Event] = {}

    async def take(self, owner: str) -> Place:
        """A place, as soon as one is free and no line of this owner waits for a limit."""
        while owner in self._nobody_waits:
            await self._nobody_waits[owner].wait()
        await self._acquire(owner)
        return Place(self, owner)

    def num_taken(self, owner: str) -> int:
        """Lines of this owner that are in flight."""
        return self._num_taken[owner]

    async def _acquire(self, owner: str) -> None:
        await self._free.acquire()
        self._num_taken[owner] += 1

    def _release(self, owner: str) -> None:
        self._free.release()
        self._num_taken[owner] -= 1

    def _begin_to_wait(self, owner: str) -> None:
        self._num_waiting[owner] += 1
        self._nobody_waits.setdefault(owner, asyncio.Event())

    def _end_to_wait(self, owner: str) -> None:
        self._num_waiting[owner] -= 1
        if not self._num_waiting[owner]:
            self._nobody_waits.pop(owner).set()


class Place:
    """One of them, from when it was taken until it is given back."""

    def __init__(self, places: Places, owner: str) -> None:
        self._places = places
        self._owner = owner
        self._is_held = True

    def give_back(self) -> None:
        """For the next line; nothing if it is not held now."""
        if self._is_held:
            self._is_held = False
            self._places._release(self._owner)

    def done(self, _: object) -> None:
        """As a task's callback: its line has ended."""
        self.give_back()

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """While its line waits for a limit of its owner the place is another's; at the end it is taken again."""
        self.give_back()
        self._places._begin_to_wait(self._owner)
        try:
            yield
            await self._places._acquire(self._owner)
            self._is_held = True
        finally:
            self._places._end_to_wait(self._owner)
