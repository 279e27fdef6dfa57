"""Sends the letters of ended batches until they arrive or are given up, from wherever a crash has left them."""

from __future__ import annotations

import asyncio
import logging
import random
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from app.config import WebhooksConfig
from app.jobs.one_thread import OneThread
from app.jobs.service import NewWebhook
from app.jobs.webhook_outbox import Letter, Letters, LetterState
from app.webhooks import Courier, DeliveryFailed, Message, default_secret, pause_s

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 16
MAX_ATTEMPTS = 1000  # those that nobody lived to book included
MAX_SLEEP_S = 60.0
STORAGE_PAUSE_S = 5.0
_LEASE_S = 5.0  # beyond the time of an attempt, for booking it


class Postman:
    """Looks for what is due when a batch ends and when a pause is over."""

    def __init__(
        self,
        letters: Letters,
        thread: OneThread,
        courier: Courier,
        config: WebhooksConfig,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        """`letters` is used in `thread` only; `clock` gives seconds since 1970; `rng` spreads the attempts."""
        self._letters = letters
        self._thread = thread
        self._courier = courier
        self._config = config
        self._clock = clock
        self._rng = rng
        self._woken = asyncio.Event()
        self._being_sent: Counter[str] = Counter()  # letters by owner
        self.num_attempts = self.num_delivered = self.num_given_up = 0  # of this process

    def wake(self) -> None:
        """There may be something to send."""
        self._woken.set()

    async def work(self) -> None:
        """Send what there is to send, for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._woken.clear()
                try:
                    sleep_s = await self._send_due(group)
                except (OSError, sqlite3.Error):
                    logger.exception("the storage failed; webhooks wait for it")
                    sleep_s = STORAGE_PAUSE_S
                with suppress(TimeoutError):
                    async with asyncio.timeout(sleep_s):
                        await self._woken.wait()

    async def _send_due(self, group: asyncio.TaskGroup) -> float:
        """Begin to send what is due; seconds until more can be."""
        room = MAX_AT_ONCE - self._being_sent.total()
        if not room:
            return MAX_SLEEP_S  # whoever ends wakes us
        due_at = await self._thread.run(self._letters.next_due_at)
        now = self._clock()
        if due_at is None or due_at > now:
            return MAX_SLEEP_S if due_at is None else min(due_at - now, MAX_SLEEP_S)
        until = now + self._config.timeout_s + _LEASE_S
        for letter in await self._thread.run(self._letters.take, now, until, room, dict(self._being_sent)):
            self._being_sent[letter.owner] += 1
            group.create_task(self._send(letter))
        return 0.0

    async def _send(self, letter: Letter) -> None:
        try:
            await self._attempt(letter)
        except (OSError, sqlite3.Error):  # it comes again when its time as taken is over
            logger.exception("webhook %s of %s: the storage failed", letter.id, letter.batch_id)
        finally:
            self._being_sent -= Counter([letter.owner])
            self.wake()

    async def _attempt(self, letter: Letter) -> None:
        self.num_attempts += 1
        try:
            await self._courier.deliver(await self._message(letter), self._clock())
        except DeliveryFailed as failure:
            await self._failed(letter, failure)
        except Exception:
            logger.exception("webhook %s of %s: attempt %d", letter.id, letter.batch_id, letter.num_attempts)
            await self._failed(letter, DeliveryFailed("this server failed on it; its log has the reason"))
        else:
            logger.info("webhook %s of %s: delivered at attempt %d", letter.id, letter.batch_id, letter.num_attempts)
            self.num_delivered += 1
            await self._thread.run(self._letters.end, letter, LetterState.DELIVERED)

    async def _failed(self, letter: Letter, failure: DeliveryFailed) -> None:
        pause = pause_s(letter.num_attempts, self._config, self._rng)
        next_at = self._clock() + pause
        is_late = next_at > letter.ended_at + self._config.give_up_after_s
        if failure.is_final or is_late or letter.num_attempts >= MAX_ATTEMPTS:
            logger.warning("webhook %s of %s: given up: %s", letter.id, letter.batch_id, failure.reason)
            self.num_given_up += 1
            await self._thread.run(self._letters.end, letter, LetterState.GIVEN_UP, failure.reason)
            return
        logger.info(
            "webhook %s of %s: attempt %d failed, the next in %.0f s: %s",
            letter.id, letter.batch_id, letter.num_attempts, pause, failure.reason,
        )  # fmt: skip
        await self._thread.run(self._letters.put_off, letter, next_at, failure.reason)

    async def _message(self, letter: Letter) -> Message:
        receiver = letter.receiver
        if receiver is None:
            receiver = await asyncio.to_thread(_default_receiver, self._config)
        return Message(
            id=letter.id,
            url=receiver.url,
            secret=receiver.secret,
            event=letter.event,
            subject_id=letter.batch_id,
            created_at=letter.ended_at,
        )


def _default_receiver(config: WebhooksConfig) -> NewWebhook:
    if config.url is None:
        raise DeliveryFailed("there is no default receiver any more", is_final=True)
    try:
        return NewWebhook(url=config.url, secret=default_secret(config))
    except (OSError, ValueError):
        raise DeliveryFailed("the file with the secret cannot be read") from None
