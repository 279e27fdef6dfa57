"""Computes batches on the service's own replicas, in the lowest priority class. Sends the items and retries them.

The other executor, a pool of engines, is in `deployments/bulk/pool.py`, because it requires Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from app.batches import Answer, ItemOrigin, ItemResponse
from app.errors import EngineStopped, Overloaded, Unavailable
from app.fair import FairQueue
from app.jobs.job import Item, ItemResult, Job
from app.jobs.outputs import BatchFormat
from app.jobs.results import ResultStore
from app.jobs.runner import Executor, JobRun, Source

TICK_S = 0.1
BEGUN_AFTER_S = 1.0  # an item that has not been refused for this long counts as begun
FAILURE_PAUSE_S = 2.0  # the pause before an item is sent again after a server error
UNAVAILABLE_PAUSE_S = 2.0  # short, because one model may be unavailable while items for other models are served
MAX_PAUSE_S = 30.0  # the longest pause before the window of a full fleet grows again
TRY_EVERY_S = 0.2
LARGE_LINE_BYTES, MAX_LARGE_LINES = 256 * 1024, 32  # at most 32 items with lines over 256 KiB are computed at once
FIRST_LIMIT = 32  # items that a batch sends before it knows how many slots are idle
_FLEET = 0  # a `FleetExecutor` treats the whole fleet as one engine of its backlog


class FleetExecution:
    """Runs batches under the limits that all batches of a service share: items in flight, large lines, and suspects."""

    def __init__(self, answer: Answer, *, max_in_flight: int) -> None:
        """`max_in_flight` limits the items of all batches. Owners share it equally; an owner's batches take turns."""
        self.answer = answer
        self.max_in_flight = max_in_flight
        self.slots = OwnerSlots(max_in_flight)
        self.turn = asyncio.Lock()  # held to write a large answer's line, which needs about ten times its memory
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
        """Compute a batch. Returns when every item has ended, or when `is_paused` is set and no item is in flight.

        Cancelling the call aborts the items in flight. A later run computes the items that have not ended.
        """
        form = BatchFormat(job.id)
        run = JobRun[Item](results, form.invalid, on_results=on_results, on_tokens=on_tokens, deaths=results.deaths)
        await run.run(FleetExecutor(run, self, job, form, is_paused), source)


class FleetExecutor(Executor[Item]):
    """Computes one batch on the fleet. To learn how many slots are idle, it sends items until some are refused."""

    def __init__(
        self, run: JobRun[Item], shared: FleetExecution, job: Job, form: BatchFormat, is_paused: asyncio.Event
    ) -> None:
        super().__init__(run)
        self._shared = shared
        self._slots = shared.slots
        self._window = Window(shared.max_in_flight)
        self._job = job
        self._form = form
        self._is_paused = is_paused  # when set, no more items are sent
        self._sent_at: dict[int, float] = {}  # send times of the items in flight, by item number
        self._num_failures: dict[int, int] = {}  # server errors, by item number
        # Waits for a slot, or holds an unused one. A batch waits for only one of the shared slots at a time, so that
        # the batches of an owner take turns.
        self._next_slot: asyncio.Task[None] | None = None
        self._looked_at = 0.0

    def parts(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [self._send()]

    @property
    def num_wanted(self) -> int:
        min_read_ahead, max_read_ahead = 16, 32  # items; few, because each may have megabytes
        return min(max(min_read_ahead, self._window.limit), max_read_ahead)

    @property
    def _num_under_way(self) -> int:
        return len(self._backlog.items_on(_FLEET))

    @property
    def _is_over(self) -> bool:
        return super()._is_over or (self._is_paused.is_set() and not self._num_under_way)

    async def _send(self) -> None:
        """Send items until none is left."""
        self._run.ready()
        try:
            async with asyncio.TaskGroup() as group:
                while not self._is_over:
                    self._tick(time.monotonic())
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

    def _tick(self, now: float) -> None:
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
            await self._slots.acquire(self._job.owner)  # returns immediately
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
        # Use `timeout`, because `wait_for` of Python 3.11 loses a cancellation that arrives together with the result.
        with suppress(TimeoutError):
            async with self._changed, asyncio.timeout(TICK_S):
                await self._changed.wait()

    async def _ask_alone(self, item: Item) -> None:
        async with self._shared.one_suspect:
            await self._ask(item)

    async def _ask(self, item: Item) -> None:
        """Send an item and store its answer. After a refusal or a server error, the item is queued again."""
        try:
            answered = await self._answer(item)
        except Overloaded as error:
            self._refused(item, min(error.retry_after_s, MAX_PAUSE_S))
        except (Unavailable, EngineStopped):
            self._refused(item, UNAVAILABLE_PAUSE_S)
        else:
            if self._should_retry(item, answered):
                await asyncio.sleep(FAILURE_PAUSE_S)
                self._requeue(item)
            else:
                await self._end(item, answered)
        await self.has_changed()

    async def _answer(self, item: Item) -> ItemResponse:
        async with self._shared.large_lines if item.num_bytes > LARGE_LINE_BYTES else nullcontext():
            self._sent_at[item.number] = time.monotonic()
            try:
                origin = ItemOrigin(self._job.id, item.number)
                return await self._shared.answer(self._job.owner, item.url, item.body, origin)
            finally:
                del self._sent_at[item.number]

    def _refused(self, item: Item, retry_after_s: float) -> None:
        self._requeue(item)
        self._window.refused(time.monotonic(), self._num_under_way, retry_after_s=retry_after_s)

    def _should_retry(self, item: Item, answered: ItemResponse) -> bool:
        if answered.status_code < 500:
            return False
        num_failures = self._num_failures[item.number] = self._num_failures.get(item.number, 0) + 1
        item_attempts = 3  # by then the fleet has isolated a request that crashes its replicas
        return num_failures < item_attempts

    async def _end(self, item: Item, answered: ItemResponse) -> None:
        self._num_failures.pop(item.number, None)
        if answered.is_large:
            async with self._shared.turn:
                result = await asyncio.to_thread(self._form.answered, item, answered)
                await self._run.ended(result, is_large=True)
        else:
            await self._run.ended(self._form.answered(item, answered))
        self._backlog.settle(_FLEET, [item.number])

    def _requeue(self, item: Item) -> None:
        if self._backlog.give_back(_FLEET, item.number):
            self._run.interrupted([item.number])


class Window:
    """A limit on items in flight. It grows exponentially while it is reached and no item is refused.

    A service without an idle slot refuses immediately, so every item that was not refused is being computed, and a
    refusal reveals the exact capacity. TCP halves its window instead, because a loss shows only that a queue is full.
    """

    def __init__(self, max_limit: int) -> None:
        self._max_limit = max_limit
        self.limit = min(max_limit, FIRST_LIMIT)
        self._increase = 1
        self._grows_at = 0.0

    def grow(self, now: float, num_under_way: int) -> None:
        """Raise the limit if it is reached and the pause is over. Call this often while items wait."""
        if num_under_way < self.limit or now < self._grows_at:
            return
        self.limit = min(self.limit + self._increase, self._max_limit)
        self._increase *= 2
        self._grows_at = now + TRY_EVERY_S

    def refused(self, now: float, num_under_way: int, *, retry_after_s: float) -> None:
        """Lower the limit to the `num_under_way` items that were not refused, and pause its growth."""
        self.limit = min(self.limit, num_under_way)
        self._increase = 1
        self._grows_at = max(self._grows_at, now + max(retry_after_s, TRY_EVERY_S))


class OwnerSlots:
    """Slots shared by owners. A free slot goes to the waiting owner that holds the fewest; in a tie, owners take turns.

    Otherwise an owner with many batches would occupy nearly all slots.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()

    def locked(self) -> bool:
        """Return whether `acquire` would wait."""
        return not self._num_free

    def num_held(self, owner: str) -> int:
        return self._queue.num_running(owner)

    async def acquire(self, owner: str) -> None:
        """Wait until the owner receives a slot. The caller must `release` it."""
        slot = asyncio.get_running_loop().create_future()
        self._queue.push(owner, slot)
        self._give()
        try:
            await slot
        except asyncio.CancelledError:
            if not slot.cancelled():  # the slot was assigned at the same time
                self.release(owner)
            raise

    def release(self, owner: str) -> None:
        self._queue.end(owner)
        self._num_free += 1
        self._give()

    def _give(self) -> None:
        while self._num_free and (taken := self._queue.take()) is not None:
            owner, slot = taken
            if slot.done():  # the waiting call was cancelled
                self._queue.end(owner)
            else:
                slot.set_result(None)
                self._num_free -= 1
