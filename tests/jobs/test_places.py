"""Who gets a place, and that whoever waits for a limit takes nobody's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from app.jobs.places import Place, Places


def run(use: Callable[[Places], Awaitable[None]], number: int = 2) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            await use(Places(number))

    asyncio.run(main())


async def is_free(places: Places, owner: str) -> Place | None:
    """A place for this owner, if there is one at once."""
    taking = asyncio.create_task(places.take(owner))
    for _ in range(5):
        await asyncio.sleep(0)
    if not taking.done():
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        return None
    return taking.result()


def test_there_are_so_many_and_no_more() -> None:
    async def use(places: Places) -> None:
        first, _ = await places.take("ann"), await places.take("bob")
        assert await is_free(places, "eve") is None
        assert (places.num_taken("ann"), places.num_taken("eve")) == (1, 0)
        first.give_back()
        first.give_back()
        assert await is_free(places, "eve") is not None
        assert await is_free(places, "eve") is None, "given back twice is once"

    run(use)


async def lend(place: Place, until: asyncio.Event) -> None:
    async with place.lent():
        await until.wait()


def test_a_line_that_waits_for_a_limit_lends_its_place_to_other_owners() -> None:
    async def use(places: Places) -> None:
        limited, over = await places.take("ann"), asyncio.Event()
        waiting = asyncio.create_task(lend(limited, over))
        others = [await places.take("bob") for _ in range(2)]
        over.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done(), "it takes its place again when one is free"
        others[0].give_back()
        await waiting
        assert (places.num_taken("ann"), places.num_taken("bob")) == (1, 1)

    run(use)


def test_no_other_line_of_an_owner_begins_while_one_waits_for_a_limit() -> None:
    async def use(places: Places) -> None:
        over = asyncio.Event()
        lines = [await places.take("ann") for _ in range(2)]
        waiting = [asyncio.create_task(lend(line, over)) for line in lines]
        await asyncio.sleep(0)
        assert await is_free(places, "ann") is None
        next_line = asyncio.create_task(places.take("ann"))
        over.set()
        await asyncio.gather(*waiting)
        assert not next_line.done()
        lines[0].give_back()
        await next_line
        assert places.num_taken("ann") == 2

    run(use)


def test_whoever_is_cancelled_while_waiting_holds_nothing() -> None:
    async def use(places: Places) -> None:
        line: Any = await places.take("ann")
        waiting = asyncio.create_task(lend(line, asyncio.Event()))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        line.done(waiting)
        assert places.num_taken("ann") == 0
        assert [await is_free(places, "ann") is not None for _ in range(3)] == [True, True, False]

    run(use)
