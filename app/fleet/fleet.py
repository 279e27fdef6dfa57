"""All replicas of one model as one `Generate`: streams that go on when the replica that served them does not."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from app.engine.request import Queued, Request, TokenDelta
from app.errors import CarouselError, DeadlineMissed, Failure, Overloaded, ReplicasLost, Unavailable
from app.fleet.attempt import Attempt, Lost
from app.fleet.board import Board
from app.fleet.frame import Frame
from app.fleet.journal import Journal
from app.fleet.line import Line, Patience
from app.fleet.trials import Trials

logger = logging.getLogger(__name__)

# Between the end of a request at its replica and the arrival of its last tokens here, which come another way.
_LAST_TOKENS_S = 2.0
_LONGEST_PAUSE_S = 1.0  # between two tries to go on where all replicas are full
# What may have killed its replica lets others go first: those that get a token before it comes are innocent.
_SUSPECT_PAUSE_S = 0.25
_MAX_EXPLAINED = 100


class Calls(Protocol):
    """How replicas are reached. Implemented over Serve's handles (`deployments/serve/calls.py`), faked in tests."""

    async def serve(self, request: Request) -> None:
        """Have a request served by a replica, tried in the board's order; returns when it has ended there.

        Tells the board where it was sent. Cancelling it aborts the request. Raises Lost when the replica is gone, a
        CarouselError when the request was refused.
        """
        ...

    def frames(self, replica_id: str, *, heartbeat_s: float) -> AsyncIterator[Frame]:
        """What one replica says to this process from now on."""
        ...


class FleetMetrics(Protocol):
    """Who counts. Implemented by `app.metrics.ModelMetrics`."""

    def dispatched(self, reason: str) -> None:
        """A request was sent to a replica; one word for what decided which."""

    def resumed(self, reason: str) -> None:
        """A request goes on at another replica; one word for what happened to the one before."""

    def frame_received(self, num_deltas: int) -> None:
        """A frame has come, with news of so many requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a fleet waits and how often it tries. Seconds."""

    max_resumes: int
    place_timeout_s: float  # for any replica to be there
    patience: Patience


class Fleet:
    """Sends requests to replicas and hears of them on one line for each replica. Belongs to one event loop.

    Every token is booked in the request's journal. When its replica is lost, the request goes to another with the
    journal, and goes on exactly where it stopped (NVIDIA Dynamo's request migration carries tokens only; here
    randomness is a function of seed and position, so tokens are all there is to carry).
    """

    def __init__(
        self,
        calls: Calls,
        board: Board,
        limits: Limits,
        metrics: FleetMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls = calls
        self._board = board
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._attempts: dict[str, Attempt] = {}
        self._trials = Trials()
        self._explained: deque[str] = deque(maxlen=_MAX_EXPLAINED)  # replicas killed by requests that were given up
        self._lines: dict[str, Line] = {}
        self._calls_under_way: set[asyncio.Task[None]] = set()
        board.on_replicas = self._replicas_changed
        board.on_placed = self._placed
        self._replicas_changed(board.replica_ids)

    async def generate(self, request: Request) -> AsyncIterator[TokenDelta]:
        """Stream the tokens of `request`, whichever replicas they come from; closing the stream aborts it.

        The first delta may be empty: then it says that the request is queued, and where.

        Raises:
            InvalidRequest, DeadlineMissed, StepFailed: as the engine says.
            Overloaded: every replica is full.
            Unavailable: there was no replica; ReplicasLost: too many were lost under this request.
        """
        journal = Journal(request, began_at=self._clock())
        avoid: frozenset[str] = frozenset()
        while True:
            pause_s = 0.0
            is_on_trial = self._is_last_chance(journal)
            if is_on_trial:
                await self._trials.begin(request.request_id)
            try:
                attempt = await self._begin(journal, avoid)
            except BaseException:  # it was refused, or its caller has gone: the next need not wait for its time to end
                self._trials.end(request.request_id)
                raise
            try:
                while True:
                    delta = journal.book(await attempt.next())
                    if is_on_trial and journal.has_progressed:
                        self._trials.end(request.request_id)
                    if delta.queued is not None:
                        delta = delta._replace(queued=self._with_place(attempt, delta.queued))
                    yield delta
                    if delta.finish_reason is not None:
                        attempt.is_done = True
                        return
            except Lost as lost:
                pause_s = self._note_loss(journal, attempt, lost)
                avoid = _with(avoid, attempt.replica_id)
            except DeadlineMissed:
                raise
            except Overloaded as full:
                avoid = _with(avoid, attempt.replica_id)
                if attempt.replica_id is None or avoid.issuperset(self._board.replica_ids):
                    await self._wait_for_room(journal, full)
                    avoid = frozenset()
            finally:
                self._end(attempt, journal)
                self._trials.end(request.request_id)
            await asyncio.sleep(pause_s)

    @property
    def num_attempts(self) -> int:
        """Requests under way."""
        return len(self._attempts)

    def close(self) -> None:
        """Stop listening to the replicas."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    # ------------------------------------------------------------------ one request

    async def _begin(self, journal: Journal, avoid: frozenset[str]) -> Attempt:
        while True:
            attempt = Attempt(journal.next_request(self._clock()))
            try:
                self._board.expect(attempt.request, avoid=avoid)
            except Overloaded as full:
                await self._wait_for_room(journal, full)
                continue
            self._attempts[attempt.attempt_id] = attempt
            attempt.sending = asyncio.get_running_loop().create_task(self._send(attempt))
            self._calls_under_way.add(attempt.sending)
            attempt.sending.add_done_callback(self._calls_under_way.discard)
            return attempt

    def _with_place(self, attempt: Attempt, queued: Queued) -> Queued:
        decision = self._board.decision(attempt.attempt_id)
        why = "" if decision is None else decision.explain()
        return queued._replace(replica_id=attempt.replica_id or "", why_there=why)

    async def _send(self, attempt: Attempt) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._limits.place_timeout_s, self._check_place, attempt)
        try:
            await self._calls.serve(attempt.request)
        except (CarouselError, Lost) as error:
            attempt.fail(error)
        except Exception:
            logger.exception("request %s could not be sent", attempt.attempt_id)
            attempt.fail(Failure("the request could not be sent to a replica"))
        else:
            if not attempt.has_ended:
                loop.call_later(
                    _LAST_TOKENS_S, attempt.fail, Lost("its last tokens did not arrive", reason="incomplete")
                )
        finally:
            timer.cancel()

    def _check_place(self, attempt: Attempt) -> None:
        if attempt.replica_id is None:
            seconds = self._limits.place_timeout_s
            attempt.fail(Unavailable(f"no replica was there to take this request for {seconds:g} s; send it again"))

    def _end(self, attempt: Attempt, journal: Journal) -> None:
        """The attempt is over, however: nothing of it stays."""
        del self._attempts[attempt.attempt_id]
        attempt.has_ended = True
        if attempt.sending is not None and not attempt.is_done:  # else the call returns now, which costs less
            attempt.sending.cancel()
        self._board.end(attempt.attempt_id, num_generated=journal.num_tokens if attempt.is_done else None)
        if attempt.replica_id is not None and attempt.replica_id not in self._board.replica_ids:
            self._close_if_idle(attempt.replica_id)

    def _note_loss(self, journal: Journal, attempt: Attempt, lost: Lost) -> float:
        """Count a loss; returns how long to wait before the next try, in seconds.

        Raises Unavailable when it was one too many. A request that may itself be what kills replicas is given up one
        loss sooner than those that only were there: whatever it takes from them, they get over it. Once it is known,
        they are acquitted of what it has killed.
        """
        if attempt.replica_id is not None:
            self._board.suspect(attempt.replica_id)  # until it is heard of again
        now = self._clock()
        was_hopeless = not (attempt.is_trusted or attempt.is_accepted)
        if was_hopeless and self._is_recent(journal, now):
            return _SUSPECT_PAUSE_S  # it was asked for want of a better one: as good as waiting for a replica
        journal.note_loss(attempt.replica_id or attempt.attempt_id, now, was_sound=attempt.is_trusted)
        journal.forgive(self._explained)
        num_fruitless, num_resumes = len(journal.fruitless_on), len(journal.lost_on)
        is_culprit = num_fruitless >= self._max_fruitless
        if is_culprit:
            self._explained.extend(journal.fruitless_on)
        if is_culprit or num_resumes > self._limits.max_resumes:
            raise ReplicasLost(
                f"{num_resumes} replicas were lost while they served this request; it is not tried again"
            ) from lost
        self._metrics.resumed(lost.reason)
        logger.warning(
            "request %s goes on elsewhere after %d tokens: replica %s: %s",
            journal.request.request_id, journal.num_tokens, attempt.replica_id, lost,
        )  # fmt: skip
        return _SUSPECT_PAUSE_S * num_fruitless

    @property
    def _max_fruitless(self) -> int:
        """So many replicas in a row, lost before they gave it a token, and a request is taken for the reason."""
        return max(2, self._limits.max_resumes)

    def _is_last_chance(self, journal: Journal) -> bool:
        """Whether a request would be given up at its next loss without a token."""
        journal.forgive(self._explained)
        return len(journal.fruitless_on) + 1 >= self._max_fruitless

    def _is_recent(self, journal: Journal, now: float) -> bool:
        """Whether a replica was lost under this request not long ago."""
        return journal.lost_at is not None and now - journal.lost_at <= self._limits.place_timeout_s

    async def _wait_for_room(self, journal: Journal, full: Overloaded) -> None:
        """Every replica is full. A new request is told so; one that was accepted before, and lost, waits instead."""
        if not self._is_recent(journal, self._clock()):
            raise full
        await asyncio.sleep(min(full.retry_after_s, _LONGEST_PAUSE_S))

    # ------------------------------------------------------------------ the replicas

    def _replicas_changed(self, replica_ids: Collection[str]) -> None:
        for replica_id in replica_ids:
            self._line(replica_id)
        for replica_id in [known for known in self._lines if known not in replica_ids]:
            self._close_if_idle(replica_id)

    def _line(self, replica_id: str) -> None:
        """Listen to a replica, if nobody does yet."""
        if replica_id not in self._lines:
            patience = self._limits.patience
            self._lines[replica_id] = Line(
                replica_id,
                lambda: self._calls.frames(replica_id, heartbeat_s=patience.silence_s / 4),
                patience=patience,
                on_frame=self._on_frame,
                on_lost=self._on_lost,
            )

    def _close_if_idle(self, replica_id: str) -> None:
        """A replica that leaves is listened to until it has ended what it has of ours."""
        if not any(attempt.replica_id == replica_id for attempt in self._attempts.values()):
            line = self._lines.pop(replica_id, None)
            if line is not None:
                line.close()

    def _placed(self, request_id: str, replica_id: str) -> None:
        attempt = self._attempts.get(request_id)
        if attempt is not None:
            is_trusted = replica_id not in self._board.suspects
            attempt.placed(replica_id, is_trusted=is_trusted)
            if is_trusted and replica_id in self._explained:
                self._explained.remove(replica_id)  # it was not dead but silent
            decision = self._board.decision(request_id)
            self._metrics.dispatched("any" if decision is None else decision.policy)
            self._line(replica_id)
            if self._board.has_become_suspect(request_id, replica_id):
                # Whoever was there when it was lost has been told; this one came in between and would wait for long.
                attempt.fail(Lost("it was lost while the request was on its way", reason="late"))

    def _on_frame(self, replica_id: str, frame: Frame) -> None:
        self._board.note(replica_id, frame.report)
        self._metrics.frame_received(len(frame.deltas))
        for delta in frame.deltas:
            attempt = self._attempts.get(delta.request_id)
            if attempt is None or attempt.has_ended:
                continue  # late words of an attempt that was given up
            attempt.put(delta)
            if delta.token_ids:
                self._board.progress(delta.request_id, len(delta.token_ids))

    def _on_lost(self, replica_id: str, lost: Lost) -> None:
        self._board.suspect(replica_id)
        for attempt in self._attempts.values():
            if attempt.replica_id == replica_id:
                attempt.fail(lost)
        if replica_id not in self._board.replica_ids:
            line = self._lines.pop(replica_id, None)
            if line is not None:
                line.close()


def _with(replica_ids: frozenset[str], replica_id: str | None) -> frozenset[str]:
    return replica_ids if replica_id is None else replica_ids | {replica_id}
