"""What is told of a batch's end: at least once, over any crash, with patience, and never for ever."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from app.batches import BatchLimits, NewBatch, PageOf
from app.config import WebhooksConfig
from app.errors import InvalidRequest, Overloaded, Unavailable
from app.jobs.local_service import LocalBatchService
from app.webhooks.client import WebhookClient
from app.webhooks.dispatcher import RetrySchedule
from tests import waiting
from tests.jobs.test_batch_runner import raising
from tests.kit.engine import FakeClock
from tests.kit.jobs import CHAT, OWNER, Crash, Echo, Writes, input_line, jsonl, until, upload
from tests.kit.jobs import service_in as in_folder
from tests.webhooks.receivers import LOCAL, OK, QUICKLY, SECRET, Received, Receiver, at, status

ONE = jsonl(input_line("one"))
verifier = openai.OpenAI(api_key="none").webhooks


def service_in(
    folder: Path,
    answer: Any = None,
    *,
    webhooks: WebhooksConfig = WebhooksConfig(allowed_networks=LOCAL),  # noqa: B008 - frozen
    timeout_s: float = 5.0,
    retries: RetrySchedule = QUICKLY,
    **settings: Any,
) -> LocalBatchService:
    client = WebhookClient(webhooks.allowed_networks, timeout_s=timeout_s)
    return in_folder(folder, answer or Echo(), webhooks=webhooks, client=client, retries=retries, **settings)


async def begin(service: LocalBatchService, url: str | None, content: bytes = ONE, owner: str = OWNER) -> str:
    file_id = await upload(service, content, owner=owner)
    webhook = None if url is None else at(url)
    new = NewBatch(owner=owner, endpoint=CHAT, input_file_id=file_id, webhook=webhook)
    return str((await service.create_batch(new))["id"])


def has_failed(batch: dict[str, Any], *, num_attempts: int) -> bool:
    """Whether its webhook has failed in so many attempts at least."""
    webhook = batch["webhook"]
    return webhook["attempts"] >= num_attempts and webhook["last_error"] is not None


async def webhook_of(service: LocalBatchService, batch_id: str, status: str) -> dict[str, Any]:
    """What is shown of a batch's webhook, once it has this status."""
    batch = await waiting.until(
        lambda: service.batch(OWNER, batch_id), lambda batch: batch["webhook"]["status"] == status
    )
    return dict(batch["webhook"])


def read(received: Received, secret: str = SECRET) -> Any:
    """The event, verified as its receiver would."""
    return verifier.unwrap(received.body, received.headers, secret=secret)


async def test_the_receiver_hears_once_of_the_end_of_a_batch(tmp_path: Path) -> None:
    async with Receiver() as receiver, service_in(tmp_path) as service:
        batch_id = await begin(service, receiver.url)
        batch = await until(service, batch_id)
        shown = await webhook_of(service, batch_id, "delivered")
        counts = await service.counts()
        assert (counts["num_lines_completed"], counts["num_lines_failed"]) == (1, 0)
        assert counts["num_webhook_attempts"] == counts["num_webhooks_delivered"] == 1
        assert counts["num_webhooks_given_up"] == counts["num_webhooks_pending"] == 0
        [received] = receiver.received
        event = read(received)
        assert (event.type, event.data.id, event.created_at) == ("batch.completed", batch_id, batch["completed_at"])
        assert event.id == received.headers["webhook-id"] == shown["id"]
        assert (shown["attempts"], shown["last_error"]) == (1, None)


async def test_every_kind_of_end_is_told(tmp_path: Path) -> None:
    echo = Echo({"slow": raising(Overloaded("full", retry_after_s=60))})
    slow = jsonl(input_line("slow"))
    # Long enough that a busy machine cancels the third before it expires.
    async with Receiver() as receiver, service_in(tmp_path, echo, limits=BatchLimits(window_s=4)) as service:
        failed = await begin(service, receiver.url, b"nonsense\n")
        expired = await begin(service, receiver.url, slow)
        cancelled = await begin(service, receiver.url, slow)
        await until(service, cancelled, "in_progress")
        await service.cancel_batch(OWNER, cancelled)
        events = {event.data.id: event.type for event in map(read, await receiver.got(3))}
        assert events == {failed: "batch.failed", expired: "batch.expired", cancelled: "batch.cancelled"}


async def test_a_receiver_that_fails_is_tried_again_with_the_same_message(tmp_path: Path) -> None:
    answers = [status(500), None, b"nonsense\r\n\r\n", status(302, "Location: /"), OK]
    async with Receiver(lambda n: answers[n]) as receiver:
        async with service_in(tmp_path, timeout_s=0.1) as service:
            batch_id = await begin(service, receiver.url)
            shown = await webhook_of(service, batch_id, "delivered")
            assert shown["attempts"] == 5
        assert len(receiver.received) == 5
        assert len({(each.headers["webhook-id"], each.body) for each in receiver.received}) == 1
        for each in receiver.received:
            read(each)


async def test_a_receiver_that_is_down_hears_of_it_after_restarts(tmp_path: Path) -> None:
    clock = FakeClock()
    async with Receiver() as receiver:
        port, retries = receiver.port, RetrySchedule(first_pause_s=60, max_pause_s=600)
    batch_id = ""
    for life in range(3):
        async with service_in(tmp_path, retries=retries, clock=clock) as service:
            batch_id = batch_id or await begin(service, receiver.url)
            batch = await waiting.until(
                partial(service.batch, OWNER, batch_id), partial(has_failed, num_attempts=life + 1), every_s=0.005
            )
            shown = batch["webhook"]
            assert shown["status"] == "pending"
            assert shown["last_error"].startswith("the connection failed")
        clock.at += 1200
    async with Receiver(port=port) as up, service_in(tmp_path, retries=retries, clock=clock) as service:
        shown = await webhook_of(service, batch_id, "delivered")
        assert [read_at(each, clock.at) for each in up.received] == [batch_id]
        assert shown["attempts"] == 4


def read_at(received: Received, at: float) -> str:
    """The batch that a message is about, which was signed at this time."""
    assert received.headers["webhook-timestamp"] == str(int(at))
    return str(json.loads(received.body)["data"]["id"])


async def test_what_was_delivered_but_not_booked_comes_again_as_the_same_message(tmp_path: Path) -> None:
    clock = FakeClock()
    held = True
    async with Receiver(lambda n: None if held else OK) as receiver:
        async with service_in(tmp_path, clock=clock) as service:
            batch_id = await begin(service, receiver.url)
            await receiver.got(1)  # and no more is heard of the process that sent it
        held = False
        async with service_in(tmp_path, clock=clock) as service:
            await asyncio.sleep(0.05)
            assert len(receiver.received) == 1, "an attempt may still be under way"
            clock.at += 11
            service_wakes = await begin(service, None)
            await until(service, service_wakes)
            shown = await webhook_of(service, batch_id, "delivered")
            assert shown["attempts"] == 2
        first, second = receiver.received
        assert (first.headers["webhook-id"], first.body) == (second.headers["webhook-id"], second.body)


async def life_and_death(folder: Path, writes: Writes, num_writes: int) -> bool:
    """Whether a process died at this write, after which the receiver heard of the end in its next life."""
    clock = FakeClock()
    async with Receiver() as receiver:
        async with service_in(folder, clock=clock) as service:
            writes.left = num_writes
            with suppress(Crash, Unavailable):
                batch_id = await begin(service, receiver.url)
                while not writes.is_dead:
                    if (await service.batch(OWNER, batch_id))["webhook"]["status"] == "delivered":
                        return False
                    await asyncio.sleep(0.001)
        writes.left = None
        clock.at += 100  # so that what was under way is due again
        async with service_in(folder, clock=clock) as service:
            for batch in (await service.batches(PageOf(owner=OWNER, limit=10)))["data"]:
                await webhook_of(service, batch["id"], "delivered")
                assert len({(each.headers["webhook-id"], each.body) for each in receiver.received}) == 1
                assert len(receiver.received) <= 2
        return True


def test_wherever_the_process_dies_the_receiver_hears_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Writes().watch(monkeypatch)
    num_points = 0
    while asyncio.run(life_and_death(tmp_path / str(num_points), writes, num_points + 1)):
        num_points += 1
    assert num_points > 20, "every write was a point of death"


async def test_after_a_time_no_more_attempts_are_made_and_the_secret_is_forgotten(tmp_path: Path) -> None:
    retries = RetrySchedule(first_pause_s=0.01, max_pause_s=0.01, give_up_after_s=0.3)
    async with Receiver(lambda n: status(500)) as receiver, service_in(tmp_path, retries=retries) as service:
        batch_id = await begin(service, receiver.url)
        shown = await webhook_of(service, batch_id, "given_up")
        assert shown["last_error"] == "the receiver answered with 500"
        assert shown["attempts"] == len(receiver.received)
    assert not files_with(SECRET.encode(), tmp_path)


def files_with(content: bytes, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and content in path.read_bytes()]


async def test_what_we_did_not_foresee_is_a_failed_attempt_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: WebhookClient, *_: Any) -> Any:
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr(WebhookClient, "_status", broken)
    retries = RetrySchedule(first_pause_s=0.01, max_pause_s=0.05, give_up_after_s=1.2)
    async with service_in(tmp_path, retries=retries) as service:
        shown = await webhook_of(service, await begin(service, "https://example.com/"), "given_up")
        assert shown["last_error"] == "the server failed to send the message; see its log for the reason"
        assert shown["attempts"] > 1
        assert "nobody thought of this" in caplog.text


async def test_a_receiver_that_is_gone_is_not_asked_again(tmp_path: Path) -> None:
    async with Receiver(lambda n: status(410)) as receiver, service_in(tmp_path) as service:
        shown = await webhook_of(service, await begin(service, receiver.url), "given_up")
        assert shown["attempts"] == len(receiver.received) == 1


async def test_slow_receivers_delay_no_other_receiver(tmp_path: Path) -> None:
    async with Receiver(lambda n: None) as slow, Receiver() as quick, service_in(tmp_path, timeout_s=60) as service:
        for _ in range(10):
            await begin(service, slow.url)
        await slow.got(10)
        await webhook_of(service, await begin(service, quick.url), "delivered")
        assert len(slow.received) == 10


async def test_owners_take_turns(tmp_path: Path) -> None:
    async with Receiver(lambda n: None) as slow, Receiver() as quick, service_in(tmp_path, timeout_s=0.5) as service:
        for _ in range(60):
            await begin(service, slow.url)
        await slow.got(16)
        before = len(slow.received)
        await begin(service, quick.url, owner="bob")
        await quick.got(1)
        assert len(slow.received) - before <= 32, "a turn or two of others, not all of them again and again"


async def test_a_default_receiver_hears_of_batches_that_name_none(tmp_path: Path) -> None:
    secret_file = tmp_path / "secret"
    secret_file.write_text(f"{SECRET}\n")
    other = "whsec_" + "QUJD" * 8
    async with Receiver() as default, Receiver() as own:
        webhooks = WebhooksConfig(allowed_networks=LOCAL, url=default.url, secret_file=str(secret_file))
        async with service_in(tmp_path / "folder", webhooks=webhooks) as service:
            plain = await begin(service, None)
            await webhook_of(service, plain, "delivered")
            secret_file.write_text(other)  # from now on it signs
            named = await begin(service, own.url)
            await webhook_of(service, named, "delivered")
            later = await begin(service, None)
            await webhook_of(service, later, "delivered")
            secret_file.unlink()
            without = await begin(service, None)
            batch = await waiting.until(
                lambda: service.batch(OWNER, without), lambda batch: batch["webhook"]["last_error"] is not None
            )
            assert batch["webhook"]["last_error"] == "the file with the secret cannot be read"
        assert [read(default.received[0]).data.id, read(own.received[0]).data.id] == [plain, named]
        assert read(default.received[1], other).data.id == later


async def test_the_receiver_of_the_settings_may_be_in_a_private_network_and_opens_it_to_no_batch(
    tmp_path: Path,
) -> None:
    secret_file = tmp_path / "secret"
    secret_file.write_text(SECRET)
    async with Receiver() as default:
        webhooks = WebhooksConfig(url=default.url, secret_file=str(secret_file))
        async with service_in(tmp_path / "folder", webhooks=webhooks) as service:
            plain = await begin(service, None)
            await webhook_of(service, plain, "delivered")
            for url in (default.url, f"https://localhost:{default.port}/"):
                with pytest.raises(InvalidRequest):
                    await begin(service, url)
        assert [read(each).data.id for each in default.received] == [plain]


async def test_without_any_webhook_there_is_none(tmp_path: Path) -> None:
    async with service_in(tmp_path, webhooks=WebhooksConfig()) as service:
        batch = await until(service, await begin(service, None))
        assert batch["webhook"] is None


async def test_no_log_line_and_no_object_shows_a_secret_or_a_url(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    answers = [status(500), b"nonsense\r\n\r\n", status(302, "Location: /canary-place"), OK]
    async with Receiver(lambda n: answers[n]) as receiver, service_in(tmp_path) as service:
        batch_id = await begin(service, f"{receiver.url}/canary-path?token=canary-token")
        await webhook_of(service, batch_id, "delivered")
        shown = json.dumps(await service.batch(OWNER, batch_id))
        for secret in (SECRET, SECRET.removeprefix("whsec_"), "canary"):
            assert secret not in shown
            assert secret not in caplog.text
    assert "attempt 1 failed" in caplog.text


def test_pauses_double_up_to_a_bound() -> None:
    retries = RetrySchedule(first_pause_s=5, max_pause_s=100)
    rng = random.Random(1)
    for num_attempts, whole in ((1, 5), (2, 10), (3, 20), (5, 80), (6, 100), (100, 100), (10_000, 100)):
        pauses = [retries.pause_s(num_attempts, rng) for _ in range(200)]
        assert whole / 2 <= min(pauses) < whole * 0.6
        assert whole * 0.9 < max(pauses) <= whole


def test_a_receiver_that_is_down_for_an_hour_hears_of_it_within_the_next() -> None:
    retries, rng = RetrySchedule(), random.Random(1)
    at, num_attempts = 0.0, 1
    while at < 3600:
        at += retries.pause_s(num_attempts, rng)
        num_attempts += 1
    assert at < 2 * 3600
    assert num_attempts < 15
