"""Sends the rows of a backlog to a service, each by a request of its own, as many at once as fill its idle slots."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from app.errors import Failure
from app.jobs.backlog import Backlog
from app.jobs.engine_worker import Harvest
from app.jobs.http_client import RowFailed, Service, ServiceFull, ServiceGone
from app.jobs.questions import Question
from app.jobs.record import Record
from app.jobs.window import Window
from app.jobs.workers import Account, Workers

logger = logging.getLogger(__name__)

TICK_S = 0.1
BEGUN_AFTER_S = 1.0  # a row that was not refused by then is computed
# Who is under way for longer is neither refused nor waits for a replica, so the service is there. It must be more than
# replicas.place_timeout_s of the service.
ALIVE_AFTER_S = 60.0
MAX_FAILURES = 3  # of one row, at a service that answers others
_SERVICE = 0  # the one engine that the backlog knows


class Sender(Workers[Question]):
    """One service as the engine of a run."""

    def __init__(
        self, backlog: Backlog[Question], account: Account, service: Service, *, max_under_way: int, patience_s: float
    ) -> None:
        """A service that does not answer is waited for, at most `patience_s` seconds at a time."""
        super().__init__(backlog, account)
        self._service = service
        self._window = Window(max_under_way)
        self._patience_s = patience_s
        self._sent_at: dict[int, float] = {}  # rows under way
        self._num_failures: dict[int, int] = {}  # by row
        self._trouble = ""

    def parts(self) -> Sequence[Coroutine[Any, Any, None]]:
        """See `Workers`."""
        return [self._send()]

    @property
    def num_wanted(self) -> int:
        """See `Workers`."""
        return max(64, 2 * self._window.limit)

    @property
    def state(self) -> str:
        """See `Workers`."""
        if self._window.gone_since is not None:
            return f"waiting for the service: {self._trouble}"
        return f"{self._num_under_way:,} under way"

    @property
    def _num_under_way(self) -> int:
        return len(self._backlog.rows_on(_SERVICE))

    async def _send(self) -> None:
        """Until nothing is left to do. Raises Failure when the service stays away, or does not take the key."""
        self._account.ready()
        try:
            async with asyncio.TaskGroup() as group:
                while not self._is_over:
                    self._look_at_the_clock(time.monotonic())
                    for question in self._next():
                        group.create_task(self._ask(question))
                    await self._wait()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def _look_at_the_clock(self, now: float) -> None:
        self._check_patience(now)
        begun = [row for row, sent_at in self._sent_at.items() if now - sent_at > BEGUN_AFTER_S]
        self._backlog.begin(_SERVICE, begun)
        self._account.begun(begun)
        if self._backlog.num_waiting:
            self._window.grow(now, self._num_under_way)

    def _check_patience(self, now: float) -> None:
        gone_since = self._window.gone_since
        if gone_since is None:
            return
        if any(now - sent_at > min(ALIVE_AFTER_S, self._patience_s / 2) for sent_at in self._sent_at.values()):
            self._window.answered()
        elif now - gone_since > self._patience_s:
            raise Failure(
                f"the service has not answered for {self._patience_s:g} s: {self._trouble}; what is done is kept: go "
                f"on with --resume once it is back"
            )

    def _next(self) -> list[Question]:
        room = self._window.limit - self._num_under_way
        if room <= 0:
            return []
        questions = self._backlog.take(_SERVICE, room=room, input_is_over=self._input_is_over)
        now = time.monotonic()
        self._sent_at.update((question.number, now) for question in questions)
        return questions

    async def _wait(self) -> None:
        """Return when something has changed, or the clock should be looked at."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait(), TICK_S)
            except TimeoutError:
                return

    async def _ask(self, question: Question) -> None:
        try:
            record = await self._service.ask(question)
        except ServiceFull as full:
            self._take_back(question)
            self._window.refused(time.monotonic(), self._num_under_way, retry_after_s=full.retry_after_s)
        except ServiceGone as gone:
            self._note_outage(str(gone))
            self._take_back(question)
        except RowFailed as failed:
            self._note_failure(question, str(failed))
        else:
            self._settle(question, record)
        await self.has_changed()

    def _settle(self, question: Question, record: Record) -> None:
        self._window.answered()
        del self._sent_at[question.number]
        self._num_failures.pop(question.number, None)
        harvest = Harvest(
            records=(record,), begun=(question.number,), token_ids={}, num_tokens=record.completion_tokens
        )
        self._account.book(harvest)
        self._backlog.settle(_SERVICE, [question.number])

    def _note_failure(self, question: Question, reason: str) -> None:
        self._window.answered()
        num_failures = self._num_failures[question.number] = self._num_failures.get(question.number, 0) + 1
        if num_failures < MAX_FAILURES:
            self._take_back(question)
        else:
            reason = f"the service failed on this row {num_failures} times, the last time: {reason}"
            self._settle(question, question.failed(reason))

    def _note_outage(self, reason: str) -> None:
        if self._window.gone_since is None:
            logger.warning("the service does not answer, and is waited for: %s", reason)
        self._trouble = reason
        self._window.gone(time.monotonic())

    def _take_back(self, question: Question) -> None:
        """The row waits again."""
        del self._sent_at[question.number]
        if self._backlog.give_back(_SERVICE, question.number):
            self._account.interrupted([question.number])
