from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from app.jobs.executors import FIRST_LIMIT, TRY_EVERY_S, OwnerSlots, Window

MAX = 100


def window_of(limit: int) -> Window:
    """One that has found so many slots, and may grow at once."""
    window = Window(MAX)
    window.refused(-1.0, limit, retry_after_s=0.0)
    return window


def grown_to(window: Window, seconds: float, *, begin_at: float = 0.0) -> int:
    """The limit after so long at a service that takes everything at once."""
    now = begin_at
    while now < begin_at + seconds:
        window.grow(now, window.limit)
        now += TRY_EVERY_S / 2
    return window.limit


def settled(window: Window, capacity: int, seconds: float, *, begin_at: float = 0.0) -> tuple[int, int]:
    """(limit, refusals) after so long at a service that has so many slots, all rows being long."""
    now, under_way, num_refused = begin_at, min(window.limit, capacity), 0
    while now < begin_at + seconds:
        window.grow(now, under_way)
        num_sent = window.limit - under_way
        under_way = min(window.limit, capacity)
        for _ in range(max(0, num_sent - (capacity - (window.limit - num_sent)))):
            window.refused(now, under_way, retry_after_s=1.0)
            num_refused += 1
        now += TRY_EVERY_S / 2
    return window.limit, num_refused


def test_it_doubles_what_it_adds_up_to_its_bound_while_no_request_is_refused() -> None:
    assert grown_to(window_of(1), 3 * TRY_EVERY_S) == 1 + 1 + 2 + 4
    assert grown_to(window_of(1), 3.0) == MAX


def test_it_begins_with_few() -> None:
    assert Window(MAX).limit == FIRST_LIMIT < MAX
    assert Window(8).limit == 8


def test_it_does_not_grow_while_it_is_not_used() -> None:
    window = window_of(1)
    window.grow(0.0, 0)
    assert window.limit == 1


def test_it_finds_the_slots_there_are_and_asks_for_more_only_as_often_as_it_is_told_to() -> None:
    window = Window(MAX)
    limit, _ = settled(window, 20, 5.0)
    assert 20 <= limit <= 21
    limit, num_refused = settled(window, 20, 10.0, begin_at=5.0)
    assert 20 <= limit <= 21
    assert num_refused <= 11
    limit, _ = settled(window, 50, 5.0, begin_at=15.0)
    assert limit >= 50


def test_refused_with_nothing_under_way_it_waits_as_long_as_it_was_told() -> None:
    window = Window(MAX)
    window.refused(10.0, 0, retry_after_s=3.0)
    window.grow(12.9, 0)
    assert window.limit == 0
    window.grow(13.0, 0)
    assert window.limit == 1


@given(st.lists(st.tuples(st.sampled_from(["take", "release", "cancel"]), st.sampled_from("abc")), max_size=60))
def test_a_slot_goes_to_the_owner_with_the_fewest_and_none_is_lost(steps: list[tuple[str, str]]) -> None:
    async def main() -> None:
        slots, num_slots = OwnerSlots(3), 3
        tasks: list[tuple[str, asyncio.Task[None]]] = []

        def held() -> Counter[str]:
            return Counter(owner for owner, task in tasks if task.done())

        for step, owner in steps:
            mine = [entry for entry in tasks if entry[0] == owner]
            if step == "take":
                tasks.append((owner, asyncio.create_task(slots.acquire(owner))))
            elif step == "release" and (done := [entry for entry in mine if entry[1].done()]):
                waiting = {each for each, task in tasks if not task.done()}
                tasks.remove(done[0])
                before = held()
                slots.release(owner)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                if waiting:
                    [winner] = (held() - before).keys()
                    assert before[winner] == min(before[each] for each in waiting)
            elif step == "cancel" and (waiters := [entry for entry in mine if not entry[1].done()]):
                waiters[0][1].cancel()
                tasks.remove(waiters[0])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert held().total() == min(num_slots, len(tasks))
            assert slots.locked() == (len(tasks) >= num_slots)
        for _, task in tasks:
            task.cancel()

    asyncio.run(main())


async def test_a_slot_that_comes_as_its_task_is_cancelled_is_given_back() -> None:
    slots = OwnerSlots(1)
    await slots.acquire("a")
    waiting = asyncio.create_task(slots.acquire("b"))
    await asyncio.sleep(0)
    slots.release("a")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not slots.locked()
