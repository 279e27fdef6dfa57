from __future__ import annotations

import asyncio
from contextlib import suppress

from app.fleet.suspect_queue import SuspectQueue


async def begun(queue: SuspectQueue, request_id: str) -> asyncio.Task[None]:
    """A request that has asked for its turn, and has it if it could."""
    task = asyncio.ensure_future(queue.begin(request_id))
    await asyncio.sleep(0.01)
    return task


def test_they_take_turns_in_the_order_in_which_they_came() -> None:
    async def main() -> None:
        queue = SuspectQueue()
        tasks = [await begun(queue, name) for name in "abc"]
        assert [task.done() for task in tasks] == [True, False, False]
        queue.end("b")
        await asyncio.sleep(0.01)
        assert not tasks[1].done(), "it was not its turn"
        queue.end("a")
        queue.end("a")
        await asyncio.sleep(0.01)
        assert [task.done() for task in tasks] == [True, True, False]
        queue.end("b")
        await tasks[2]

    asyncio.run(main())


def test_one_that_takes_too_long_lets_the_next_begin_and_no_more() -> None:
    async def main() -> None:
        queue = SuspectQueue(longest_s=0.3)
        tasks = [await begun(queue, name) for name in "abc"]
        await asyncio.wait_for(tasks[1], 1.0)
        queue.end("a")
        await asyncio.sleep(0.01)
        assert not tasks[2].done(), "the turn is b's now"
        await asyncio.wait_for(tasks[2], 1.0)

    asyncio.run(main())


def test_one_that_leaves_while_it_waits_lets_the_next_begin() -> None:
    async def main() -> None:
        queue = SuspectQueue()
        tasks = [await begun(queue, name) for name in "abc"]
        tasks[1].cancel()
        with suppress(asyncio.CancelledError):
            await tasks[1]
        queue.end("a")
        await asyncio.wait_for(tasks[2], 1.0)

    asyncio.run(main())
