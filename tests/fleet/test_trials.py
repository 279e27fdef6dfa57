from __future__ import annotations

import asyncio
from contextlib import suppress

from app.fleet.trials import Trials


async def begun(trials: Trials, request_id: str) -> asyncio.Task[None]:
    """A request that has asked for its turn, and has it if it could."""
    task = asyncio.ensure_future(trials.begin(request_id))
    await asyncio.sleep(0.01)
    return task


def test_they_take_turns_in_the_order_in_which_they_came() -> None:
    async def main() -> None:
        trials = Trials()
        tasks = [await begun(trials, name) for name in "abc"]
        assert [task.done() for task in tasks] == [True, False, False]
        trials.end("b")
        await asyncio.sleep(0.01)
        assert not tasks[1].done(), "it was not on trial"
        trials.end("a")
        trials.end("a")
        await asyncio.sleep(0.01)
        assert [task.done() for task in tasks] == [True, True, False]
        trials.end("b")
        await tasks[2]

    asyncio.run(main())


def test_one_that_takes_too_long_lets_the_next_begin_and_no_more() -> None:
    async def main() -> None:
        trials = Trials(longest_s=0.3)
        tasks = [await begun(trials, name) for name in "abc"]
        await asyncio.wait_for(tasks[1], 1.0)
        trials.end("a")
        await asyncio.sleep(0.01)
        assert not tasks[2].done(), "the turn is b's now"
        await asyncio.wait_for(tasks[2], 1.0)

    asyncio.run(main())


def test_one_that_leaves_while_it_waits_keeps_nobody_waiting() -> None:
    async def main() -> None:
        trials = Trials()
        tasks = [await begun(trials, name) for name in "abc"]
        tasks[1].cancel()
        with suppress(asyncio.CancelledError):
            await tasks[1]
        trials.end("a")
        await asyncio.wait_for(tasks[2], 1.0)

    asyncio.run(main())
