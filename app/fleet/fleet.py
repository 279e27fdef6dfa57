"""All replicas of one model as one `Generate`: streams that go on when the replica that served them does not."""

from __future__ import annotations

import asyncio
import logging
import time
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

logger = logging.getLogger(__name__)

# Between the end of a request at its replica and the arrival of its last tokens here, which come another way.
_LAST_TOKENS_S = 2.0
_LONGEST_PAUSE_S = 1.0  # between two tries to go on where all replicas are full
# What may have killed its replica lets others go first: those that get a token before it comes are innocent.
_SUSPECT_PAUSE_S = 0.25


class Calls(Protocol):
    """How replicas are reached. Implemented over Serve's handles (`deployments/calls.py`), faked in tests."""

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


@dataclass(slots=True)
class Totals:
    """What has happened since the process began."""

    fenced_deltas: int = 0  # late words of attempts that were given up
    losses: int = 0  # of streams from a replica
    resumes: int = 0  # requests that went on elsewhere after their first token
    restarts: int = 0  # and before it
    given_up: int = 0


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
        self._lines: dict[str, Line] = {}
        self.totals = Totals()
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
            attempt = await self._begin(journal, avoid)
            try:
                while True:
                    delta = journal.book(await attempt.next())
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
                self._end(attempt)
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
            now = self._clock()
            attempt = Attempt(journal.next_request(now), began_at=now)
            try:
                self._board.expect(attempt.request, avoid=avoid)
            except Overloaded as full:
                await self._wait_for_room(journal, full)
                continue
            self._attempts[attempt.attempt_id] = attempt
            attempt.sending = asyncio.get_running_loop().create_task(self._send(attempt))
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

    def _end(self, attempt: Attempt) -> None:
        """The attempt is over, however: nothing of it stays."""
        del self._attempts[attempt.attempt_id]
        attempt.has_ended = True
        if attempt.sending is not None:
            attempt.sending.cancel()
        self._board.end(attempt.attempt_id, by_itself=attempt.is_done)
        if attempt.replica_id is not None and attempt.replica_id not in self._board.replica_ids:
            self._close_if_idle(attempt.replica_id)

    def _note_loss(self, journal: Journal, attempt: Attempt, lost: Lost) -> float:
        """Count a loss; returns how long to wait before the next try, in seconds.

        Raises Unavailable when it was one too many. A request that may itself be what kills replicas is given up one
        loss sooner than those that only were there: whatever it takes from them, they get over it.
        """
        if attempt.replica_id is not None:
            self._board.suspect(attempt.replica_id)  # until it is heard of again
        now = self._clock()
        was_hopeless = not (attempt.is_trusted or attempt.is_accepted)
        if was_hopeless and journal.num_resumes and now - journal.lost_at <= self._limits.place_timeout_s:
            return _SUSPECT_PAUSE_S  # it was asked for want of a better one: as good as waiting for a replica
        journal.num_resumes += 1
        journal.lost_at = now
        request_id = journal.request.request_id
        has_progressed = journal.num_tokens > len(attempt.request.generated_token_ids)
        is_fruitless = attempt.is_trusted and not has_progressed
        journal.num_fruitless = 0 if has_progressed else journal.num_fruitless + is_fruitless
        max_resumes = self._limits.max_resumes
        if journal.num_resumes > max_resumes or journal.num_fruitless >= max(2, max_resumes):
            self.totals.given_up += 1
            raise ReplicasLost(
                f"{journal.num_resumes} replicas were lost while they served this request; it is not tried again"
            ) from lost
        self._metrics.resumed(lost.reason)
        if journal.has_begun:
            self.totals.resumes += 1
        else:
            self.totals.restarts += 1
        logger.warning(
            "request %s goes on elsewhere after %d tokens: replica %s: %s",
            request_id, journal.num_tokens, attempt.replica_id, lost,
        )  # fmt: skip
        return _SUSPECT_PAUSE_S * journal.num_fruitless if is_fruitless else 0.0

    async def _wait_for_room(self, journal: Journal, full: Overloaded) -> None:
        """Every replica is full. A new request is told so; one that was accepted before, and lost, waits instead."""
        now = self._clock()
        if not journal.num_resumes or now - journal.lost_at > self._limits.place_timeout_s:
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
            attempt.placed(replica_id, self._clock(), is_trusted=replica_id not in self._board.suspects)
            decision = self._board.decision(request_id)
            self._metrics.dispatched("any" if decision is None else decision.policy)
            self._line(replica_id)

    def _on_frame(self, replica_id: str, frame: Frame) -> None:
        self._board.note(replica_id, frame.report)
        self._metrics.frame_received(len(frame.deltas))
        for delta in frame.deltas:
            attempt = self._attempts.get(delta.request_id)
            if attempt is None or attempt.has_ended:
                self.totals.fenced_deltas += 1
                continue
            attempt.put(delta)
            if delta.token_ids:
                self._board.progress(delta.request_id, len(delta.token_ids))

    def _on_lost(self, replica_id: str, lost: Lost) -> None:
        self._board.suspect(replica_id)
        self.totals.losses += 1
        for attempt in self._attempts.values():
            if attempt.replica_id == replica_id:
                attempt.fail(lost)
        if replica_id not in self._board.replica_ids:
            line = self._lines.pop(replica_id, None)
            if line is not None:
                line.close()


def _with(replica_ids: frozenset[str], replica_id: str | None) -> frozenset[str]:
    return replica_ids if replica_id is None else replica_ids | {replica_id}
