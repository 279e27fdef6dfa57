"""GET /admin/live: streams the work of all engines. Events contain ids, tenants and numbers, but no texts."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from app.api.http.operations import EVENTS, TEXT, Operation, RouteGroup
from app.api.http.sse import EventResponse
from app.engine.snapshot import EngineSnapshot, QueueEntry, SlotUse, StepSums, TuningView
from app.errors import InvalidRequest, Overloaded

PERIOD_S = 0.2  # seconds between the views that a replica sends
MAX_VIEWERS = 20  # per process
# Number of events stored for slow viewers. A slower viewer misses older events, so memory does not grow with its delay.
# The stored events span more time than passes between two full views of a replica.
_NUM_KEPT = 15
# A stream lasts this long. The viewer then opens another, because an ingress waits for open streams before it stops.
STREAM_S = 10.0
# A viewer that has not read its whole stream this long after the stream's end is disconnected, to admit other viewers.
_SLOWNESS_S = 10.0
# Replicas send views for this long after the last viewer left, so a viewer that returns quickly misses nothing.
_LINGER_S = 2.0


class WatchedFleet(Protocol):
    """The part of `app.fleet.Fleet` that the live view, /load and cancellations use."""

    def watch(self, on_view: Callable[[str, EngineSnapshot], None] | None) -> None:
        """Call `on_view(replica_id, view)` for each view of a replica, several per second. None stops the calls."""
        ...

    def describe(self) -> list[dict[str, Any]]:
        """Return a description of each replica."""
        ...

    def cancel(self, request_id: str) -> bool:
        """Cancel a request of this process. Returns False if no replica has the request."""
        ...

    @property
    def last_decision(self) -> dict[str, str] | None:
        """The reason why the last request's replica was chosen, and the loads of all replicas at that time."""


class LiveFeed:
    """Creates one event every `PERIOD_S` for all viewers of a process, and none while there are no viewers."""

    def __init__(self, fleets: Mapping[str, WatchedFleet], clock: Callable[[], float] = time.time) -> None:
        """`fleets` maps model names to fleets. `clock` returns seconds of wall time."""
        self._fleets = fleets
        self._clock = clock
        self._num_viewers = 0
        self._views: dict[str, list[tuple[str, int, EngineSnapshot]]] = {}  # since the last event, by model
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=_NUM_KEPT)  # events with their times
        self._ticked = asyncio.Event()  # set and cleared for each new event
        self._timer: asyncio.TimerHandle | None = None  # set until `_LINGER_S` after the last viewer left
        self._watched_at = 0.0  # time of the last tick with a viewer, on the event loop's clock

    async def events(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events later than `after` (milliseconds of wall time) for `STREAM_S`. The first lists field names.

        Raises Overloaded if there are too many viewers.
        """
        if self._num_viewers >= MAX_VIEWERS:
            raise Overloaded(
                f"{self._num_viewers} viewers are already connected; at most {MAX_VIEWERS} are accepted; close one",
                retry_after_s=STREAM_S,
            )
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + STREAM_S
        self._num_viewers += 1
        try:
            if self._timer is None:
                self._begin()
            yield _FIELDS
            while loop.time() < ends_at:
                newer = next((event for event in self._recent if event[0] > after), None)
                if newer is None:
                    await self._ticked.wait()
                else:
                    after, data = newer
                    yield data  # separately, so that a slow viewer keeps at most one old event in memory
        finally:
            self._num_viewers -= 1

    def _begin(self) -> None:
        for model, fleet in self._fleets.items():
            fleet.watch(partial(self._receive, model))
        self._watched_at = asyncio.get_running_loop().time()
        self._tick()

    def _tick(self) -> None:
        """Create an event and schedule the next one. Stops `_LINGER_S` after the last viewer left."""
        loop = asyncio.get_running_loop()
        if self._num_viewers:
            self._watched_at = loop.time()
        if loop.time() - self._watched_at > _LINGER_S:
            self._end()
            return
        self._timer = loop.call_later(PERIOD_S, self._tick)
        self._recent.append(self._event())
        self._ticked.set()
        self._ticked.clear()

    def _end(self) -> None:
        self._timer = None
        for fleet in self._fleets.values():
            fleet.watch(None)
        self._views.clear()
        self._recent.clear()

    def _receive(self, model: str, replica_id: str, view: EngineSnapshot) -> None:
        self._views.setdefault(model, []).append((replica_id, self._now(), view))

    def _now(self) -> int:
        return round(1000 * self._clock())

    def _event(self) -> tuple[int, bytes]:
        at, views = self._now(), self._views
        self._views = {}
        models = {
            model: {"replicas": fleet.describe(), "decision": fleet.last_decision, "views": views.get(model, ())}
            for model, fleet in self._fleets.items()
        }
        return at, b"data: %b\n\n" % msgspec.json.encode({"at": at, "models": models})


class LiveRoutes(RouteGroup):
    """`GET /admin/live`, for admins."""

    def __init__(self, feed: LiveFeed, *, heartbeat_s: float) -> None:
        self._feed = feed
        self._heartbeat_s = heartbeat_s

    @Operation(
        "get", "/admin/live", "The current work of all engines", None, ("400",), media=(EVENTS,),
        query={"after": {"schema": TEXT, "description": "the `at` of the last event that the viewer received"}},
    )  # fmt: skip
    async def live(self, request: Request) -> Response:
        """Stream the events later than the last event that the viewer has received."""
        events = self._feed.events(_after(request.query_params.get("after", "0")))
        return EventResponse(events, heartbeat_s=self._heartbeat_s, timeout_s=STREAM_S + _SLOWNESS_S)


def _after(given: str) -> int:
    """Return the time of the last event that a viewer has received. Raises InvalidRequest."""
    if not (given.isascii() and given.isdigit() and len(given) <= 15):
        raise InvalidRequest(
            f"`after` must be the `at` of an event, in milliseconds; got {given[:40]!r}", param="after"
        )
    return int(given)


def _names(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return kind.__struct_fields__


# Views are sent as lists without field names, which would make up most of the bytes of every event.
_FIELDS = b"event: fields\ndata: %b\n\n" % msgspec.json.encode(
    {
        "view": _names(EngineSnapshot),
        "slots": _names(SlotUse),
        "waiting": _names(QueueEntry),
        "steps": _names(StepSums),
        "tuning": _names(TuningView),
    }
)
