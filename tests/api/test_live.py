"""The events of the live view: what viewers get, how many may watch, and that nothing is done without any."""

from __future__ import annotations

import asyncio
import json
import socket
import tracemalloc
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, aclosing
from typing import Any

import httpx
import pytest

from app.api.endpoints import live
from app.api.endpoints.live import MAX_VIEWERS, LiveFeed
from app.api.http import sse
from app.engine.snapshot import EngineSnapshot
from app.errors import Overloaded
from tests.benchmarks.servers import serving
from tests.kit.engine import build_fake_engine, make_request
from tests.kit.service import Connection, Service
from tests.waiting import eventually, until


class Fleet:
    """One replica, which shows its engine when it is told to."""

    def __init__(self, facts: str = "") -> None:
        self._facts = facts
        self.on_view: Callable[[str, EngineSnapshot], None] | None = None
        self.last_decision = None
        self.num_described = 0
        self.engine = build_fake_engine()

    def cancel(self, request_id: str) -> bool:
        return False

    def watch(self, on_view: Callable[[str, EngineSnapshot], None] | None) -> None:
        self.on_view = on_view

    def describe(self) -> list[dict[str, Any]]:
        self.num_described += 1
        return [{"replica": "r0", "state": "serving", "facts": self._facts}]

    def show(self) -> None:
        assert self.on_view is not None
        self.on_view("r0", self.engine.snapshot())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PERIOD_S", 0.005)
    monkeypatch.setattr(live, "_LINGER_S", 0.02)


def parsed(data: bytes) -> list[Any]:
    """The data of some events."""
    lines = data.decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


async def test_a_viewer_gets_the_names_of_all_fields_and_then_what_replicas_show() -> None:
    fleet = Fleet()
    fleet.engine.add(make_request(request_id="a", tenant="t"))
    async with aclosing(LiveFeed({"demo": fleet}).events(0)) as events:
        [fields] = parsed(await anext(events))
        await anext(events)
        fleet.engine.snapshot()
        fleet.engine.step()
        fleet.show()
        while not (views := parsed(await anext(events))[-1]["models"]["demo"]["views"]):
            pass
    [[replica_id, _, values]] = views
    view = dict(zip(fields["view"], values, strict=True))
    [use] = (dict(zip(fields["slots"], each, strict=True)) for each in view["slots"])
    assert (replica_id, view["num_running"], use["request_id"], use["tenant"]) == ("r0", 1, "a", "t")


async def test_without_viewers_replicas_show_nothing_and_nothing_is_computed() -> None:
    fleet = Fleet()
    feed = LiveFeed({"demo": fleet})
    assert fleet.on_view is None
    async with aclosing(feed.events(0)) as events:
        await anext(events)
        await anext(events)
        assert fleet.on_view is not None
    await until(lambda: fleet.on_view is None)
    num_described = fleet.num_described
    await asyncio.sleep(0.03)
    assert fleet.num_described == num_described


async def test_a_viewer_that_comes_back_at_once_has_missed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LINGER_S", 5.0)

    fleet = Fleet()
    times = iter(range(1, 10_000))
    feed = LiveFeed({"demo": fleet}, clock=lambda: next(times) / 1000)
    async with aclosing(feed.events(0)) as events:
        await anext(events)
        seen = parsed(await anext(events))[-1]["at"]
    await asyncio.sleep(0.02)
    async with aclosing(feed.events(seen)) as events:
        await anext(events)
        later = [each["at"] for each in parsed(await anext(events))]
    assert later[0] == seen + 1
    assert fleet.on_view is not None, "it was watched all the time"


async def test_only_so_many_may_watch_and_one_that_leaves_makes_room() -> None:
    feed = LiveFeed({"demo": Fleet()})
    async with AsyncExitStack() as stack:
        viewers = [await stack.enter_async_context(aclosing(feed.events(0))) for _ in range(MAX_VIEWERS)]
        for viewer in viewers:
            await anext(viewer)
        with pytest.raises(Overloaded, match="20 viewers are already connected"):
            await anext(feed.events(0))
        await viewers[0].aclose()
        async with aclosing(feed.events(0)) as another:
            assert await anext(another)


async def test_a_viewer_that_reads_late_gets_the_newest_and_memory_stays_bounded() -> None:
    feed = LiveFeed({"demo": Fleet()})
    async with aclosing(feed.events(0)) as slow, aclosing(feed.events(0)) as quick:
        await anext(slow)
        await anext(quick)
        for _ in range(60):
            last = parsed(await anext(quick))[-1]["at"]
        assert len(feed._recent) <= live._NUM_KEPT
        events = [parsed(await anext(slow))[0]["at"] for _ in range(live._NUM_KEPT)]
        assert events == sorted(events)
        assert events[-1] >= last


def silent_viewer(stack: ExitStack, url: httpx.URL) -> None:
    """Watch, read the first byte of the answer, and nothing after it."""
    viewer = stack.enter_context(socket.create_connection((url.host, url.port)))
    viewer.sendall(b"GET /admin/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert viewer.recv(1) == b"H"


def test_viewers_that_never_read_hold_little(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of each viewer the server's transport holds what is below its high water and the event that went over it, and the
    # next event waits: those that come at different times hold different events.
    event_bytes, buffer_bytes, slack_bytes = 200_000, 65_536, 2_000_000
    monkeypatch.setattr(live, "STREAM_S", 600.0)
    fleet = Fleet(facts="x" * event_bytes)
    app = service.built(fleets={"demo": fleet})
    tracemalloc.start()
    with ExitStack() as stack:
        stack.callback(tracemalloc.stop)
        url = httpx.URL(stack.enter_context(serving(app)))
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(MAX_VIEWERS):
            silent_viewer(stack, url)
        eventually(lambda: fleet.num_described > 2 * live._NUM_KEPT)
        assert httpx.get(url.join("/admin/live")).status_code == 429
        held = tracemalloc.get_traced_memory()[0] - before
        assert held < live._NUM_KEPT * event_bytes + MAX_VIEWERS * (2 * event_bytes + buffer_bytes) + slack_bytes


def test_a_viewer_that_never_reads_makes_room_after_a_while(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "STREAM_S", 1.0)
    monkeypatch.setattr(live, "_SLOWNESS_S", 0.0)
    monkeypatch.setattr(sse, "UNREAD_S", 1e6)  # as for other streams
    fleet = Fleet(facts="x" * 5_000_000)  # a few are more than the kernel takes for a socket
    app = service.built(fleets={"demo": fleet})
    with ExitStack() as stack:
        silent_viewer(stack, httpx.URL(stack.enter_context(serving(app))))
        eventually(lambda: fleet.num_described > 0 and fleet.on_view is None)


def test_a_stream_ends_by_itself_so_that_an_ingress_can_stop(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "STREAM_S", 0.05)
    answer = service.call("GET", "/admin/live")
    assert (answer.status, answer.is_complete) == (200, True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert parsed(answer.body)[-1]["models"] == {}


async def test_a_viewer_that_hangs_up_is_one_less(service: Service) -> None:
    fleet = Fleet()
    app = service.built(fleets={"demo": fleet})
    async with Connection(app, "GET", "/admin/live", b"", {}) as connection:
        await until(lambda: fleet.on_view is not None)
        connection.hang_up()
        await connection.finished()
        await until(lambda: fleet.on_view is None)


@pytest.mark.parametrize("after", ["-1", "1.5", "x", "9" * 16, "\u0661"])
def test_a_time_that_is_none_is_refused(service: Service, after: str) -> None:
    from urllib.parse import quote

    answer = service.call("GET", "/admin/live", query=f"after={quote(after)}")
    assert (answer.status, answer.error["param"]) == (400, "after")
