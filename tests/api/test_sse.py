"""A stream of events and its client: one that waits, one that reads slowly, one that does not read, one that goes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.types import Message

from app.api.http.errors import ClientGone
from app.api.http.sse import (
    HEARTBEAT,
    UNREAD_S,
    EventResponse,
    EventStream,
    WhileConnected,
)
from app.json_pieces import event, event_pieces, named_event, named_event_pieces
from tests.waiting import TimelessLoop

HEARTBEAT_S = 15.0
LONG_S = 100_000.0  # no test waits for so long


@pytest.fixture(autouse=True)
def loop_factory() -> Any:
    return TimelessLoop


def now() -> float:
    return asyncio.get_running_loop().time()


class Client:
    """Takes the messages of a stream, each as soon as it reads."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.read_s = 0.0  # each message takes so long
        self._num_waiting = 0
        self.max_waiting = 0
        self.has_ended = False

    async def __call__(self, message: Message) -> None:
        assert not self.has_ended, "nothing follows a body without more of it"
        self._num_waiting += 1
        self.max_waiting = max(self.max_waiting, self._num_waiting)
        await asyncio.sleep(self.read_s)
        await self.reads.wait()
        self._num_waiting -= 1
        self.messages.append(message)
        self.has_ended = message["type"] == "http.response.body" and not message.get("more_body", False)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages if message["type"] == "http.response.body"]

    async def stops_reading_at(self, time_s: float) -> None:
        await asyncio.sleep(time_s - now())
        self.reads.clear()


class Events:
    """An event each so many seconds, for ever or up to a number."""

    def __init__(self, every_s: float, number: int | None = None) -> None:
        self._every_s = every_s
        self._number = number
        self.close_s = 0.0  # that the end takes
        self.closed_at: float | None = None

    async def __call__(self) -> AsyncGenerator[bytes, None]:
        try:
            for number in itertools.count() if self._number is None else range(self._number):
                yield b"%d" % number
                await asyncio.sleep(self._every_s)
        finally:
            self.closed_at = now()
            await asyncio.sleep(self.close_s)


def sending(client: Client, events: Events) -> asyncio.Task[None]:
    stream = EventStream(events(), headers=dict, heartbeat_s=HEARTBEAT_S, may_begin=lambda: True)
    return asyncio.create_task(stream.send_to(client))


async def is_gone(task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(LONG_S):
        with pytest.raises(ClientGone):
            await task


def test_an_event_is_the_same_bytes_in_one_piece_and_in_several() -> None:
    payload = {"type": "response.done", "rows": [1, 2]}
    data = b'data: {"type":"response.done","rows":[1,2]}\n\n'
    assert event(payload) == b"".join(event_pieces(payload)) == data
    assert named_event(payload) == b"".join(named_event_pieces(payload)) == b"event: response.done\n" + data


@pytest.mark.parametrize("every_s", [1.0, LONG_S], ids=["with events", "with comments only"])
async def test_a_client_that_takes_nothing_for_a_minute_counts_as_gone_and_its_events_are_closed(
    every_s: float,
) -> None:
    client, events = Client(), Events(every_s)
    task = sending(client, events)
    await client.stops_reading_at(100.5)
    await is_gone(task)
    assert events.closed_at is not None
    assert UNREAD_S <= events.closed_at - 100.5 <= UNREAD_S + 2 * HEARTBEAT_S
    assert client.max_waiting == 1


async def test_a_client_that_never_reads_is_gone_after_a_minute_and_no_heartbeat_later() -> None:
    client, events = Client(), Events(LONG_S)
    client.reads.clear()
    await is_gone(sending(client, events))
    assert events.closed_at == UNREAD_S


async def test_no_comment_goes_out_between_events_that_are_closer_than_a_heartbeat() -> None:
    client, events = Client(), Events(HEARTBEAT_S * 2 / 3, 5)
    await sending(client, events)
    assert client.bodies == [b"0", b"1", b"2", b"3", b"4", b""]


async def test_a_client_that_does_not_take_the_end_counts_as_gone_too() -> None:
    client, events = Client(), Events(10.0, 3)
    task = sending(client, events)
    await client.stops_reading_at(25.0)  # the last event is read, and the end comes at 30
    await is_gone(task)
    assert now() == pytest.approx(30.0 + UNREAD_S)


async def test_a_client_that_reads_slowly_gets_everything_and_one_message_at_a_time() -> None:
    client, events = Client(), Events(1.0, 5)
    client.read_s = UNREAD_S - HEARTBEAT_S - 1.0
    async with asyncio.timeout(LONG_S):
        await sending(client, events)
    assert [body for body in client.bodies if body != HEARTBEAT] == [b"0", b"1", b"2", b"3", b"4", b""]
    assert client.max_waiting == 1


async def test_an_event_waits_until_a_comment_is_taken() -> None:
    client, events = Client(), Events(HEARTBEAT_S + 1.0, 2)
    task = sending(client, events)
    await client.stops_reading_at(HEARTBEAT_S - 1.0)  # the comment waits from 15 on, the event from 16 on
    await asyncio.sleep(10.0)
    client.reads.set()
    await task
    assert client.bodies == [b"0", HEARTBEAT, b"1", HEARTBEAT, b""]
    assert client.max_waiting == 1


async def test_no_comment_follows_the_end() -> None:
    client, events = Client(), Events(1.0, 1)
    task = sending(client, events)
    await client.stops_reading_at(0.5)  # the end waits from 1 on
    await asyncio.sleep(UNREAD_S - 1.0)
    client.reads.set()
    await task
    assert client.bodies == [b"0", b""]
    assert not client.messages[-1]["more_body"]
    assert client.max_waiting == 1


async def test_events_without_headers_of_their_own_begin_with_a_comment_and_are_sent_only_for_a_time() -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("nothing comes")

    async def late() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(LONG_S)
        yield b"late"

    client = Client()
    response = EventResponse(late(), heartbeat_s=HEARTBEAT_S, timeout_s=3.5 * HEARTBEAT_S)
    await is_gone(asyncio.create_task(response({}, receive, client)))
    assert now() == 3.5 * HEARTBEAT_S
    assert client.bodies == [HEARTBEAT] * 3
    assert (client.messages[0]["status"], dict(client.messages[0]["headers"])) == (
        200,
        {
            b"content-type": b"text/event-stream; charset=utf-8",
            b"cache-control": b"no-cache",
            b"x-accel-buffering": b"no",
        },
    )


async def test_a_stream_that_is_cancelled_while_it_ends_for_its_client_is_cancelled() -> None:
    """Else a server that stops would wait for it."""
    client, events = Client(), Events(1.0)
    events.close_s = 10.0
    task = sending(client, events)
    await client.stops_reading_at(0.5)
    async with asyncio.timeout(LONG_S):
        while events.closed_at is None:  # noqa: ASYNC110
            await asyncio.sleep(1.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_client_that_goes_while_the_server_cancels_its_request_hides_no_cancellation(
    is_cancelled: bool,
) -> None:
    left = asyncio.Event()

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    async def work() -> None:
        async with WhileConnected(receive):
            await asyncio.sleep(LONG_S)

    task = asyncio.create_task(work())
    await asyncio.sleep(1.0)
    left.set()
    while not task.cancelling():  # noqa: ASYNC110 - until the one that watches the client has cancelled it
        await asyncio.sleep(0)
    if is_cancelled:
        task.cancel()
    with pytest.raises(asyncio.CancelledError if is_cancelled else ClientGone):
        await task
