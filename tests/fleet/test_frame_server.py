"""The socket between replica and ingress: which connection gets frames, how it ends, and what a slow reader costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import uvloop

from app.engine.request import FinishReason, TokenDelta
from app.fleet import Address, Frame, FrameServer, Outbox, connect
from app.fleet.frame_server import MAX_HELLO_BYTES, Hello
from app.fleet.frames import FrameDecoder
from tests.fleet.test_frames import REPORT


class Replica:
    """A server with outboxes behind it and no engine."""

    def __init__(self) -> None:
        self.outboxes: dict[str, Outbox] = {}
        self.server = FrameServer("127.0.0.1", self.outbox)

    def outbox(self, ingress_id: str) -> Outbox:
        if ingress_id not in self.outboxes:
            self.outboxes[ingress_id] = Outbox(lambda: REPORT, orphaned_after_s=60.0, on_orphaned=lambda: None)
        return self.outboxes[ingress_id]


@asynccontextmanager
async def a_replica() -> AsyncIterator[tuple[Replica, Address]]:
    replica = Replica()
    address = await replica.server.open()
    try:
        yield replica, address
    finally:
        await replica.server.close()


@pytest.fixture(autouse=True, params=["asyncio", "uvloop"])
def new_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve runs on uvloop, whose transports differ from asyncio's."""
    factory = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}[request.param]
    monkeypatch.setattr(f"{__name__}.LOOP_FACTORY", factory)


LOOP_FACTORY: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop


def with_replica(test: Callable[[Replica, Address], Awaitable[None]]) -> None:
    async def main() -> None:
        async with a_replica() as (replica, address):
            await asyncio.wait_for(test(replica, address), 20)

    with asyncio.Runner(loop_factory=LOOP_FACTORY) as runner:
        runner.run(main())


class Frames(asyncio.Protocol):
    """The frames of one stream, as an ingress gets them."""

    def __init__(self) -> None:
        self._decoder = FrameDecoder()
        self._come: asyncio.Queue[Frame | None] = asyncio.Queue()

    def data_received(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            self._come.put_nowait(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self._come.put_nowait(None)

    async def next(self) -> Frame:
        """The next frame. Raises EOFError at the end of the stream."""
        frame = await self._come.get()
        if frame is None:
            raise EOFError
        return frame


@asynccontextmanager
async def frames_from(address: Address, ingress_id: str, *, heartbeat_s: float = 60.0) -> AsyncIterator[Frames]:
    frames = Frames()
    transport = await connect(address, ingress_id, frames, heartbeat_s=heartbeat_s)
    try:
        yield frames
    finally:
        transport.abort()


def test_frames_come_through_in_order_and_every_ingress_gets_its_own() -> None:
    async def scene(replica: Replica, address: Address) -> None:
        async with frames_from(address, "one") as first, frames_from(address, "two") as second:
            assert (await first.next()).number == (await second.next()).number == 0
            replica.outbox("one").put_all([TokenDelta("a", (5,))])
            replica.outbox("two").put_all([TokenDelta("b", (6,), FinishReason.LENGTH)])
            frame = await first.next()
            assert (frame.number, frame.report, frame.deltas) == (1, REPORT, (TokenDelta("a", (5,)),))
            assert (await second.next()).deltas == (TokenDelta("b", (6,), FinishReason.LENGTH),)

    with_replica(scene)


def test_there_are_heartbeats_when_nothing_happens() -> None:
    async def scene(replica: Replica, address: Address) -> None:
        async with frames_from(address, "one", heartbeat_s=0.01) as frames:
            assert [(await frames.next()).number for _ in range(4)] == [0, 1, 2, 3]

    with_replica(scene)


def test_a_newer_stream_of_an_ingress_ends_the_one_before() -> None:
    async def scene(replica: Replica, address: Address) -> None:
        async with frames_from(address, "one") as old:
            await old.next()
            async with frames_from(address, "one") as new:
                assert (await new.next()).number == 0
                with pytest.raises(EOFError):
                    await old.next()
                replica.outbox("one").put_all([TokenDelta("a", (5,))])
                assert (await new.next()).number == 1

    with_replica(scene)


def test_what_happens_without_a_stream_comes_with_the_next() -> None:
    async def scene(replica: Replica, address: Address) -> None:
        replica.outbox("one").put_all([TokenDelta("a", (5,))])
        replica.outbox("one").put_all([TokenDelta("a", (6,))])
        async with frames_from(address, "one") as frames:
            assert (await frames.next()).deltas == (TokenDelta("a", (5, 6)),)

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
        await replica.server.close()
        with pytest.raises(ConnectionRefusedError):
            await connect(address, "one", Frames(), heartbeat_s=1.0)

    with_replica(scene)


def test_a_reader_that_does_not_read_gets_fewer_and_longer_frames_and_slows_no_other() -> None:
    num_tokens, long_id = 400, "a" * 100_000  # together more than all buffers on the way hold

    async def scene(replica: Replica, address: Address) -> None:
        slow, slow_writer = await asyncio.open_connection(address.host, address.port, limit=1024)
        slow_writer.write(Hello(address.secret, "slow", 60.0).line())
        async with frames_from(address, "quick") as quick:
            await quick.next()
            for n in range(num_tokens):
                replica.outbox("slow").put_all([TokenDelta(long_id, (n,))])
                replica.outbox("quick").put_all([TokenDelta("b", (n,))])
                assert (await quick.next()).deltas[0].token_ids == (n,)
        decoder = FrameDecoder()
        frames: list[Frame] = []
        while not frames or not frames[-1].deltas or frames[-1].deltas[0].token_ids[-1] < num_tokens - 1:
            frames += decoder.feed(await slow.read(2**20))
        token_ids = [token for frame in frames for delta in frame.deltas for token in delta.token_ids]
        assert token_ids == list(range(num_tokens))
        assert [frame.number for frame in frames] == list(range(len(frames)))
        assert len(frames) < num_tokens
        slow_writer.close()

    with_replica(scene)
