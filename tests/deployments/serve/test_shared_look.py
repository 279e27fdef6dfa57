"""Probes and scrapes that come at once: they share one look at the other processes, a no as well as a yes."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

import pytest

from deployments.serve.shared_look import SharedQuery
from tests.kit.engine import FakeClock
from tests.waiting import until


class Looks:
    """Each gives whether it was told to say yes, once it may end."""

    def __init__(self) -> None:
        self.number = 0
        self.may_end = asyncio.Event()
        self.result: bool | Exception = False

    async def __call__(self) -> bool:
        self.number += 1
        await self.may_end.wait()
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize("result", [False, True])
async def test_all_who_ask_share_one_look_and_its_result_for_a_moment(result: bool) -> None:
    clock, looks = FakeClock(), Looks()
    shared, looks.result = SharedQuery(looks, holds_s=1.0, clock=clock), result
    asking = [asyncio.create_task(shared()) for _ in range(100)]
    await until(lambda: looks.number)
    clock.advance(3.0)  # as long as a replica that does not answer is waited for
    looks.may_end.set()
    assert await asyncio.gather(*asking) == [result] * 100
    assert await shared() is result
    assert looks.number == 1
    clock.advance(1.0)
    assert await shared() is result
    assert looks.number == 2


async def test_a_look_does_not_belong_to_the_request_that_came_first() -> None:
    caller: ContextVar[str] = ContextVar("caller", default="nobody")
    caller.set("a client that may hang up")

    async def look() -> str:
        return caller.get()

    assert await SharedQuery(look)() == "nobody"


async def test_a_caller_that_goes_ends_no_look_of_others_and_a_failed_look_is_looked_again() -> None:
    looks = Looks()
    shared, looks.result = SharedQuery(looks), ValueError("broken")
    gone, stays = (asyncio.create_task(shared()) for _ in range(2))
    await until(lambda: looks.number)
    gone.cancel()
    looks.may_end.set()
    with pytest.raises(ValueError, match="broken"):
        await stays
    looks.result = True
    assert await shared()
    assert looks.number == 2
