"""GET /admin/live: what all engines do now, as server-sent events. Ids, tenants and numbers; no prompts, no outputs."""

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

PERIOD_S = 0.2  # as often as replicas send views
MAX_VIEWERS = 20  # of one process
# A viewer that reads late gets these and misses what was before: memory does not grow with its delay. They go back
# for longer than replicas take between two full views.
_NUM_KEPT = 15
# A stream ends after this, and the viewer asks for the next: an ingress that stops waits for its streams.
STREAM_S = 10.0
# A viewer that has not taken what was sent to it so long after that makes room for another.
_SLOWNESS_S = 10.0
# Views go on for so long without a viewer: one that comes back at once has missed nothing.
_LINGER_S = 2.0


class WatchedFleet(Protocol):
    """What the live view needs of `app.fleet.Fleet`."""

    def watch(self, on_view: Callable[[str, EngineSnapshot], None] | None) -> None:
        """Have `on_view(replica_id, view)` called for each view of a replica, some each second. None: no more."""
        ...

    def describe(self) -> list[dict[str, Any]]:
        """All replicas."""
        ...

    def cancel(self, request_id: str) -> bool:
        """End a request of this process; False: it is not there."""
        ...

    @property
    def last_decision(self) -> dict[str, str] | None:
        """Why the last request went where it did."""


class LiveFeed:
    """One event every `PERIOD_S` for all viewers of a process. Without viewers nothing is sent and nothing computed."""

    def __init__(self, fleets: Mapping[str, WatchedFleet], clock: Callable[[], float] = time.time) -> None:
        """`fleets` by the model's name; `clock` gives seconds of wall time."""
        self._fleets = fleets
        self._clock = clock
        self._num_viewers = 0
        self._views: dict[str, list[tuple[str, int, EngineSnapshot]]] = {}  # since the last event, by model
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=_NUM_KEPT)  # events with their times
        self._ticked = asyncio.Event()  # set for a moment when there is another
        self._timer: asyncio.TimerHandle | None = None  # while there are viewers, and a while longer
        self._watched_at = 0.0  # when there was a viewer last, by the event loop's clock

    async def events(self, after: int) -> AsyncGenerator[bytes, None]:
        """The events later than the time `after`, in milliseconds, for `STREAM_S`. The first names the fields.

        Raises Overloaded when too many watch already.
        """
        if self._num_viewers >= MAX_VIEWERS:
            raise Overloaded(
                f"{self._num_viewers} viewers watch already, and {MAX_VIEWERS} may; close one", retry_after_s=STREAM_S
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
                    yield data  # one at a time: a viewer that reads slowly holds one, and the others are shared
        finally:
            self._num_viewers -= 1

    def _begin(self) -> None:
        for model, fleet in self._fleets.items():
            fleet.watch(partial(self._receive, model))
        self._watched_at = asyncio.get_running_loop().time()
        self._tick()

    def _tick(self) -> None:
        """Make an event, and the next one later, until there were no viewers for a while."""
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
        "get", "/admin/live", "What all engines do now", None, ("400",), media=(EVENTS,),
        query={"after": {"schema": TEXT, "description": "the `at` of the last event that came"}},
    )  # fmt: skip
    async def live(self, request: Request) -> Response:
        """The events later than the one that a viewer has."""
        events = self._feed.events(_after(request.query_params.get("after", "0")))
        return EventResponse(events, heartbeat_s=self._heartbeat_s, timeout_s=STREAM_S + _SLOWNESS_S)


def _after(given: str) -> int:
    """The time of the last event that a viewer has. Raises InvalidRequest."""
    if not (given.isascii() and given.isdigit() and len(given) <= 15):
        raise InvalidRequest(
            f"after should be the `at` of an event, in milliseconds; got {given[:40]!r}", param="after"
        )
    return int(given)


def _names(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return kind.__struct_fields__


# Views are sent as lists, by position: names five times a second would be most of the bytes.
_FIELDS = b"event: fields\ndata: %b\n\n" % msgspec.json.encode(
    {
        "view": _names(EngineSnapshot),
        "slots": _names(SlotUse),
        "waiting": _names(QueueEntry),
        "steps": _names(StepSums),
        "tuning": _names(TuningView),
    }
)
