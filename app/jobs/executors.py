"""Computes the items of a job by requests: to the fleet of this service, or to a remote service.

The other executor, a pool of engines, is in `deployments/bulk/pool.py`: it needs Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

from app.errors import EngineStopped, Failure, Overloaded, Unavailable
from app.fair import FairQueue
from app.jobs.job import Answer, Answered, Item, ItemOrigin
from app.jobs.outputs import ITEM_ATTEMPTS
from app.jobs.runner import Executor, JobRun

logger = logging.getLogger(__name__)

TICK_S = 0.1
BEGUN_AFTER_S = 1.0  # an item that was not refused by then is computed
# An item that is under way for longer is neither refused nor waits for a replica, so the service is there. It must be
# more than replicas.place_timeout_s of the service.
ALIVE_AFTER_S = 60.0
FAILURE_PAUSE_S = 2.0  # before an item that the server failed on is sent again
UNAVAILABLE_PAUSE_S = 2.0
MAX_PAUSE_S = 30.0  # a full fleet is asked again after at most so long
TRY_EVERY_S = 0.2
MAX_OUTAGE_PAUSE_S = 5.0
_MIN_READ_AHEAD = 16  # items
_SERVICE = 0  # the one engine that the backlog of a `RequestExecutor` knows


class ServiceFull(Exception):
    """There is no room for this item now, or its owner has used up a limit."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"the service is full for {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class ServiceGone(Exception):
    """The service does not answer, or says that it cannot serve; the item is not the cause."""


class RequestClient(Protocol):
    """Sends items, each as a request in the lowest class."""

    async def answer(self, item: Item) -> Answered:
        """The response to an item; one with status 500 or more means that the server failed on it.

        Raises ServiceFull or ServiceGone when the item can be sent again later, Failure when none ever can.
        """


class FleetClient(RequestClient):
    """The replicas of this service, by the handler of its requests."""

    def __init__(self, answer: Answer, owner: str, job_id: str) -> None:
        self._answer = answer
        self._owner = owner
        self._job_id = job_id

    async def answer(self, item: Item) -> Answered:
        try:
            return await self._answer(self._owner, item.url, item.body, ItemOrigin(self._job_id, item.number))
        except Overloaded as error:
            raise ServiceFull(min(error.retry_after_s, MAX_PAUSE_S)) from error
        except (Unavailable, EngineStopped) as error:
            # Not `ServiceGone`: it may be one model of several, and the items of the others go on.
            raise ServiceFull(UNAVAILABLE_PAUSE_S) from error


class Window:
    """`limit` items may be under way. It grows while they are, the faster the longer none is refused. No clock here.

    A service that has no idle slot refuses at once. So an item that has not been refused is computed, and a refusal
    gives the exact number of those; there is nothing to halve, as TCP must, which learns of a full queue by its losses.
    """

    def __init__(self, max_limit: int, limit: int = 1) -> None:
        self._max_limit = max_limit
        self.limit = limit
        self._increase = 1
        self._grows_at = 0.0
        self.gone_since: float | None = None  # when the service was heard of last, while it does not answer

    def grow(self, now: float, num_under_way: int) -> None:
        """Called now and then, when there are items to send. Times are in seconds of one clock."""
        if num_under_way < self.limit or now < self._grows_at:
            return
        self.limit = min(self.limit + self._increase, self._max_limit)
        self._increase *= 2
        self._grows_at = now + TRY_EVERY_S

    def refused(self, now: float, num_under_way: int, *, retry_after_s: float) -> None:
        """One was refused, and so many others were not: the service has room for those and should be asked later."""
        self.limit = min(self.limit, num_under_way)
        self._increase = 1
        self._grows_at = max(self._grows_at, now + max(retry_after_s, TRY_EVERY_S))
        self.gone_since = None

    def answered(self) -> None:
        """The service has answered an item."""
        self.gone_since = None

    def gone(self, now: float) -> None:
        """The service does not answer: one item tries again after a pause, the longer the longer that lasts."""
        if self.gone_since is None:
            self.gone_since = now
        self.limit, self._increase = 0, 1
        self._grows_at = now + min(max(TRY_EVERY_S, (now - self.gone_since) / 2), MAX_OUTAGE_PAUSE_S)


class OwnerSlots:
    """Slots that owners share: one that is free goes to the owner that has the fewest, in turns where that is the same.

    Without shares an owner with many batches would have nearly all of them.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()

    def locked(self) -> bool:
        """Whether `acquire` would wait."""
        return not self._num_free

    async def acquire(self, owner: str) -> None:
        """Returns when the owner has one more."""
        slot = asyncio.get_running_loop().create_future()
        self._queue.push(owner, slot)
        self._give()
        try:
            await slot
        except asyncio.CancelledError:
            if not slot.cancelled():  # it came in the same moment
                self.release(owner)
            raise

    def release(self, owner: str) -> None:
        """The owner has one less."""
        self._queue.end(owner)
        self._num_free += 1
        self._give()

    def _give(self) -> None:
        while self._num_free and (taken := self._queue.take()) is not None:
            owner, slot = taken
            if slot.done():  # it was cancelled
                self._queue.end(owner)
            else:
                slot.set_result(None)
                self._num_free -= 1


class RequestExecutor(Executor[Item]):
    """One service as the engine of a run: as many items are under way as it has idle slots, found out by trying."""

    def __init__(
        self,
        run: JobRun[Item],
        client: RequestClient,
        *,
        window: Window,
        slots: OwnerSlots,
        owner: str = "",
        patience_s: float,
        suspects: asyncio.Lock | None = None,
    ) -> None:
        """`slots` bound the requests of all runs that share them. A run waits for one at a time, so runs of an owner
        take turns.

        A service that does not answer is waited for, at most `patience_s` seconds at a time. Runs that share `suspects`
        send one suspected item at a time.
        """
        super().__init__(run)
        self._client = client
        self._window = window
        self._slots = slots
        self._owner = owner
        self._one_suspect = suspects or asyncio.Lock()
        self._patience_s = patience_s
        self._sent_at: dict[int, float] = {}  # items under way
        self._num_failures: dict[int, int] = {}  # by item
        self._next_slot: asyncio.Task[None] | None = None  # that waits for one, or has one that is not used yet
        self._looked_at = 0.0
        self._trouble = ""

    def parts(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [self._send()]

    @property
    def num_wanted(self) -> int:
        return max(_MIN_READ_AHEAD, self._window.limit)

    @property
    def state(self) -> str:
        if self._window.gone_since is not None:
            return f"waiting for the service: {self._trouble}"
        return f"{self.num_sent:,} under way"

    @property
    def num_sent(self) -> int:
        """Items that the service has and has not answered."""
        return len(self._sent_at)

    @property
    def _num_under_way(self) -> int:
        return len(self._backlog.items_on(_SERVICE))

    async def _send(self) -> None:
        """Until nothing is left to do. Raises Failure when the service stays away, or does not take the key."""
        self._run.ready()
        try:
            async with asyncio.TaskGroup() as group:
                while not self._is_over:
                    self._look_at_the_clock(time.monotonic())
                    while self._has_next() and await self._has_slot():
                        [item] = self._backlog.take(_SERVICE, room=1, input_is_over=self._input_is_over)
                        self._next_slot = None
                        asking = self._ask_alone(item) if self._backlog.is_alone(_SERVICE) else self._ask(item)
                        group.create_task(asking).add_done_callback(lambda _: self._slots.release(self._owner))
                    await self._wait()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            await self._give_back_slot()

    def _look_at_the_clock(self, now: float) -> None:
        if self._backlog.num_waiting or self._backlog.num_suspects:
            self._window.grow(now, self._num_under_way)
        if now - self._looked_at < TICK_S:
            return
        self._looked_at = now
        self._check_patience(now)
        begun = [number for number, sent_at in self._sent_at.items() if now - sent_at > BEGUN_AFTER_S]
        self._backlog.begin(_SERVICE, begun)
        self._run.begun(begun)

    def _check_patience(self, now: float) -> None:
        gone_since = self._window.gone_since
        if gone_since is None:
            return
        if any(now - sent_at > min(ALIVE_AFTER_S, self._patience_s / 2) for sent_at in self._sent_at.values()):
            self._window.answered()
        elif now - gone_since > self._patience_s:
            raise Failure(
                f"the service has not answered for {self._patience_s:g} s: {self._trouble}; what is done is kept: go "
                f"on with --resume once it is back"
            )

    def _has_next(self) -> bool:
        has_room = self._num_under_way < self._window.limit
        return has_room and self._backlog.has_items_for(_SERVICE, input_is_over=self._input_is_over)

    async def _has_slot(self) -> bool:
        """Whether there is a slot for the next item; if not, the loop is woken once there is."""
        if self._next_slot is None and not self._slots.locked():
            await self._slots.acquire(self._owner)  # at once
            return True
        if self._next_slot is None:
            self._next_slot = asyncio.create_task(self._take_slot())
        return self._next_slot.done()

    async def _take_slot(self) -> None:
        await self._slots.acquire(self._owner)
        try:
            await self.has_changed()
        except asyncio.CancelledError:
            self._slots.release(self._owner)
            raise

    async def _give_back_slot(self) -> None:
        if self._next_slot is not None:
            self._next_slot.cancel()
            [failure] = await asyncio.gather(self._next_slot, return_exceptions=True)
            if failure is None:
                self._slots.release(self._owner)

    async def _wait(self) -> None:
        """Return when something has changed, or the clock should be looked at."""
        # Not `wait_for`: in Python 3.11 it loses a cancellation that comes together with what it waits for.
        with suppress(TimeoutError):
            async with self._changed, asyncio.timeout(TICK_S):
                await self._changed.wait()

    async def _ask_alone(self, item: Item) -> None:
        async with self._one_suspect:
            await self._ask(item)

    async def _ask(self, item: Item) -> None:
        try:
            self._sent_at[item.number] = time.monotonic()
            try:
                answered = await self._client.answer(item)
            finally:
                del self._sent_at[item.number]
        except ServiceFull as full:
            self._take_back(item)
            self._window.refused(time.monotonic(), self._num_under_way, retry_after_s=full.retry_after_s)
        except ServiceGone as gone:
            self._note_outage(str(gone))
            self._take_back(item)
        else:
            self._window.answered()
            if self._is_to_be_tried_again(item, answered):
                await asyncio.sleep(FAILURE_PAUSE_S)
                self._take_back(item)
            else:
                await self._settle(item, answered)
        await self.has_changed()

    def _is_to_be_tried_again(self, item: Item, answered: Answered) -> bool:
        if answered.status_code < 500:
            return False
        num_failures = self._num_failures[item.number] = self._num_failures.get(item.number, 0) + 1
        return num_failures < ITEM_ATTEMPTS

    async def _settle(self, item: Item, answered: Answered) -> None:
        self._num_failures.pop(item.number, None)
        await self._run.answered(item, answered)
        self._backlog.settle(_SERVICE, [item.number])

    def _note_outage(self, reason: str) -> None:
        if self._window.gone_since is None:
            logger.warning("the service does not answer, and is waited for: %s", reason)
        self._trouble = reason
        self._window.gone(time.monotonic())

    def _take_back(self, item: Item) -> None:
        """The item waits again."""
        if self._backlog.give_back(_SERVICE, item.number):
            self._run.interrupted([item.number])
