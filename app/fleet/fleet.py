"""Serves one model's requests on all of its replicas. A stream continues on another replica if its replica is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Protocol

from msgspec import structs

from app.culprits import Culprits, SuspectQueue
from app.engine.request import ALL_BLOCKS, Address, PrefixSource, Queued, Request, TokenDelta
from app.engine.snapshot import EngineSnapshot
from app.errors import Cancelled, DeadlineMissed, Overloaded, ReplicasLost, Unavailable
from app.fleet.connection import FailoverLimits, FleetMetrics, FrameReader, ReplicaConnection
from app.fleet.frames import AbortRequest, AskMetrics, SubmitRequest, WatchEngine
from app.fleet.in_flight import InFlightRequest, ReplicaLost, RequestMoved, Turns
from app.fleet.replica_registry import ReplicaRegistry

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 1.0  # longest pause between attempts to resume a request while all replicas are full
_RELIEVE_EVERY_S = 0.25  # a replica's reports reflect the previous move after this time
_MAX_TIMES_SHORT = 3  # how often one request may be moved because its replica is short of memory
# Metrics are requested from this many replicas per turn, because simultaneous answers would block the event loop.
_ASKED_IN_A_TURN = 25
_TURN_S = 0.005


class ReplicaTransport(Protocol):
    """Connects to replicas. `deployments/serve/transport.py` implements this with Serve's handles; tests use a fake."""

    async def wake(self) -> None:
        """Wait until the model is running on a replica. Starts a replica if the model is scaled to zero.

        Raises Overloaded if too many requests are waiting, and Unavailable if no replica can be started now.
        """
        ...

    async def connect(self, replica_id: str, reader: FrameReader, *, heartbeat_s: float) -> asyncio.Transport:
        """Connect to a replica, whose frames `reader` then receives. Raises if the replica is unreachable."""
        ...


class TokenStream:
    """Iterates over the deltas of one request, for one reader. Closing the stream aborts the request."""

    def __init__(self, in_flight: InFlightRequest, deltas: AsyncGenerator[TokenDelta, None]) -> None:
        self._in_flight = in_flight
        self._deltas = deltas

    def __aiter__(self) -> TokenStream:
        return self

    def __anext__(self) -> Awaitable[TokenDelta]:
        return self._deltas.__anext__()

    async def aclose(self) -> None:
        """Abort the request, if it has not ended."""
        self._in_flight.take = None
        await self._deltas.aclose()

    def deliver_to(self, take: Callable[[TokenDelta], bool]) -> None:
        """Pass each delta to `take` while the reader is waiting, except the first tokens and the last delta.

        If `take` returns True, the delta is consumed and the reader keeps waiting. If it returns False, the reader
        receives the delta. If it raises, the reader receives the error.
        """
        self._in_flight.take = take


class Fleet:
    """Sends requests to replicas and reads the deltas over one connection per replica. Belongs to one event loop.

    When a replica is lost, its requests are sent to other replicas along with the tokens generated so far, and resume
    exactly where they stopped. NVIDIA Dynamo's request migration also transfers only tokens. Here the tokens are the
    complete state, because randomness is a function of seed and position.
    """

    def __init__(
        self,
        transport: ReplicaTransport,
        registry: ReplicaRegistry,
        limits: FailoverLimits,
        metrics: FleetMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._registry = registry
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._in_flight: dict[str, InFlightRequest] = {}  # by the id of the current attempt
        self._on_replica: dict[str, dict[str, InFlightRequest]] = {}  # by replica, in the order they were sent
        # A request is blamed if this many replicas in a row are lost before it receives a token.
        max_losses = max(2, limits.max_resumes)
        self._culprits: Culprits[str] = Culprits(max_losses=max_losses, alone_after=max_losses - 1)
        self._suspects = SuspectQueue()
        self._connections: dict[str, ReplicaConnection] = {}
        self._open_ids: Sequence[str] | None = None  # cached ids of the connected replicas; None after a change
        self._turns = Turns()  # wakes the requests of lost replicas
        self._relieved_at: dict[str, float] = {}  # when `_relieve` last looked for a request to move, by replica
        self._leaving: dict[str, asyncio.TimerHandle] = {}  # timers for `_leave`, by replica
        self._changed = asyncio.Event()  # wakes all waiters when a connection opens or the replicas change
        self._on_view: Callable[[str, EngineSnapshot], None] | None = None  # None while nobody watches
        self._questions: set[_Question] = set()
        registry.on_replicas = self._replicas_changed
        self._replicas_changed(registry.replica_ids)

    def generate(self, request: Request) -> TokenStream:
        """Stream the tokens of `request`, regardless of which replicas generate them. Closing the stream aborts it.

        If the first delta is empty, it reports that the request is queued, and on which replica.

        Raises:
            InvalidRequest, DeadlineMissed, StepFailed: the engine failed the request.
            Overloaded: every replica is full.
            Unavailable: no replica was available.
            ReplicasLost: too many replicas were lost while serving this request.
        """
        in_flight = InFlightRequest(request, began_at=self._clock(), turns=self._turns)
        return TokenStream(in_flight, self._deltas(in_flight))

    async def _deltas(self, in_flight: InFlightRequest) -> AsyncGenerator[TokenDelta, None]:
        request, avoid = in_flight.request, frozenset[str]()
        try:
            while True:
                pause_s = 0.0
                is_last_chance = in_flight.lost_at is not None and self._culprits.is_suspect(request.request_id)
                if is_last_chance:
                    await self._suspects.begin(request.request_id)
                try:
                    await self._begin_attempt(in_flight, avoid)
                except BaseException:  # rejected or cancelled, so the next suspect may begin
                    self._suspects.end(request.request_id)
                    raise
                try:
                    while True:
                        delta = await in_flight.next()
                        if is_last_chance and in_flight.has_progressed:
                            self._suspects.end(request.request_id)
                        if delta.queued is not None:
                            delta = structs.replace(delta, queued=self._with_decision(in_flight, delta.queued))
                        yield delta
                        if delta.finish_reason is not None:
                            in_flight.is_done = True
                            return
                        if in_flight.leaves_after_prompt and delta.token_ids:
                            in_flight.fail(RequestMoved("the prompt has been computed", reason="decode"))
                except ReplicaLost as lost:
                    pause_s = self._note_loss(in_flight, lost)
                    lost.__traceback__ = None  # the connection stores the error, whose traceback refers to this request
                    avoid |= {in_flight.replica_id, *lost.avoid}
                except DeadlineMissed:
                    raise
                except Overloaded as full:
                    avoid |= {in_flight.replica_id}
                    if avoid.issuperset(self._open_replica_ids(in_flight)):
                        await self._wait_for_room(in_flight, full)
                        avoid = frozenset()
                finally:
                    self._end_attempt(in_flight)
                    self._suspects.end(request.request_id)
                await asyncio.sleep(pause_s)
        finally:
            self._culprits.forget(request.request_id)

    def cancel(self, request_id: str) -> bool:
        """End a request: its stream raises Cancelled. Returns False if no replica is serving the request."""
        found = [each for each in self._in_flight.values() if each.request.request_id == request_id]
        for in_flight in found:
            in_flight.fail(Cancelled("this request was cancelled while it was running"))
        return bool(found)

    @property
    def num_in_flight(self) -> int:
        """Number of requests that replicas are serving."""
        return len(self._in_flight)

    def watch(self, on_view: Callable[[str, EngineSnapshot], None] | None) -> None:
        """Call `on_view(replica_id, view)` for each replica's views, a few per second. None stops the views."""
        self._on_view = on_view
        for replica_id in self._connections:
            self._tell_watching(replica_id)

    async def ask_metrics(self, timeout_s: float) -> dict[str, bytes | None]:
        """Return the metrics of each replica that accepts requests, or None for those that do not answer in time."""
        question = _Question(self._registry.replica_ids)
        self._questions.add(question)
        try:
            for number, replica_id in enumerate([*question.open]):
                if number and number % _ASKED_IN_A_TURN == 0:
                    await asyncio.sleep(_TURN_S)
                if self._sends_metrics(replica_id):
                    self._connections[replica_id].send(AskMetrics())
                else:
                    question.close(replica_id)
            await asyncio.wait({question.ended}, timeout=timeout_s)
        finally:
            self._questions.discard(question)
        return question.answers

    def _sends_metrics(self, replica_id: str) -> bool:
        is_there = self._registry.accepts_requests(replica_id) and self._is_open(replica_id)
        return is_there and self._registry.sends_metrics(replica_id)

    def _on_metrics_received(self, replica_id: str, metrics: bytes) -> bool:
        """Pass a replica's metrics to the open questions. Returns whether any question was waiting for them."""
        waiting = [question for question in self._questions if replica_id in question.open]
        for question in waiting:
            question.close(replica_id, metrics)
        return bool(waiting)

    def describe(self) -> list[dict[str, Any]]:
        """Return a readable description of each replica that accepts requests or is finishing its last ones."""
        described = self._registry.describe()
        for each in described:
            each["state"] = "serving" if self._is_open(each["replica"]) else "lost"
        leaving = [each for each in self._connections if not self._registry.accepts_requests(each)]
        return described + [{"replica": each, "state": "leaving"} for each in leaving]

    @property
    def last_decision(self) -> dict[str, str] | None:
        """A readable explanation of why the last request's replica was chosen."""
        decision = self._registry.last_decision
        return None if decision is None else {"reason": decision.reason, "loads": decision.explain_loads()}

    def close(self) -> None:
        """Close the connections to all replicas."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    # ------------------------------------------------------------------ one request

    async def _begin_attempt(self, in_flight: InFlightRequest, avoid: frozenset[str]) -> None:
        """Send a request to the replica that the registry chooses, once one is available."""
        while True:
            if in_flight.num_attempts:
                in_flight.seconds_left(self._clock())  # raises if no time is left
            weights = in_flight.needs_weights
            replica_ids = self._open_replica_ids(in_flight)
            if not replica_ids and in_flight.request.no_queue and in_flight.lost_at is None:
                raise Overloaded("no replica is available, and this request may not be queued; try again shortly")
            replica_ids = replica_ids or await self._wait_for_replicas(in_flight)
            sent = in_flight.begin_attempt(self._clock())
            try:
                decision = self._registry.place(sent, replica_ids, avoid=avoid)
                break
            except Overloaded as full:
                await self._wait_for_room(in_flight, full)
        chosen = decision.candidates[0]
        if self._registry.addresses:
            sent = replace(sent, prefix_at=in_flight.left or self._registry.prefix_at(decision))
        in_flight.place(
            decision,
            weights=weights or chosen.weights,
            prefixes_at=self._registry.addresses.get(chosen.replica_id),
        )
        if self._registry.has_roles and in_flight.prefixes_at is not None:
            in_flight.leaves_after_prompt = self._registry.is_split(decision, replica_ids)
        if not chosen.is_suspect:
            self._culprits.is_alive(chosen.replica_id)
        self._in_flight[sent.request_id] = in_flight
        self._on_replica.setdefault(chosen.replica_id, {})[sent.request_id] = in_flight
        self._metrics.dispatched(decision.policy)
        num_prefill_tokens = self._registry.num_prefill_tokens(sent.request_id)
        self._connections[chosen.replica_id].send(SubmitRequest(sent, num_prefill_tokens))

    def _with_decision(self, in_flight: InFlightRequest, queued: Queued) -> Queued:
        decision = in_flight.decision
        assert decision is not None, "only a placed request can be queued"
        return queued._replace(
            replica_id=in_flight.replica_id,
            group=decision.candidates[0].group,
            routing_reason=decision.reason,
            candidate_loads=decision.explain_loads(),
        )

    def _end_attempt(self, in_flight: InFlightRequest) -> None:
        """Stop tracking an attempt, and abort it on its replica unless the request is done."""
        replica_id = in_flight.replica_id
        del self._in_flight[in_flight.sent.request_id]
        del self._on_replica[replica_id][in_flight.sent.request_id]
        if not self._on_replica[replica_id]:
            del self._on_replica[replica_id]
        in_flight.has_ended = True
        if not in_flight.is_done and replica_id in self._connections:
            self._connections[replica_id].send(AbortRequest(in_flight.sent.request_id))
        num_generated = in_flight.num_tokens if in_flight.is_done else None
        self._registry.end(
            in_flight.sent.request_id, max_tokens=in_flight.request.sampling.max_tokens, num_generated=num_generated
        )
        if not self._registry.accepts_requests(replica_id):
            self._close_if_idle(replica_id)

    def _note_loss(self, in_flight: InFlightRequest, lost: ReplicaLost) -> float:
        """Count a loss, and return the seconds to pause before the next attempt.

        Raises ReplicasLost after too many losses. A request that may be crashing replicas fails one loss earlier than
        the other requests on the same replicas. Once it is identified as the culprit, the losses that it caused no
        longer count against the other requests.
        """
        now = self._clock()
        if isinstance(lost, RequestMoved):
            in_flight.lost_at = now
            if in_flight.prefixes_at is not None:
                in_flight.left = PrefixSource(Address._make(in_flight.prefixes_at), ALL_BLOCKS)
            self._metrics.resumed(lost.reason)
            return 0.0
        # A replica that was lost with all its requests is already suspect and has been logged once for all of them.
        is_news = not self._registry.is_suspect(in_flight.replica_id)
        self._registry.suspect(in_flight.replica_id)
        was_hopeless = not (in_flight.is_trusted or in_flight.is_accepted)
        # A request that may have crashed its replica pauses to let other requests go first. Requests that receive a
        # token in the meantime are cleared.
        suspect_pause_s = 0.25
        if was_hopeless and self._is_recent(in_flight, now):
            return suspect_pause_s  # only a suspect replica was available, so the request is still waiting
        in_flight.lost_at = now
        request_id = in_flight.request.request_id
        self._culprits.note_loss(
            request_id, in_flight.replica_id, has_progressed=in_flight.has_progressed, was_trusted=in_flight.is_trusted
        )
        num_resumes = self._culprits.num_losses(request_id)
        if self._culprits.is_culprit(request_id) or num_resumes > self._limits.max_resumes:
            raise ReplicasLost(
                f"{num_resumes} replicas were lost while serving this request; it will not be retried"
            ) from lost
        self._metrics.resumed(lost.reason)
        logger.log(
            logging.WARNING if is_news else logging.DEBUG,
            "request %s resumes on another replica after %d tokens (replica %s: %s)",
            request_id, in_flight.num_tokens, in_flight.replica_id, lost,
        )  # fmt: skip
        return suspect_pause_s * self._culprits.losses_without_progress(request_id)

    def _is_recent(self, in_flight: InFlightRequest, now: float) -> bool:
        return in_flight.lost_at is not None and now - in_flight.lost_at <= self._limits.place_timeout_s

    async def _wait_for_room(self, in_flight: InFlightRequest, full: Overloaded) -> None:
        """Pause before the next attempt if the request has recently lost its replica. Otherwise raises `full`."""
        if not self._is_recent(in_flight, self._clock()):
            raise full
        await asyncio.sleep(min(full.retry_after_s, _LONGEST_PAUSE_S))

    # ------------------------------------------------------------------ the replicas

    def _open_replica_ids(self, in_flight: InFlightRequest) -> Sequence[str]:
        """Return the connected replicas that support all of a request's fields and can continue its tokens."""
        weights, request, registry = in_flight.needs_weights, in_flight.request, self._registry
        if self._open_ids is None:
            self._open_ids = list(filter(self._is_open, registry.replica_ids))
        found = self._open_ids
        if registry.some_lack_fields:
            found = [each for each in found if registry.unknown_field(each, request) is None]
        if weights and registry.some_differ_from(weights):
            found = [each for each in found if registry.has_weights(each, weights)]
        return found

    def _is_open(self, replica_id: str) -> bool:
        connection = self._connections.get(replica_id)
        return connection is not None and connection.is_open

    async def _wait_for_replicas(self, in_flight: InFlightRequest) -> Sequence[str]:
        """Wait until `_open_replica_ids` finds a replica, and return its result.

        Raises Unavailable if none is found within `place_timeout_s`, and Overloaded if too many requests are waiting.
        """
        seconds = self._limits.place_timeout_s
        try:
            async with asyncio.timeout(seconds):
                while not (replica_ids := self._open_replica_ids(in_flight)):
                    if self._registry.replica_ids:
                        await self._changed.wait()
                    else:
                        await self._wake()
                return replica_ids
        except TimeoutError:
            if replica_ids := self._open_replica_ids(in_flight):  # a replica has become available at this moment
                return replica_ids
            for replica_id in filter(self._is_open, self._registry.replica_ids):
                unknown = self._registry.unknown_field(replica_id, in_flight.request)
                if unknown is None:  # the replica was excluded because of its weights
                    raise Unavailable(
                        "this request's replica was lost, and the other replicas have different weights; send it again"
                    ) from None
                raise Unavailable(
                    f"this request uses {unknown}, which the running replicas do not support yet because an update is "
                    f"in progress; send it again"
                ) from None
            raise Unavailable(f"no replica became available within {seconds:g} s; send this request again") from None

    async def _wake(self) -> None:
        """Wait until a replica starts or the replicas change. Raises Overloaded if too many requests are waiting."""
        changing = asyncio.create_task(self._changed.wait())
        waking = asyncio.create_task(self._transport.wake())
        try:
            await asyncio.wait({changing, waking}, return_when=asyncio.FIRST_COMPLETED)
            if waking.done():
                waking.result()
        except Unavailable as error:  # for example, because the replica has just died
            logger.warning("no replica can be started now: %s", error)
            await asyncio.sleep(_LONGEST_PAUSE_S)
        finally:
            changing.cancel()
            waking.cancel()

    def _open_changed(self) -> None:
        """Clear the cached list of open replicas after a stream has opened or ended, or the replicas have changed."""
        self._open_ids = None

    def _note_change(self) -> None:
        self._changed.set()
        self._changed.clear()

    def _replicas_changed(self, replica_ids: Collection[str]) -> None:
        self._open_changed()
        for replica_id in replica_ids:
            self._connect_to(replica_id)
        for replica_id in self._connections.keys() - set(replica_ids):
            self._close_if_idle(replica_id)
            if replica_id in self._connections and replica_id not in self._leaving:
                leave_after_s = self._limits.leave_after_s
                self._leaving[replica_id] = asyncio.get_running_loop().call_later(
                    leave_after_s, self._leave, replica_id, leave_after_s
                )
        self._note_change()

    def _leave(self, replica_id: str, after_s: float) -> None:
        """Move a draining replica's requests, with their KV memory, to other replicas."""
        del self._leaving[replica_id]
        if self._registry.accepts_requests(replica_id):  # the replica accepts requests again
            return
        leaving = list(self._on_replica.get(replica_id, {}).values())
        for in_flight in leaving:
            if self._open_replica_ids(in_flight):
                in_flight.fail(RequestMoved(f"it stopped accepting requests {after_s:g} s ago", reason="ending"))
        if leaving:
            logger.info("replica %s is stopping; moving its %d requests to other replicas", replica_id, len(leaving))

    def _connect_to(self, replica_id: str) -> None:
        """Open a connection to a replica unless it is already connected."""
        if replica_id in self._connections:
            return
        self._connections[replica_id] = ReplicaConnection(
            replica_id,
            lambda: FrameReader(
                replica_id,
                self._registry,
                self._in_flight,
                self._metrics,
                self._limits,
                on_begun=partial(self._begun, replica_id),
                on_ended=partial(self._ended, replica_id),
                on_view=partial(self._on_view_received, replica_id),
                on_metrics=partial(self._on_metrics_received, replica_id),
                on_short=partial(self._relieve, replica_id),
            ),
            lambda reader: self._transport.connect(replica_id, reader, heartbeat_s=self._limits.heartbeat_s),
            self._on_lost,
            self._open_changed,
        )

    def _begun(self, replica_id: str) -> None:
        self._open_changed()
        if self._on_view is not None:
            self._tell_watching(replica_id)
        self._note_change()

    def _ended(self, replica_id: str) -> None:
        """Record the end of a stream. Its replica is not used again until a new stream delivers its first frame."""
        self._open_changed()
        for question in self._questions:
            question.close(replica_id)

    def _tell_watching(self, replica_id: str) -> None:
        if self._is_open(replica_id) and self._registry.sends_views(replica_id):
            self._connections[replica_id].send(WatchEngine(self._on_view is not None))

    def _on_view_received(self, replica_id: str, view: EngineSnapshot) -> bool:
        """Pass on a replica's view. Returns whether anyone is watching."""
        if self._on_view is not None:
            self._on_view(replica_id, view)
        return self._on_view is not None

    def _relieve(self, replica_id: str) -> None:
        """Move the most recent request of a replica that is short of KV memory to a replica with room.

        This avoids a preemption. The idea comes from Llumnix (Sun et al., OSDI 2024).
        """
        now = self._clock()
        if now < self._relieved_at.get(replica_id, -inf) + _RELIEVE_EVERY_S:
            return
        self._relieved_at[replica_id] = now
        for in_flight in reversed(self._on_replica.get(replica_id, {}).values()):
            may_leave = in_flight.prefixes_at is not None and in_flight.num_times_short < _MAX_TIMES_SHORT
            if not (in_flight.num_tokens and may_leave):
                continue
            others = {*self._open_replica_ids(in_flight)} - {replica_id}
            roomy = self._registry.have_room(in_flight.request, in_flight.num_tokens, others)
            if roomy:
                in_flight.num_times_short += 1
                in_flight.fail(RequestMoved("it is short of KV memory", reason="memory", avoid=others - roomy))
                return

    def _close_if_idle(self, replica_id: str) -> None:
        if replica_id not in self._on_replica:
            self._close_connection(replica_id)

    def _close_connection(self, replica_id: str) -> None:
        if replica_id in self._connections:
            self._connections.pop(replica_id).close()
            self._relieved_at.pop(replica_id, None)
            if replica_id in self._leaving:
                self._leaving.pop(replica_id).cancel()

    def _on_lost(self, replica_id: str, lost: ReplicaLost) -> None:
        self._registry.suspect(replica_id)
        requests = self._on_replica.get(replica_id, {}).values()
        if requests:
            logger.warning("replica %s: its %d requests resume on other replicas", replica_id, len(requests))
        for in_flight in requests:
            in_flight.fail(lost)
        if not self._registry.accepts_requests(replica_id):
            self._close_connection(replica_id)


class _Question:
    """A question to several replicas, with their answers so far."""

    def __init__(self, replica_ids: Iterable[str]) -> None:
        self.answers: dict[str, bytes | None] = dict.fromkeys(replica_ids)
        self.open = dict.fromkeys(self.answers)  # replicas that have not answered yet, in order
        self.ended = asyncio.get_running_loop().create_future()
        self._check_ended()

    def close(self, replica_id: str, answer: bytes | None = None) -> None:
        """Record a replica's answer, or None if it cannot answer. Only the first call for a replica counts."""
        if replica_id not in self.open:
            return
        del self.open[replica_id]
        self.answers[replica_id] = answer
        self._check_ended()

    def _check_ended(self) -> None:
        if not self.open and not self.ended.done():
            self.ended.set_result(None)
