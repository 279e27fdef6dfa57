"""Sends the messages about ended batches, retries failed messages for a day, and resumes after a crash."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from app.config import WebhooksConfig
from app.disk import STORAGE_FAILURES, STORAGE_PAUSE_S, OneThread
from app.errors import described, traceback_of
from app.webhooks.client import DeliveryFailed, WebhookClient, WebhookMessage
from app.webhooks.outbox import DeliveryState, WebhookOutbox
from app.webhooks.receiver import WebhookReceiver, default_receiver

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySchedule:
    """When failed attempts are retried. Services have no reason to change these times; tests use shorter pauses."""

    first_pause_s: float = 5.0  # long enough for a receiver to restart
    max_pause_s: float = 3600.0  # a receiver that was down for long receives its messages within an hour
    give_up_after_s: float = 86_400.0  # a day, which is also the time limit of a batch

    def pause_s(self, num_attempts: int, rng: random.Random) -> float:
        """Return the pause after `num_attempts` failed attempts, in seconds. The pause doubles up to `max_pause_s`.

        It is then multiplied by a random factor from 0.5 to 1, to spread out messages that failed together.
        """
        whole = min(self.first_pause_s * 2.0 ** min(num_attempts - 1, 64), self.max_pause_s)
        return whole * rng.uniform(0.5, 1.0)


class WebhookDispatcher:
    """Sends each message when its batch ends, and again after a pause if an attempt fails."""

    def __init__(
        self,
        outbox: WebhookOutbox,
        thread: OneThread,
        client: WebhookClient,
        config: WebhooksConfig,
        retries: RetrySchedule,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        """Use `outbox` in `thread` only. `clock` returns seconds since 1970, and `rng` randomizes pauses."""
        self._outbox = outbox
        self._thread = thread
        self._client = client
        self._config = config
        self._retries = retries
        self._clock = clock
        self._rng = rng
        self._woken = asyncio.Event()
        self._being_sent: Counter[str] = Counter()  # number of messages by owner
        self.num_attempts = self.num_delivered = self.num_given_up = 0  # counts of this process

    def wake(self) -> None:
        """Make `work` check immediately whether a message is due."""
        self._woken.set()

    async def work(self) -> None:
        """Send messages as they become due. Runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._woken.clear()
                try:
                    sleep_s = await self._send_due(group)
                except STORAGE_FAILURES as error:
                    logger.error("the storage failed; no webhooks are sent until it works again: %s", described(error))
                    sleep_s = STORAGE_PAUSE_S
                with suppress(TimeoutError):
                    async with asyncio.timeout(sleep_s):
                        await self._woken.wait()

    async def _send_due(self, group: asyncio.TaskGroup) -> float:
        """Start to send the messages that are due. Returns the number of seconds to wait before the next call."""
        max_at_once = 16
        room = max_at_once - self._being_sent.total()
        max_sleep_s = 60.0
        if not room:
            return max_sleep_s  # the end of any attempt wakes this loop
        now = self._clock()
        due_at = await self._thread.run(self._outbox.next_due_at)
        if due_at is None or due_at > now:
            return max_sleep_s if due_at is None else min(due_at - now, max_sleep_s)
        lease_s = 5.0  # leaves time to store the outcome after the longest attempt
        until = now + self._client.timeout_s + lease_s
        for message in await self._thread.run(self._outbox.take, now, until, room, dict(self._being_sent)):
            self._being_sent[message.owner] += 1
            group.create_task(self._send(message))
        return 0.0

    async def _send(self, message: WebhookMessage) -> None:
        try:
            await self._attempt(message)
        except STORAGE_FAILURES as error:  # the message becomes due again when its lease is over
            logger.error("webhook %s of %s: the storage failed: %s", message.id, message.batch_id, described(error))
        finally:
            self._being_sent -= Counter([message.owner])
            self.wake()

    async def _attempt(self, message: WebhookMessage) -> None:
        self.num_attempts += 1
        try:
            await self._client.deliver(message, await self._receiver_of(message), self._clock())
        except DeliveryFailed as failure:
            await self._failed(message, failure)
        except Exception as error:
            attempt, stack = message.num_attempts, traceback_of(error)
            logger.error("webhook %s of %s: attempt %d failed: %s", message.id, message.batch_id, attempt, stack)
            await self._failed(
                message, DeliveryFailed("the server failed to send the message; see its log for the reason")
            )
        else:
            logger.info("webhook %s of %s: delivered at attempt %d", message.id, message.batch_id, message.num_attempts)
            self.num_delivered += 1
            await self._thread.run(self._outbox.end, message, DeliveryState.DELIVERED)

    async def _failed(self, message: WebhookMessage, failure: DeliveryFailed) -> None:
        pause = self._retries.pause_s(message.num_attempts, self._rng)
        next_at = self._clock() + pause
        is_late = next_at > message.ended_at + self._retries.give_up_after_s
        max_attempts = 1000  # includes attempts that a crash has interrupted, which the schedule does not limit
        if failure.is_final or is_late or message.num_attempts >= max_attempts:
            logger.warning("webhook %s of %s: will not be retried: %s", message.id, message.batch_id, failure.reason)
            self.num_given_up += 1
            await self._thread.run(self._outbox.end, message, DeliveryState.GIVEN_UP, failure.reason)
            return
        logger.info(
            "webhook %s of %s: attempt %d failed; retrying in %.0f s: %s",
            message.id, message.batch_id, message.num_attempts, pause, failure.reason,
        )  # fmt: skip
        await self._thread.run(self._outbox.put_off, message, next_at, failure.reason)

    async def _receiver_of(self, message: WebhookMessage) -> WebhookReceiver:
        if message.receiver is not None:
            return message.receiver
        try:
            receiver = await asyncio.to_thread(default_receiver, self._config)
        except (OSError, ValueError):
            raise DeliveryFailed("the file with the secret cannot be read") from None
        if receiver is None:
            raise DeliveryFailed("the settings no longer name a default receiver", is_final=True)
        return receiver
