"""Finds items that kill the process that computes them, by counting losses and running suspects one by one.

A dead process cannot report which of its items killed it. The suspects are the items that had made no progress. The
culprit is the suspect that also kills the next process when it runs alone.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(slots=True)
class _Losses:
    """One item's losses: for each, the place where the item was running, such as a replica, or None if unknown."""

    places: list[Hashable] = field(default_factory=list)
    without_progress: list[Hashable] = field(default_factory=list)  # losses since the item last made progress
    caused_by_item: bool = False  # whether the item caused these losses, because it is a culprit


class Culprits(Generic[KeyT]):
    """Counts each item's losses. A lost place is evidence against the items that had made no progress on it.

    After `alone_after` such losses in a row, an item is a suspect and should run alone. After `max_losses`, it is a
    culprit and should fail. Losses caused by a known culprit do not count against other items.
    """

    def __init__(self, *, max_losses: int, alone_after: int | None = None, max_remembered: int | None = None) -> None:
        """`alone_after` defaults to `max_losses`. `max_remembered` limits the number of items, or None for no limit."""
        self._max_losses = max_losses
        self._alone_after = max_losses if alone_after is None else alone_after
        self._max_remembered = max_remembered
        self._losses: OrderedDict[KeyT, _Losses] = OrderedDict()  # ordered by last loss, the oldest first
        self._known_culprits: deque[Hashable] = deque(maxlen=100)  # the last places that culprits killed

    def __len__(self) -> int:
        return len(self._losses)

    def note_loss(
        self, key: KeyT, place: Hashable = None, *, has_progressed: bool = False, was_trusted: bool = True
    ) -> None:
        """Record that `place`, where this item was running, was lost. `was_trusted`: the place was not suspected."""
        losses = self._losses.setdefault(key, _Losses())
        self._losses.move_to_end(key)
        losses.places.append(place)
        if has_progressed:
            losses.without_progress.clear()
        elif was_trusted:
            losses.without_progress.append(place)
        if self.is_culprit(key):
            losses.caused_by_item = True
            self._known_culprits.extend(each for each in losses.without_progress if each is not None)
        if self._max_remembered is not None and len(self._losses) > self._max_remembered:
            self._losses.popitem(last=False)

    def num_losses(self, key: KeyT) -> int:
        """Return the number of the item's losses, except those that another item is known to have caused."""
        losses = self._discounted(key)
        return len(losses.places) if losses else 0

    def losses_without_progress(self, key: KeyT) -> int:
        """As `num_losses`, but count only the losses since the item last made progress."""
        losses = self._discounted(key)
        return len(losses.without_progress) if losses else 0

    def is_suspect(self, key: KeyT) -> bool:
        """Whether the item should run alone."""
        return self.losses_without_progress(key) >= self._alone_after

    def is_culprit(self, key: KeyT) -> bool:
        """Whether the item should fail."""
        return self.losses_without_progress(key) >= self._max_losses

    def forget(self, key: KeyT) -> None:
        """Drop an item that has ended."""
        self._losses.pop(key, None)

    def is_alive(self, place: Hashable) -> None:
        """Record that `place` was only unresponsive, not dead, so no item has killed it."""
        if place in self._known_culprits:
            self._known_culprits.remove(place)

    def _discounted(self, key: KeyT) -> _Losses | None:
        losses = self._losses.get(key)
        if losses and self._known_culprits and not losses.caused_by_item:
            losses.places = [each for each in losses.places if each not in self._known_culprits]
            losses.without_progress = [each for each in losses.without_progress if each not in self._known_culprits]
        return losses


class SuspectQueue:
    """Lets suspects run one by one, each until its first token or its next loss."""

    def __init__(self, *, longest_s: float = 2.0) -> None:
        """A turn ends after at most `longest_s`, because a queue or a long prompt may delay the first token."""
        self._longest_s = longest_s
        self._turn = asyncio.Lock()
        self._request_id: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def begin(self, request_id: str) -> None:
        """Wait until no other suspect has a turn, and then start this request's turn."""
        await self._turn.acquire()
        self._request_id = request_id
        self._timer = asyncio.get_running_loop().call_later(self._longest_s, self.end, request_id)

    def end(self, request_id: str) -> None:
        """End this request's turn, after a token, a loss, or the time limit. Does nothing outside its turn."""
        if request_id == self._request_id:
            assert self._timer is not None, "every turn has a time limit"
            self._timer.cancel()
            self._request_id = None
            self._turn.release()
