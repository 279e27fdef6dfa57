"""Which of several things kills what computes them: the evidence against each, and one trial at a time.

Something dead cannot say which of its requests killed it. Of those that got nothing from it, the one that kills the
next one alone is the cause.
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
    """Where something was when it was lost. None: not known."""

    places: list[Hashable] = field(default_factory=list)
    without_progress: list[Hashable] = field(default_factory=list)  # the last of these, in a row
    are_its_doing: bool = False


class Culprits(Generic[KeyT]):
    """Counts for each thing what was lost with it. A loss is evidence against it while it had made no progress there.

    With `alone_after` such losses in a row it is a suspect, to be tried alone; with `max_losses` it is a culprit, and
    given up. Once that is known, what it killed is not counted against the others that were there.
    """

    def __init__(self, *, max_losses: int, alone_after: int | None = None, max_remembered: int | None = None) -> None:
        """`alone_after` is `max_losses` by default. `max_remembered`: things; by default, until `forget`."""
        self._max_losses = max_losses
        self._alone_after = max_losses if alone_after is None else alone_after
        self._max_remembered = max_remembered
        self._losses: OrderedDict[KeyT, _Losses] = OrderedDict()  # the longest without a loss first
        self._known_culprits: deque[Hashable] = deque(maxlen=100)  # the last places that culprits have killed

    def __len__(self) -> int:
        """Things with losses."""
        return len(self._losses)

    def note_loss(
        self, key: KeyT, place: Hashable = None, *, has_progressed: bool = False, was_sound: bool = True
    ) -> None:
        """What computed this is lost; `was_sound`: nothing was known to be wrong with it before."""
        losses = self._losses.setdefault(key, _Losses())
        self._losses.move_to_end(key)
        losses.places.append(place)
        if has_progressed:
            losses.without_progress.clear()
        elif was_sound:
            losses.without_progress.append(place)
        if self.is_culprit(key):
            losses.are_its_doing = True
            self._known_culprits.extend(each for each in losses.without_progress if each is not None)
        if self._max_remembered is not None and len(self._losses) > self._max_remembered:
            self._losses.popitem(last=False)

    def num_losses(self, key: KeyT) -> int:
        """What was lost with it, without what a known culprit has killed."""
        losses = self._discounted(key)
        return len(losses.places) if losses else 0

    def losses_without_progress(self, key: KeyT) -> int:
        """The last of these in a row that had brought nothing and had been sound."""
        losses = self._discounted(key)
        return len(losses.without_progress) if losses else 0

    def is_suspect(self, key: KeyT) -> bool:
        """Whether it should be tried alone."""
        return self.losses_without_progress(key) >= self._alone_after

    def is_culprit(self, key: KeyT) -> bool:
        """Whether it should not be tried again."""
        return self.losses_without_progress(key) >= self._max_losses

    def forget(self, key: KeyT) -> None:
        """It has ended."""
        self._losses.pop(key, None)

    def is_alive(self, place: Hashable) -> None:
        """It was not dead but silent, so nothing has killed it."""
        if place in self._known_culprits:
            self._known_culprits.remove(place)

    def _discounted(self, key: KeyT) -> _Losses | None:
        losses = self._losses.get(key)
        if losses and self._known_culprits and not losses.are_its_doing:
            losses.places = [each for each in losses.places if each not in self._known_culprits]
            losses.without_progress = [each for each in losses.without_progress if each not in self._known_culprits]
        return losses


class SuspectQueue:
    """At most one suspect is tried at a time: from its turn to its first token, or until it is lost again."""

    def __init__(self, *, longest_s: float = 2.0) -> None:
        """After `longest_s` the next request begins: the one before waits in a queue, or has much to compute."""
        self._longest_s = longest_s
        self._turn = asyncio.Lock()
        self._request_id: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def begin(self, request_id: str) -> None:
        """Wait for this request's turn."""
        await self._turn.acquire()
        self._request_id = request_id
        self._timer = asyncio.get_running_loop().call_later(self._longest_s, self.end, request_id)

    def end(self, request_id: str) -> None:
        """The request has a token, or is lost, or took too long. Nothing happens when it is not its turn."""
        if request_id == self._request_id:
            assert self._timer is not None, "a request that has its turn has a limit"
            self._timer.cancel()
            self._request_id = None
            self._turn.release()
