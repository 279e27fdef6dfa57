"""Requests that kill the replica that computes them, among others that were only there: which are given up."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from app.engine.request import Request
from app.errors import Overloaded, Unavailable
from tests.kit.engine import FakeClock, Outcome, make_request
from tests.kit.fleet import LocalFleet, LocalReplica, check
from tests.waiting import until

DEADLY_TOKEN = 0
STEP_S = 0.02
MAX_RESUMES = 3


def poisonous(local: LocalFleet, replica: LocalReplica) -> None:
    """The replica dies of the deadly token; a while later there is another one in its place."""
    loop = asyncio.get_running_loop()

    async def replaced() -> None:
        await asyncio.sleep(0.05)
        local.transport.leave(replica.replica_id)
        poisonous(local, local.join_another())

    def die() -> None:
        if not replica.is_dead:
            replica.kill()
            local.tasks.append(loop.create_task(replaced()))

    replica.runner.deadly_token_id = DEADLY_TOKEN
    replica.runner.on_deadly = lambda: loop.call_soon_threadsafe(die)


@asynccontextmanager
async def poisonous_fleet(num_replicas: int, max_resumes: int = MAX_RESUMES) -> AsyncIterator[LocalFleet]:
    # On a busy machine a replica may say nothing for a while; here only the dead are lost.
    async with LocalFleet(num_replicas, step_s=STEP_S, max_resumes=max_resumes, silence_s=5.0) as local:
        for replica in local.replicas:
            poisonous(local, replica)
        yield local


def deadly(number: int = 0) -> Request:
    return make_request((5, DEADLY_TOKEN, 7 + number), max_tokens=30)


def harmless(number: int, num_tokens: int) -> Request:
    return make_request((5, 6, 7 + number), max_tokens=num_tokens)


async def later(local: LocalFleet, request: Request, after_s: float) -> Outcome:
    await asyncio.sleep(after_s)
    return await local.answer(request)


async def assert_given_up(
    local: LocalFleet, request: Request, after_s: float = 0.0, max_resumes: int = MAX_RESUMES
) -> None:
    with pytest.raises(Unavailable, match=f"{max_resumes} replicas were lost"):
        await later(local, request, after_s)


def num_killed(local: LocalFleet) -> int:
    return sum(replica.is_dead for replica in local.replicas)


@pytest.mark.parametrize("place", [0, 3, 7])
async def test_those_that_come_in_the_same_moment_as_a_culprit_are_not_given_up_with_it(place: int) -> None:
    """One replica at a time, so that every loss is everybody's, and nobody has a token before the first."""
    others = [harmless(number, 12) for number in range(7)]
    async with poisonous_fleet(1) as local:
        answers = local.start(others[:place])
        given_up = asyncio.ensure_future(assert_given_up(local, deadly()))
        answers += local.start(others[place:])
        await check(others, answers)
        await given_up
        assert num_killed(local) == MAX_RESUMES


@pytest.mark.parametrize("seed", range(4))
async def test_whenever_they_come_only_the_culprit_is_given_up(seed: int) -> None:
    source = random.Random(seed)
    others = [harmless(number, source.randrange(1, 60)) for number in range(24)]
    async with poisonous_fleet(3) as local:
        answers = [later(local, request, source.uniform(0.0, 1.0)) for request in others]
        await asyncio.gather(check(others, answers), assert_given_up(local, deadly(), source.uniform(0.0, 0.3)))
        assert num_killed(local) == MAX_RESUMES


async def test_a_stream_outlives_any_number_of_culprits_that_come_one_after_another() -> None:
    long = harmless(0, 100)
    async with poisonous_fleet(1, max_resumes=2) as local:
        [streaming] = local.start([long])
        for number in range(2):
            await assert_given_up(local, deadly(number), after_s=0.1, max_resumes=2)
        assert not streaming.done(), "it was there at every loss"
        await check([long], [streaming])
        assert num_killed(local) == 4


async def test_a_suspect_whose_client_leaves_does_not_keep_the_others_waiting() -> None:
    other = harmless(1, 12)
    async with poisonous_fleet(1) as local:
        local.fleet._suspects._longest_s = math.inf  # the time for one does not end
        leaving, staying = local.start([deadly(), other])
        await until(lambda: num_killed(local) >= 2)
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving
        (await staying).check(other)


async def test_one_that_is_refused_on_its_trial_lets_the_next_begin_at_once() -> None:
    clock = FakeClock()
    async with LocalFleet(2, max_requests=1, max_resumes=1, clock=clock) as local:
        local.fleet._suspects._longest_s = math.inf  # the time for one does not end
        local.hold(*local.replicas, before=0)
        [filling] = local.start([harmless(0, 5)])
        await until(lambda: any(replica.served for replica in local.replicas))
        [suspect] = local.start([harmless(1, 5)])
        await until(lambda: all(replica.served for replica in local.replicas))
        [doomed] = [replica for replica in local.replicas if replica.served[0].prompt_token_ids[-1] == 8]
        doomed.kill()
        await until(lambda: bool(local.suspects()))
        clock.advance(60.0)  # so long ago that it is refused as a new request is
        with pytest.raises(Overloaded):
            await suspect
        await local.fleet._suspects.begin("the next")
        local.go()
        assert (await filling).reasons
