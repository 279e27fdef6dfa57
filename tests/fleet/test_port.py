"""The socket between replica and ingress: who gets frames, how it ends, and what a slow reader costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress

import pytest

from app.engine.request import FinishReason, TokenDelta
from app.fleet import Address, Frame, FramePort, Outbox, frames_from
from app.fleet.port import MAX_HELLO_BYTES, Hello
from app.fleet.wire import Decoder
from tests.fleet.test_wire import REPORT


class Replica:
    """A port with outboxes behind it and no engine."""

    def __init__(self) -> None:
        self.outboxes: dict[str, Outbox] = {}
        self.port = FramePort("127.0.0.1", self.outbox)

    def outbox(self, ingress_id: str) -> Outbox:
        if ingress_id not in self.outboxes:
            self.outboxes[ingress_id] = Outbox(lambda: REPORT, orphaned_after_s=60.0, on_orphaned=lambda: None)
        return self.outboxes[ingress_id]


@asynccontextmanager
async def a_replica() -> AsyncIterator[tuple[Replica, Address]]:
    replica = Replica()
    address = await replica.port.open()
    try:
        yield replica, address
    finally:
        await replica.port.close()


def with_replica(test: Callable[[Replica, Address], Awaitable[None]]) -> None:
    async def main() -> None:
        async with a_replica() as (replica, address):
            await asyncio.wait_for(test(replica, address), 20)

    asyncio.run(main())


def test_frames_come_through_in_order_and_every_ingress_gets_its_own() -> None:
    async def scene(replica: Replica, address: Address) -> None:
        async with (
            aclosing(frames_from(address, "one", heartbeat_s=60)) as first,
            aclosing(frames_from(address, "two", heartbeat_s=60)) as second,
        ):
            assert (await anext(first)).number == (await anext(second)).number == 0
            replica.outbox("one").put(TokenDelta("a", (5,)))
            replica.outbox("two").put(TokenDelta("b", (6,), FinishReason.LENGTH))
            frame = await anext(first)
            assert (frame.number, frame.report, frame.deltas) == (1, REPORT, (TokenDelta("a", (5,)),))
            assert (await anext(second)).deltas == (TokenDelta("b", (6,), FinishReason.LENGTH),)

    with_replica(scene)


def test_there_are_heartbeats_when_nothing_happens() -> None:
    async def scene(replica: Replica, address: Address) -> None:
        async with aclosing(frames_from(address, "one", heartbeat_s=0.01)) as frames:
            assert [(await anext(frames)).number for _ in range(4)] == [0, 1, 2, 3]

    with_replica(scene)


def test_a_newer_stream_of_an_ingress_ends_the_one_before() -> None:
    async def scene(replica: Replica, address: Address) -> None:
        async with (
            aclosing(frames_from(address, "one", heartbeat_s=60)) as old,
            aclosing(frames_from(address, "one", heartbeat_s=60)) as new,
        ):
            await anext(old)
            await anext(new)
            with pytest.raises(StopAsyncIteration):
                await anext(old)

    with_replica(scene)


@pytest.mark.parametrize(
    "said",
    [
        Hello("not the secret", "one", 1.0).line(),
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1, 2]\n",
        b"[1, 2, 3]\n",
        b"{}\n",
        b"[[[[\n",
        b"x" * (4 * MAX_HELLO_BYTES) + b"\n",
        b"\n",
    ],
)
def test_a_stranger_gets_nothing_and_is_turned_away(said: bytes) -> None:
    async def scene(replica: Replica, address: Address) -> None:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(said)
        with suppress(ConnectionResetError):  # when it was closed with some of what was said unread
            assert await reader.read() == b""
        assert not replica.outboxes
        writer.close()

    with_replica(scene)


def test_a_replica_that_is_gone_cannot_be_reached() -> None:
    async def scene(replica: Replica, address: Address) -> None:
        await replica.port.close()
        async with aclosing(frames_from(address, "one", heartbeat_s=1.0)) as frames:
            with pytest.raises(ConnectionRefusedError):
                await anext(frames)

    with_replica(scene)


def test_bytes_that_are_no_frame_break_the_stream() -> None:
    async def main() -> None:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            await reader.read()  # until the other side has had enough
            writer.close()
            has_gone.set()

        has_gone = asyncio.Event()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1], "secret")
        async with aclosing(frames_from(address, "one", heartbeat_s=1.0)) as frames:
            with pytest.raises((ValueError, TypeError)):
                await anext(frames)
        await has_gone.wait()
        server.close()

    asyncio.run(main())


def test_a_reader_who_does_not_read_gets_fewer_and_longer_frames_and_slows_nobody() -> None:
    num_tokens, long_id = 400, "a" * 100_000  # together more than all buffers on the way hold

    async def scene(replica: Replica, address: Address) -> None:
        slow, slow_writer = await asyncio.open_connection(address.host, address.port, limit=1024)
        slow_writer.write(Hello(address.secret, "slow", 60.0).line())
        async with aclosing(frames_from(address, "quick", heartbeat_s=60)) as quick:
            await anext(quick)
            for n in range(num_tokens):
                replica.outbox("slow").put(TokenDelta(long_id, (n,)))
                replica.outbox("quick").put(TokenDelta("b", (n,)))
                assert (await anext(quick)).deltas[0].token_ids == (n,)
        decoder = Decoder()
        frames: list[Frame] = []
        while not frames or not frames[-1].deltas or frames[-1].deltas[0].token_ids[-1] < num_tokens - 1:
            frames += decoder.feed(await slow.read(2**20))
        token_ids = [token for frame in frames for delta in frame.deltas for token in delta.token_ids]
        assert token_ids == list(range(num_tokens))
        assert [frame.number for frame in frames] == list(range(len(frames)))
        assert len(frames) < num_tokens
        slow_writer.close()

    with_replica(scene)
