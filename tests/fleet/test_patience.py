"""Which replica a fleet asks next, and when: scripted replicas, and time that passes at once."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from app.engine.request import FinishReason, Request, TokenDelta
from app.errors import CarouselError, EngineStopped, Overloaded, ReplicasLost
from app.fleet import FailoverLimits, Fleet, Frame, FrameReader, ReplicaRegistry
from app.fleet.dispatch import GroupChooser, make_policy
from app.fleet.frames import SubmitRequest, encode, message_decoder
from tests.kit.engine import make_request
from tests.kit.fleet import Counts, make_report
from tests.waiting import TimelessLoop

MANY = 50  # times that no fleet should ask


@pytest.fixture(autouse=True)
def loop_factory() -> Any:
    return TimelessLoop


class Replica(asyncio.Transport):
    """Answers each request as it is told to, but after `MANY` every one: no fleet asks for ever."""

    def __init__(self, answer: Callable[[Replica, Request], None], **report: Any) -> None:
        super().__init__()
        self._answer = answer
        self._report = make_report(**report)
        self.asked_at: list[float] = []

    def open(self, reader: FrameReader) -> None:
        self._reader, self._number, self._messages = reader, 0, message_decoder()
        self._send()

    def write(self, data: Any) -> None:
        for message in self._messages.feed(bytes(data)):
            if isinstance(message, SubmitRequest):
                self.asked_at.append(asyncio.get_running_loop().time())
                answer = self._answer if len(self.asked_at) < MANY else Replica.ends
                answer(self, message.request)

    def close(self) -> None:
        """Nothing is kept open."""

    def ends(self, request: Request) -> None:
        self._send(TokenDelta(request.request_id, (5,), FinishReason.LENGTH))

    def fails(self, request: Request, error: CarouselError) -> None:
        self._send(TokenDelta(request.request_id, (), FinishReason.ERROR, error=error))

    def dies(self, request: Request) -> None:
        """And is there again when it is connected to."""
        self._reader.connection_lost(ConnectionResetError("it died"))

    def refuses(self, request: Request) -> None:
        self.fails(request, Overloaded("it is full"))

    def stops(self, request: Request) -> None:
        self.fails(request, EngineStopped("its engine has stopped"))

    def _send(self, *deltas: TokenDelta) -> None:
        self._number += 1
        self._reader.data_received(encode(Frame(self._number - 1, self._report, deltas)))


class Transport:
    """Connects to scripted replicas, which are all there."""

    def __init__(self, replicas: dict[str, Replica]) -> None:
        self._replicas = replicas

    async def wake(self) -> None:
        raise AssertionError("there are replicas")

    async def connect(self, replica_id: str, reader: FrameReader, *, heartbeat_s: float) -> asyncio.Transport:
        self._replicas[replica_id].open(reader)
        return self._replicas[replica_id]


async def fleet_of(replicas: dict[str, Replica], **limits: Any) -> Fleet:
    """Of these replicas, all connected."""
    clock = asyncio.get_running_loop().time
    policy = make_policy("least_loaded", random.Random(0))
    registry = ReplicaRegistry(policy, GroupChooser([]), block_size=4, clock=clock)
    registry.set_replicas(tuple(replicas))
    usual: dict[str, Any] = {"place_timeout_s": 60.0, "silence_s": 1e6, "step_s": 1e6}
    fleet = Fleet(Transport(replicas), registry, FailoverLimits(**usual | limits), Counts(), clock=clock)
    await asyncio.sleep(0.01)
    return fleet


async def ask(fleet: Fleet) -> int:
    """How many tokens came."""
    return sum([len(delta.token_ids) async for delta in fleet.generate(make_request())])


def pauses(times: list[float]) -> list[float]:
    return [round(later - before, 3) for before, later in itertools.pairwise(times)]


async def test_a_replica_that_has_refused_a_request_is_not_asked_again_though_it_seems_to_be_the_best() -> None:
    refusing, busy = Replica(Replica.refuses), Replica(Replica.ends, num_waiting_tokens=5000)
    fleet = await fleet_of({"refusing": refusing, "busy": busy})
    assert await ask(fleet) == 1
    assert (len(refusing.asked_at), len(busy.asked_at)) == (1, 1)
    fleet.close()


async def test_a_request_that_every_replica_has_refused_is_refused() -> None:
    replicas = {name: Replica(Replica.refuses) for name in ("a", "b", "c")}
    fleet = await fleet_of(replicas)
    with pytest.raises(Overloaded, match="it is full"):
        await ask(fleet)
    assert [len(each.asked_at) for each in replicas.values()] == [1, 1, 1]
    fleet.close()


@pytest.mark.parametrize("is_leaving", [False, True])
async def test_a_request_whose_replica_is_lost_or_leaves_waits_until_another_has_room(is_leaving: bool) -> None:
    """It has begun: a refusal would break it off."""
    computing, full = Replica(lambda *_: None), Replica(Replica.refuses, num_waiting_tokens=500)
    fleet = await fleet_of({"computing": computing, "full": full}, drain_s=4.0)
    answer = asyncio.create_task(ask(fleet))
    await asyncio.sleep(0.1)
    if is_leaving:
        fleet._registry.set_replicas(("full",))
    else:
        computing.dies(make_request())
        computing._answer = Replica.refuses
    await asyncio.sleep(20.0)
    assert not answer.done()
    full._answer = Replica.ends
    assert await answer == 1
    assert set(pauses(full.asked_at)) == {1.0}
    fleet.close()


async def test_a_request_that_may_have_killed_its_replicas_waits_longer_each_time() -> None:
    """Others that were there get their tokens meanwhile, and are known to be innocent."""
    replicas = [
        Replica(Replica.dies),
        Replica(Replica.dies, num_waiting_tokens=500),
        Replica(Replica.ends, num_waiting_tokens=5000),
    ]
    fleet = await fleet_of({str(number): replica for number, replica in enumerate(replicas)})
    assert await ask(fleet) == 1
    assert pauses([time for replica in replicas for time in replica.asked_at]) == [0.25, 0.5]
    fleet.close()


async def test_a_suspect_is_tried_again_only_after_a_pause() -> None:
    """It is the only one, and a try that it does not accept is no loss."""
    stopped = Replica(Replica.stops)
    fleet = await fleet_of({"stopped": stopped}, place_timeout_s=5.0)
    answer = asyncio.create_task(ask(fleet))
    await asyncio.sleep(4.9)
    assert len(stopped.asked_at) == 1 + int(4.9 / 0.25)
    assert set(pauses(stopped.asked_at)) == {0.25}
    stopped._answer = Replica.ends
    assert await answer == 1
    fleet.close()


async def test_a_replica_that_was_only_silent_may_be_lost_again_and_that_counts() -> None:
    """What a request is known to have killed does not count against others, until it is there again."""
    replicas = {name: Replica(Replica.dies) for name in ("a", "b")}
    fleet = await fleet_of(replicas, max_resumes=2)
    for num_requests in (1, 2, 3):
        with pytest.raises(ReplicasLost, match="2 replicas were lost"):
            await ask(fleet)
        assert sum(len(each.asked_at) for each in replicas.values()) == 2 * num_requests
        await asyncio.sleep(20.0)  # both are connected to again
    fleet.close()
