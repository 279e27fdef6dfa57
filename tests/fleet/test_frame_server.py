"""The socket between replica and ingress: which connection gets frames, how it ends, and what a slow reader costs."""

from __future__ import annotations

import asyncio
import socket
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from msgspec import structs

from app.engine.prefix import Prefix, digests_of
from app.engine.request import FinishReason, Grammar, GrammarKind, Queued, Request, TokenDelta
from app.engine.snapshot import EngineSnapshot
from app.engine.stats import SleepState
from app.errors import Failure, InvalidRequest, Overloaded
from app.fleet import Address, Frame, FrameServer, IngressSession, connect
from app.fleet.frame_server import MAX_HELLO_BYTES, METRICS_HOLD_S, Hello
from app.fleet.frames import (
    FRAME_VERSION,
    AbortRequest,
    AskMetrics,
    Message,
    SubmitRequest,
    WatchEngine,
    encode,
    frame_decoder,
)
from tests.engine.test_adapter_store import gated_store
from tests.engine.test_async_engine import with_adapter
from tests.engine.test_sleep_controller import dozing_service, turns_on
from tests.fleet.test_frames import REPORT
from tests.kit.engine import FakeClock, async_engine, build_fake_engine, expected_tokens, make_request
from tests.waiting import until


class Replica:
    """A server with an engine that computes nothing. Tests put the deltas of its requests."""

    def __init__(self) -> None:
        self.sessions: dict[str, IngressSession] = {}  # by request id
        self.aborted: list[str] = []
        self.refusal: Exception | None = None
        self.compiled = asyncio.Event()
        self.num_views = 0  # since they began
        self.num_measured = 0
        self.clock = FakeClock()
        self.server = FrameServer("127.0.0.1", self, lambda: REPORT, self.measured, clock=self.clock)

    def measured(self) -> bytes:
        self.num_measured += 1
        if self.num_measured == 3:
            raise ValueError("no number")
        return b"measured %d" % self.num_measured

    async def matcher_of(self, request: Request) -> object:
        await self.compiled.wait()
        return SimpleNamespace(grammar=request.sampling.grammar, ignored_keywords=())

    async def adapter_of(self, request: Request) -> object:
        return request.adapter

    def submit(
        self, request: Request, receiver: IngressSession, matcher: object = None, adapter: object = None
    ) -> Queued:
        if self.refusal is not None:
            raise self.refusal
        assert getattr(matcher, "grammar", None) == request.sampling.grammar
        assert adapter == request.adapter
        self.sessions[request.request_id] = receiver
        return Queued(len(self.sessions), 0.5)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def snapshot(self, *, is_full: bool) -> EngineSnapshot:
        self.num_views += 1
        return build_fake_engine().snapshot()

    def end_snapshots(self) -> None:
        self.num_views = 0

    def on_prefixes(self, note_held: Callable[[Prefix, bool], None]) -> None:
        """It has none."""

    def serve_prefixes(self, host: str) -> None:
        """It has none."""

    def put(self, delta: TokenDelta) -> None:
        """As the engine does after a step."""
        self.sessions[delta.request_id].put_all([delta])


@asynccontextmanager
async def a_server(server: FrameServer) -> AsyncIterator[tuple[FrameServer, Address]]:
    address = await server.open()
    try:
        yield server, address
    finally:
        await server.close()


@asynccontextmanager
async def a_replica() -> AsyncIterator[tuple[Replica, Address]]:
    replica = Replica()
    async with a_server(replica.server) as (_, address):
        yield replica, address


@pytest.fixture(autouse=True, params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop_factory(request: pytest.FixtureRequest) -> Any:
    """Serve runs on uvloop, whose transports differ from asyncio's."""
    return request.param


class Frames(asyncio.Protocol):
    """The frames of one stream, as an ingress gets them, and the way to send messages on it."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._decoder = frame_decoder()
        self._come: asyncio.Queue[Frame | None] = asyncio.Queue()

    def data_received(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            self._come.put_nowait(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self._come.put_nowait(None)

    def send(self, *messages: Message) -> None:
        self.transport.write(b"".join(map(encode, messages)))

    async def submit(self, *request_ids: str) -> None:
        """Send requests; returns when the first frame about each has come."""
        self.send(*(SubmitRequest(make_request(request_id=each)) for each in request_ids))
        waiting = set(request_ids)
        while waiting:
            waiting -= {delta.request_id for delta in (await self.next()).deltas}

    async def next(self) -> Frame:
        """The next frame. Raises EOFError at the end of the stream."""
        frame = await self._come.get()
        if frame is None:
            raise EOFError
        return frame

    async def deltas(self) -> tuple[TokenDelta, ...]:
        """Those of the next frame that has any."""
        while not (frame := await self.next()).deltas:
            pass
        return frame.deltas


@asynccontextmanager
async def frames_from(address: Address, ingress_id: str, *, heartbeat_s: float = 60.0) -> AsyncIterator[Frames]:
    frames = Frames()
    frames.transport = await connect(address, ingress_id, frames, heartbeat_s=heartbeat_s)
    try:
        yield frames
    finally:
        frames.transport.abort()


@asynccontextmanager
async def two_ingresses() -> AsyncIterator[tuple[Replica, Frames, Frames]]:
    async with (
        a_replica() as (replica, address),
        frames_from(address, "one") as first,
        frames_from(address, "two") as second,
    ):
        yield replica, first, second


async def test_a_hundred_ingresses_that_connect_at_once_all_get_frames() -> None:
    async with a_replica() as (_, address), AsyncExitStack() as stack:
        connecting = (stack.enter_async_context(frames_from(address, f"ingress {number}")) for number in range(100))
        ingresses = await asyncio.gather(*connecting)
        assert [(await each.next()).number for each in ingresses] == [0] * 100


@pytest.mark.parametrize("heartbeat_s", [float("nan"), float("inf"), 0, -1.0, 1e-9, "often", None])
async def test_an_ingress_that_asks_for_heartbeats_which_none_can_send_is_refused(heartbeat_s: Any) -> None:
    async with a_replica() as (_, address), frames_from(address, "odd", heartbeat_s=heartbeat_s) as frames:
        with pytest.raises(EOFError):
            await frames.next()


async def test_an_ingress_without_a_name_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    name: Any = ["a", "list"]
    async with a_replica() as (_, address), frames_from(address, name) as frames:
        with pytest.raises(EOFError):
            await frames.next()
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


async def test_a_message_that_is_longer_than_any_ends_the_connection_before_its_bytes_come() -> None:
    async with a_replica() as (_, address), frames_from(address, "odd") as frames:
        await frames.next()
        frames.transport.write(bytes([FRAME_VERSION]) + b"\xff\xff\xff\xff")
        with pytest.raises(EOFError):
            await frames.next()


async def test_frames_come_through_in_order_and_every_ingress_gets_its_own() -> None:
    async with two_ingresses() as (replica, first, second):
        assert (await first.next()).number == (await second.next()).number == 0
        await first.submit("a")
        await second.submit("b")
        replica.put(TokenDelta("a", (5,)))
        replica.put(TokenDelta("b", (6,), FinishReason.LENGTH))
        frame = await first.next()
        assert (frame.number, frame.deltas) == (2, (TokenDelta("a", (5,)),))
        assert frame.report == structs.replace(REPORT, num_own=1, num_prompt_tokens_of_others=3)
        assert (await second.next()).deltas == (TokenDelta("b", (6,), FinishReason.LENGTH),)


async def test_an_ingress_hears_at_once_of_a_long_prompt_that_another_has_sent_and_of_its_end() -> None:
    async with two_ingresses() as (replica, first, second):
        await first.next()
        assert (await second.next()).report.num_prompt_tokens_of_others == 0
        for end in (
            lambda: replica.put(TokenDelta("long", (5,))),
            lambda: first.send(AbortRequest("long")),
            lambda: replica.put(TokenDelta("long", (), FinishReason.ERROR, error=Failure("it failed"))),
            first.transport.abort,
        ):
            first.send(SubmitRequest(make_request(request_id="long"), num_prefill_tokens=1000))
            frame = await second.next()
            assert (frame.report.num_prompt_tokens_of_others, frame.report.num_own, frame.deltas) == (1000, 0, ())
            end()
            assert (await second.next()).report.num_prompt_tokens_of_others == 0


async def test_prompts_count_with_all_their_tokens_where_an_ingress_does_not_say_how_many_are_cached() -> None:
    async with two_ingresses() as (_, first, second):
        await second.next()
        first.send(SubmitRequest(make_request((5,) * 300, request_id="a")))
        assert (await second.next()).report.num_prompt_tokens_of_others == 300


async def test_many_requests_of_one_ingress_are_few_frames_to_another() -> None:
    async with two_ingresses() as (replica, first, second):
        await second.next()
        names = [f"request {number}" for number in range(200)]
        first.send(*(SubmitRequest(make_request(request_id=each), num_prefill_tokens=300) for each in names))
        for each in names:
            while each not in replica.sessions:
                await first.next()
        replica.sessions["request 0"].put_all([TokenDelta(each, (5,), FinishReason.LENGTH) for each in names])
        num_frames = 1
        while (await second.next()).report.num_prompt_tokens_of_others:
            num_frames += 1
        # At most one in 10 ms. A slow machine takes longer, but no longer for each request.
        assert num_frames <= 100


async def test_a_request_arrives_as_it_was_sent_and_its_first_delta_says_where_it_is_queued() -> None:
    async with a_replica() as (_, address), frames_from(address, "one") as frames:
        frames.send(SubmitRequest(make_request(request_id="a")), SubmitRequest(make_request(request_id="b")))
        [first, *others] = await frames.deltas()
        assert (first.request_id, first.queued) == ("a", Queued(1, 0.5))
        [second] = others or await frames.deltas()
        assert (second.request_id, second.queued) == ("b", Queued(2, 0.5))


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (Overloaded("the engine is full", retry_after_s=3.0), Overloaded),
        (InvalidRequest("too long", param="prompt"), InvalidRequest),
        (ZeroDivisionError(), Failure),
    ],
)
async def test_a_request_that_is_refused_ends_with_the_error_and_the_connection_stays(
    refusal: Exception, kind: type[Exception]
) -> None:
    async with a_replica() as (replica, address), frames_from(address, "one") as frames:
        replica.refusal = refusal
        frames.send(SubmitRequest(make_request(request_id="a")))
        [delta] = await frames.deltas()
        assert (delta.request_id, delta.finish_reason, type(delta.error)) == ("a", FinishReason.ERROR, kind)
        replica.refusal = None
        await frames.submit("b")
        assert not replica.aborted


async def test_a_request_with_a_grammar_waits_for_it_and_holds_up_no_other() -> None:
    async with a_replica() as (replica, address), frames_from(address, "one") as frames:
        grammar = Grammar(GrammarKind.REGEX, "a+")
        frames.send(*(SubmitRequest(make_request(request_id=each, grammar=grammar)) for each in ("slow", "given up")))
        await frames.submit("quick")
        frames.send(AbortRequest("given up"))
        await frames.submit("another")
        assert list(replica.sessions) == ["quick", "another"]
        replica.compiled.set()
        [delta] = await frames.deltas()
        assert delta.request_id == "slow"
        assert list(replica.sessions) == ["quick", "another", "slow"]


async def test_an_abort_reaches_the_engine_once_and_only_for_requests_that_run() -> None:
    async with a_replica() as (replica, address), frames_from(address, "one") as frames:
        await frames.submit("a", "b")
        replica.put(TokenDelta("b", (6,), FinishReason.LENGTH))
        frames.send(AbortRequest("a"), AbortRequest("a"), AbortRequest("b"), AbortRequest("of another time"))
        await frames.submit("c")
        assert replica.aborted == ["a"]


async def test_a_request_that_is_aborted_while_its_adapter_is_read_leaves_it_free() -> None:
    store, read, gate = gated_store(1)
    with async_engine(adapters=store) as engine:
        server = FrameServer("127.0.0.1", engine, lambda: REPORT)
        async with a_server(server) as (_, address), frames_from(address, "ingress") as frames:
            await frames.next()
            frames.send(SubmitRequest(with_adapter("a", request_id="aborted")))
            await until(lambda: read)
            frames.send(AbortRequest("aborted"))
            await until(lambda: server.is_idle)
            gate.release(2)
            frames.send(SubmitRequest(with_adapter("b", request_id="next")))  # in the only place
            (first,) = await frames.deltas()
            assert first.request_id == "next"
            assert first.error is None
    assert read == ["a", "b"]


async def test_after_aborts_a_frame_says_that_their_places_are_free_and_one_does_for_several() -> None:
    """Until then their ingress takes them for requests of another ingress, and refuses others for them."""
    async with a_replica() as (replica, address), frames_from(address, "one", heartbeat_s=60) as frames:
        await frames.submit("a", "b")
        frames.send(AbortRequest("a"), AbortRequest("b"))
        frame = await frames.next()
        expected = structs.replace(REPORT, num_own=0, num_prompt_tokens_of_others=0)
        assert (frame.report, frame.deltas) == (expected, ())
        assert replica.aborted == ["a", "b"]
        await asyncio.sleep(0.1)  # a second such frame would come within 50 ms
        frames.send(SubmitRequest(make_request(request_id="c")))
        assert (await frames.next()).number == frame.number + 1


async def test_every_ingress_is_told_which_prefixes_are_cached_also_one_that_comes_later() -> None:
    prompt = tuple(range(5, 25))
    async with AsyncExitStack() as block:
        engine = block.enter_context(async_engine())
        server = FrameServer("127.0.0.1", engine, lambda: REPORT)
        _, address = await block.enter_async_context(a_server(server))
        one, other = [
            await block.enter_async_context(frames_from(address, name, heartbeat_s=0.05)) for name in ("one", "other")
        ]
        one.send(SubmitRequest(make_request(prompt, request_id="a")))
        expected = set(digests_of(prompt, salt="", block_size=4)[:4])  # of five blocks: see `is_indexed`
        assert await told(one, expected) >= expected
        assert await told(other, expected) >= expected
        later = await block.enter_async_context(frames_from(address, "one"))
        first = (await later.next()).prefixes
        assert first is not None
        assert first.is_all
        assert set(array("q", first.held)) >= expected


async def told(frames: Frames, expected: set[int]) -> set[int]:
    """The prefixes that frames tell of, until they tell of all of these."""
    index: set[int] = set()
    while not index >= expected:
        changes = (await frames.next()).prefixes
        if changes is not None:
            index = (set() if changes.is_all else index) | set(array("q", changes.held))
            index -= set(array("q", changes.gone))
    return index


async def test_the_requests_of_a_connection_that_ends_are_aborted() -> None:
    async with a_replica() as (replica, address), frames_from(address, "other") as other:
        async with frames_from(address, "one") as frames:
            await frames.submit("a", "b")
            await other.submit("c")
        await until(lambda: sorted(replica.aborted) == ["a", "b"])
        replica.put(TokenDelta("a", (5,)))  # of a step that was under way
        replica.put(TokenDelta("c", (5,)))
        assert (await other.next()).deltas == (TokenDelta("c", (5,)),)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="of Linux")
async def test_an_ingress_that_takes_nothing_for_long_loses_its_connection_and_its_requests_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one does whose process stands still: its kernel says that there is no room."""
    monkeypatch.setattr("app.fleet.frame_server.UNREAD_TIMEOUT_S", 0.3)
    long_id = "a" * 100_000
    async with a_replica() as (replica, address):
        _, writer = await asyncio.open_connection(address.host, address.port, limit=1024)
        request = SubmitRequest(make_request(request_id=long_id))
        writer.write(Hello(address.secret, "stopped", 60.0).line() + encode(request))
        session = (await until(lambda: replica.sessions)).get(long_id)
        assert session is not None
        while session._stream.is_writable:
            replica.put(TokenDelta(long_id, (1,)))
        await until(lambda: replica.aborted == [long_id])
        assert replica.server.is_idle
        writer.close()


async def test_a_replica_has_drained_when_the_last_delta_of_the_last_request_is_sent() -> None:
    async with (
        a_replica() as (replica, address),
        frames_from(address, "one") as frames,
        frames_from(address, "two") as leaving,
    ):
        await frames.submit("a")
        await leaving.submit("b")
        draining = asyncio.create_task(replica.server.drain())
        leaving.transport.abort()
        await until(lambda: replica.aborted == ["b"])
        assert not draining.done()
        replica.put(TokenDelta("a", (5,), FinishReason.LENGTH))
        await draining
        assert (await frames.next()).deltas == (TokenDelta("a", (5,), FinishReason.LENGTH),)


async def test_a_replica_that_sleeps_wakes_for_what_it_has_before_it_has_drained(tmp_path: Path) -> None:
    with dozing_service(tmp_path / "device.json") as (engine, _):
        async with a_server(FrameServer("127.0.0.1", engine, lambda: REPORT)) as (server, address):
            await until(lambda: engine.sleep.state is SleepState.ASLEEP)
            await server.drain()
            assert engine.sleep.num_wakes == 0
            with_memory = turns_on(tmp_path / "device.json", clock=lambda: 1e9)
            request = make_request()
            async with frames_from(address, "one") as frames:
                frames.send(SubmitRequest(request))
                await until(lambda: engine.sleep.state is SleepState.QUEUED)
                draining = asyncio.create_task(server.drain())
                await asyncio.sleep(0)
                assert not draining.done()
                with_memory.close()
                await draining
                token_ids: list[int] = []
                while len(token_ids) < request.sampling.max_tokens:
                    token_ids += [each for delta in (await frames.next()).deltas for each in delta.token_ids]
            assert token_ids == expected_tokens(request.prompt_token_ids, request.sampling.max_tokens)
            assert engine.sleep.num_wakes == 1


async def test_there_are_heartbeats_when_nothing_happens() -> None:
    async with a_replica() as (_, address), frames_from(address, "one", heartbeat_s=0.01) as frames:
        assert [(await frames.next()).number for _ in range(4)] == [0, 1, 2, 3]


async def test_a_newer_stream_of_an_ingress_ends_the_one_before_and_its_requests() -> None:
    async with a_replica() as (replica, address), frames_from(address, "one") as old:
        await old.submit("a")
        async with frames_from(address, "one") as new:
            assert (await new.next()).number == 0
            with pytest.raises(EOFError):
                await old.next()
            await until(lambda: replica.aborted == ["a"])
            await new.submit("b")
            replica.put(TokenDelta("b", (5,)))
            assert (await new.next()).number == 2


async def test_a_connection_that_sends_what_is_no_message_is_closed() -> None:
    async with a_replica() as (replica, address), frames_from(address, "one") as frames:
        await frames.submit("a")
        frames.transport.write(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(EOFError):
            await frames.next()
        assert replica.aborted == ["a"]


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
async def test_a_stranger_gets_nothing_and_is_turned_away(said: bytes) -> None:
    async with a_replica() as (replica, address):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(said)
        with suppress(ConnectionResetError):  # when it was closed with some of what was said unread
            assert await reader.read() == b""
        assert replica.server.is_idle
        writer.close()


async def test_a_replica_that_is_gone_cannot_be_reached() -> None:
    async with a_replica() as (replica, address):
        await replica.server.close()
        with pytest.raises(ConnectionRefusedError):
            await connect(address, "one", Frames(), heartbeat_s=1.0)


async def test_a_reader_that_does_not_read_gets_fewer_and_longer_frames_and_slows_no_other() -> None:
    num_tokens, long_id = 400, "a" * 100_000  # together more than all buffers on the way hold
    async with a_replica() as (replica, address):
        slow, slow_writer = await asyncio.open_connection(address.host, address.port, limit=1024)
        slow_writer.write(
            Hello(address.secret, "slow", 60.0).line() + encode(SubmitRequest(make_request(request_id=long_id)))
        )
        async with frames_from(address, "quick") as quick:
            await quick.submit("b")
            await until(lambda: long_id in replica.sessions)
            for n in range(num_tokens):
                replica.put(TokenDelta(long_id, (n,)))
                replica.put(TokenDelta("b", (n,)))
                assert (await quick.next()).deltas[0].token_ids == (n,)
        decoder = frame_decoder()
        frames: list[Frame] = []
        token_ids: list[int] = []
        while token_ids[-1:] != [num_tokens - 1]:
            data = await slow.read(2**20)
            assert data, "the stream has not ended"
            frames += decoder.feed(data)
            token_ids = [token for frame in frames for delta in frame.deltas for token in delta.token_ids]
        assert token_ids == list(range(num_tokens))
        assert [frame.number for frame in frames] == list(range(len(frames)))
        assert len(frames) < num_tokens
        slow_writer.close()


async def test_only_an_ingress_that_watches_gets_views() -> None:
    async with (
        a_replica() as (replica, address),
        frames_from(address, "one") as viewer,
        frames_from(address, "two") as other,
    ):
        assert (await viewer.next()).view is None
        viewer.send(WatchEngine(True))
        seen = [(await viewer.next()).view for _ in range(3)]
        assert all(view is not None and view.num_running == 0 for view in seen)
        await other.next()
        await other.submit("a")
        replica.put(TokenDelta("a", (5,)))
        assert (await other.next()).view is None


async def test_what_is_measured_goes_to_those_that_ask_and_is_written_once_for_all() -> None:
    async with (
        a_replica() as (replica, address),
        frames_from(address, "one") as one,
        frames_from(address, "two") as two,
    ):
        for frames in (one, two):
            assert (await frames.next()).metrics is None
            frames.send(AskMetrics())
            assert (await frames.next()).metrics == b"measured 1"
        replica.clock.advance(METRICS_HOLD_S)
        await one.submit("a")
        one.send(AskMetrics())
        assert (await one.next()).metrics == b"measured 2"
        replica.put(TokenDelta("a", (5,)))
        assert (await one.next()).metrics is None


async def test_a_replica_that_cannot_write_its_metrics_serves_on(caplog: pytest.LogCaptureFixture) -> None:
    async with a_replica() as (replica, address), frames_from(address, "one") as frames:
        await frames.next()
        await frames.submit("a")
        for expected in (b"measured 1", b"measured 2", b"", b"measured 4"):
            frames.send(AskMetrics())
            assert (await frames.next()).metrics == expected
            replica.clock.advance(METRICS_HOLD_S)
        replica.put(TokenDelta("a", (5,)))
        assert (await frames.next()).deltas
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_without_viewers_no_view_is_made() -> None:
    async with two_ingresses() as (replica, first, second):
        assert replica.num_views == 0
        for frames in (first, second):
            frames.send(WatchEngine(True))
        await until(lambda: replica.num_views > 1)
        first.send(WatchEngine(False))
        second.transport.abort()  # its process has died
        await until(lambda: replica.num_views == 0)


async def test_a_view_goes_with_the_next_step_and_is_not_kept_longer_than_until_the_next_view() -> None:
    async with a_replica() as (replica, address), frames_from(address, "one") as frames:
        await frames.next()
        await frames.submit("a")
        frames.send(WatchEngine(True))
        await until(lambda: replica.num_views == 1)
        replica.put(TokenDelta("a", (5,)))
        frame = await frames.next()
        assert frame.deltas
        assert frame.view is not None
        frame = await frames.next()  # no step comes any more
        assert frame.deltas == ()
        assert frame.view is not None
