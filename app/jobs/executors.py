"""The batches of a service on its own replicas, in their lowest class. Here a batch item is sent, and tried again.

The other executor, a pool of engines, is in `deployments/bulk/pool.py`: it needs Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from app.batches import Answer, Answered, ItemOrigin
from app.errors import EngineStopped, Overloaded, Unavailable
from app.fair import FairQueue
from app.jobs.job import Item, ItemResult, Job
from app.jobs.outputs import BatchFormat
from app.jobs.results import ResultStore
from app.jobs.runner import Executor, JobRun, Source

TICK_S = 0.1
BEGUN_AFTER_S = 1.0  # an item that was not refused by then is computed
FAILURE_PAUSE_S = 2.0  # before an item that the server failed on is sent again
UNAVAILABLE_PAUSE_S = 2.0  # it may be one model of several, and the items of the others go on
MAX_PAUSE_S = 30.0  # a full fleet is asked again after at most so long
TRY_EVERY_S = 0.2
LARGE_LINE_BYTES, MAX_LARGE_LINES = 256 * 1024, 32  # so many lines of more bytes are in memory to be computed
FIRST_LIMIT = 32  # items that a batch sends before it knows how many slots are idle
_FLEET = 0  # the one engine that the backlog of a `FleetExecutor` knows


class FleetExecution:
    """What all batches of a service share: the slots, the turn of large lines, the place of one suspect."""

    def __init__(self, answer: Answer, *, max_in_flight: int) -> None:
        """As many items are in flight at once over all batches as `max_in_flight` says. Owners have equal shares; the
        batches of an owner take turns.
        """
        self.answer = answer
        self.max_in_flight = max_in_flight
        self.slots = OwnerSlots(max_in_flight)
        self.turn = asyncio.Lock()  # a large answer's line takes some ten times its memory
        self.one_suspect = asyncio.Lock()
        self.large_lines = asyncio.Semaphore(MAX_LARGE_LINES)

    async def run(
        self,
        job: Job,
        results: ResultStore,
        source: Source[Item],
        on_results: Callable[[Sequence[ItemResult]], None],
        on_tokens: Callable[[int], None],
        is_paused: asyncio.Event,
    ) -> None:
        """Return when every item has ended; once `is_paused`, when those under way have. Cancelled, it aborts these.

        What has not ended is left to a later run.
        """
        form = BatchFormat(job.id)
        run = JobRun[Item](results, form.invalid, on_results=on_results, on_tokens=on_tokens, deaths=results.deaths)
        await run.run(FleetExecutor(run, self, job, form, is_paused), source)


class FleetExecutor(Executor[Item]):
    """One batch on the fleet: as many items are under way as the fleet has idle slots, found out by trying."""

    def __init__(
        self, run: JobRun[Item], shared: FleetExecution, job: Job, form: BatchFormat, is_paused: asyncio.Event
    ) -> None:
        """A batch waits for one of the shared slots at a time, so that the batches of an owner take turns."""
        super().__init__(run)
        self._shared = shared
        self._slots = shared.slots
        self._window = Window(shared.max_in_flight)
        self._job = job
        self._form = form
        self._is_paused = is_paused  # no item is sent any more
        self._sent_at: dict[int, float] = {}  # items under way
        self._num_failures: dict[int, int] = {}  # by item
        self._next_slot: asyncio.Task[None] | None = None  # that waits for one, or has one that is not used yet
        self._looked_at = 0.0

    def parts(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [self._send()]

    @property
    def num_wanted(self) -> int:
        min_read_ahead, max_read_ahead = 16, 32  # items, each may have megabytes
        return min(max(min_read_ahead, self._window.limit), max_read_ahead)

    @property
    def _num_under_way(self) -> int:
        return len(self._backlog.items_on(_FLEET))

    @property
    def _is_over(self) -> bool:
        return super()._is_over or (self._is_paused.is_set() and not self._num_under_way)

    async def _send(self) -> None:
        """Until nothing is left to do."""
        self._run.ready()
        try:
            async with asyncio.TaskGroup() as group:
                while not self._is_over:
                    self._look_at_the_clock(time.monotonic())
                    while self._has_next() and await self._has_slot():
                        [item] = self._backlog.take(_FLEET, room=1, input_is_over=self._input_is_over)
                        self._next_slot = None
                        asking = self._ask_alone(item) if self._backlog.is_alone(_FLEET) else self._ask(item)
                        group.create_task(asking).add_done_callback(lambda _: self._slots.release(self._job.owner))
                    await self._wait()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            await self._give_back_slot()
        await self.has_changed()

    def _look_at_the_clock(self, now: float) -> None:
        if self._backlog.num_waiting or self._backlog.num_suspects:
            self._window.grow(now, self._num_under_way)
        if now - self._looked_at < TICK_S:
            return
        self._looked_at = now
        begun = [number for number, sent_at in self._sent_at.items() if now - sent_at > BEGUN_AFTER_S]
        self._backlog.begin(_FLEET, begun)
        self._run.begun(begun)

    def _has_next(self) -> bool:
        has_room = self._num_under_way < self._window.limit and not self._is_paused.is_set()
        return has_room and self._backlog.has_items_for(_FLEET, input_is_over=self._input_is_over)

    async def _has_slot(self) -> bool:
        if self._next_slot is None and not self._slots.locked():
            await self._slots.acquire(self._job.owner)  # at once
            return True
        if self._next_slot is None:
            self._next_slot = asyncio.create_task(self._take_slot())
        return self._next_slot.done()

    async def _take_slot(self) -> None:
        await self._slots.acquire(self._job.owner)
        try:
            await self.has_changed()
        except asyncio.CancelledError:
            self._slots.release(self._job.owner)
            raise

    async def _give_back_slot(self) -> None:
        if self._next_slot is not None:
            self._next_slot.cancel()
            [failure] = await asyncio.gather(self._next_slot, return_exceptions=True)
            if failure is None:
                self._slots.release(self._job.owner)

    async def _wait(self) -> None:
        # Not `wait_for`: in Python 3.11 it loses a cancellation that comes together with what it waits for.
        with suppress(TimeoutError):
            async with self._changed, asyncio.timeout(TICK_S):
                await self._changed.wait()

    async def _ask_alone(self, item: Item) -> None:
        async with self._shared.one_suspect:
            await self._ask(item)

    async def _ask(self, item: Item) -> None:
        """Send an item; refused or failed it waits again, else its answer is its end."""
        try:
            answered = await self._answer(item)
        except Overloaded as error:
            self._refused(item, min(error.retry_after_s, MAX_PAUSE_S))
        except (Unavailable, EngineStopped):
            self._refused(item, UNAVAILABLE_PAUSE_S)
        else:
            if self._is_to_be_tried_again(item, answered):
                await asyncio.sleep(FAILURE_PAUSE_S)
                self._take_back(item)
            else:
                await self._end(item, answered)
        await self.has_changed()

    async def _answer(self, item: Item) -> Answered:
        async with self._shared.large_lines if item.num_bytes > LARGE_LINE_BYTES else nullcontext():
            self._sent_at[item.number] = time.monotonic()
            try:
                origin = ItemOrigin(self._job.id, item.number)
                return await self._shared.answer(self._job.owner, item.url, item.body, origin)
            finally:
                del self._sent_at[item.number]

    def _refused(self, item: Item, retry_after_s: float) -> None:
        self._take_back(item)
        self._window.refused(time.monotonic(), self._num_under_way, retry_after_s=retry_after_s)

    def _is_to_be_tried_again(self, item: Item, answered: Answered) -> bool:
        if answered.status_code < 500:
            return False
        num_failures = self._num_failures[item.number] = self._num_failures.get(item.number, 0) + 1
        item_attempts = 3  # of an item that the server fails on; the fleet has isolated a poisonous request by then
        return num_failures < item_attempts

    async def _end(self, item: Item, answered: Answered) -> None:
        self._num_failures.pop(item.number, None)
        if answered.is_large:
            async with self._shared.turn:
                result = await asyncio.to_thread(self._form.answered, item, answered)
                await self._run.ended(result, is_large=True)
        else:
            await self._run.ended(self._form.answered(item, answered))
        self._backlog.settle(_FLEET, [item.number])

    def _take_back(self, item: Item) -> None:
        if self._backlog.give_back(_FLEET, item.number):
            self._run.interrupted([item.number])


class Window:
    """`limit` items may be under way. It grows while they are, the faster the longer none is refused. No clock here.

    A service that has no idle slot refuses at once. So an item that has not been refused is computed, and a refusal
    gives the exact number of those; there is nothing to halve, as TCP must, which learns of a full queue by its losses.
    """

    def __init__(self, max_limit: int) -> None:
        self._max_limit = max_limit
        self.limit = min(max_limit, FIRST_LIMIT)
        self._increase = 1
        self._grows_at = 0.0

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

    def num_held(self, owner: str) -> int:
        """How many the owner has."""
        return self._queue.num_running(owner)

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
