"""The ingress's end of a replica's stream: what ends it, and what opens it again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import pytest

from app.engine.request import TokenDelta
from app.fleet import FailoverLimits, Frame, FrameReader, ReplicaLost, ReplicaRegistry
from app.fleet.connection import ReplicaConnection
from app.fleet.dispatch import GroupChooser, make_policy
from app.fleet.frames import encode
from app.fleet.in_flight import InFlightRequest, Turns
from tests.kit.engine import FakeClock, make_request
from tests.kit.fleet import Counts, make_report
from tests.waiting import until


class Ingress:
    """What a stream feeds."""

    def __init__(self, *, silence_s: float = 60.0, step_s: float = 60.0) -> None:
        policy = make_policy("least_loaded", random.Random(0))
        self.registry = ReplicaRegistry(policy, GroupChooser([]), block_size=4, clock=FakeClock())
        self.registry.set_replicas(["r0"])
        self.limits = FailoverLimits(place_timeout_s=60.0, silence_s=silence_s, step_s=step_s)
        self.request = InFlightRequest(make_request(), began_at=0.0, turns=Turns())
        self.in_flight = {self.request.begin_attempt(0.0).request_id: self.request}

    def reader(self) -> FrameReader:
        return FrameReader("r0", self.registry, self.in_flight, Counts(), self.limits)

    def frame(self, number: int, *token_ids: int, step_age_s: float = 0.0) -> bytes:
        deltas = (TokenDelta(self.request.sent.request_id, token_ids),) if token_ids else ()
        return encode(Frame(number, make_report(step_age_s=step_age_s), deltas))


async def test_tokens_go_to_their_request_and_reports_to_the_registry() -> None:
    ingress = Ingress()
    reader = ingress.reader()
    reader.data_received(ingress.frame(0) + ingress.frame(1, 5, 6))
    assert (await ingress.request.next()).token_ids == (5, 6)
    assert list(ingress.registry.reports) == ["r0"]


async def test_a_slow_reader_of_a_request_gets_what_has_accumulated_as_one_delta() -> None:
    ingress = Ingress()
    reader = ingress.reader()
    for number in range(4):
        reader.data_received(ingress.frame(number, 5 + number))
    assert (await ingress.request.next()).token_ids == (5, 6, 7, 8)


async def test_tokens_of_an_earlier_attempt_are_dropped() -> None:
    ingress = Ingress()
    late = ingress.frame(0, 9)
    ingress.in_flight.clear()
    ingress.in_flight[ingress.request.begin_attempt(1.0).request_id] = ingress.request
    reader = ingress.reader()
    reader.data_received(late + ingress.frame(1, 5))
    assert (await ingress.request.next()).token_ids == (5,)


def stuck(ingress: Ingress) -> Sequence[bytes]:
    return [ingress.frame(0), ingress.frame(1, step_age_s=61.0)]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (lambda ingress: [ingress.frame(0), ingress.frame(2)], "gap"),
        (lambda ingress: [ingress.frame(1)], "gap"),
        (stuck, "stuck"),
        (lambda ingress: [b"HTTP/1.1 200 OK\r\n\r\n"], "broken"),
    ],
)
async def test_a_stream_that_cannot_be_trusted_is_lost_and_nothing_after_counts(
    data: Callable[[Ingress], Sequence[bytes]], reason: str
) -> None:
    ingress = Ingress()
    reader = ingress.reader()
    for piece in data(ingress):
        reader.data_received(piece)
    assert (await reader.ended()).reason == reason
    reader.data_received(ingress.frame(1, 5) + ingress.frame(2, 5) + ingress.frame(3, 5))
    assert ingress.request.num_tokens == 0
    assert not ingress.request.is_accepted


async def test_a_silent_replica_is_lost() -> None:
    ingress = Ingress(silence_s=0.05)
    reader = ingress.reader()
    reader.data_received(ingress.frame(0))
    assert (await reader.ended()).reason == "silent"


class Transport(asyncio.Transport):
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


async def test_a_stream_that_ends_is_opened_again_until_the_connection_is_closed() -> None:
    ingress = Ingress()
    opened: list[tuple[FrameReader, Transport]] = []
    lost: list[tuple[str, ReplicaLost]] = []

    async def connect(reader: FrameReader) -> Transport:
        if len(opened) == 1 and len(lost) == 1:
            raise OSError("nothing listens there")
        opened.append((reader, Transport()))
        return opened[-1][1]

    connected: list[bool] = []
    connection = ReplicaConnection(
        "r0",
        ingress.reader,
        connect,
        lambda replica_id, reason: lost.append((replica_id, reason)),
        lambda: connected.append(True),
    )
    await until(lambda: len(opened) == 1)
    opened[0][0].connection_lost(None)
    await until(lambda: len(lost) == 2)
    await until(lambda: len(opened) == 2)
    assert [(replica_id, each.reason) for replica_id, each in lost] == [("r0", "ended"), ("r0", "broken")]
    assert opened[0][1].is_closed
    assert len(connected) == len(opened)
    connection.close()
    await until(lambda: opened[1][1].is_closed)
    assert len(lost) == 2
