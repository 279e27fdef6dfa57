"""A folder that a former version has left is read, and its batches go on.

`folder_of_598b9f6.tar.gz` is what 598b9f6 had in its folder when it was killed the second time, at 1,800,000,000 s: a
batch that had ended, one that was cancelled, one whose receiver does not answer, and one with six of ten lines in two
journals, the second with a torn end.
"""

from __future__ import annotations

import asyncio
import tarfile
from pathlib import Path
from typing import Any

from app.batches import PageOf
from app.webhooks.client import WebhookClient, WebhookMessage
from app.webhooks.receiver import WebhookReceiver
from tests import waiting
from tests.kit.jobs import OWNER, Echo, all_files, ends, service_in, until

LINES = {f"line-{n}" for n in range(10)}
REFUSED = {"line-2", "line-8"}


class Client(WebhookClient):
    """Keeps what it should send."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[WebhookMessage, WebhookReceiver]] = []

    async def deliver(self, message: WebhookMessage, receiver: WebhookReceiver, now: float) -> None:
        self.sent.append((message, receiver))


async def test_a_folder_of_a_former_version_is_read_and_its_batches_go_on(tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).with_name("folder_of_598b9f6.tar.gz")) as packed:
        packed.extractall(tmp_path, filter="data")
    folder, echo, client = tmp_path / "batches", Echo(), Client()
    echo.hold = asyncio.Event()
    async with service_in(folder, echo, clock=lambda: 1_800_000_600.0, client=client) as service:
        there = (await service.batches(PageOf(owner=OWNER, limit=10)))["data"]
        running, pending, cancelled, completed = there  # the newest first
        assert [each["status"] for each in there] == ["in_progress", "completed", "cancelled", "completed"]
        echo.hold.set()
        assert completed["webhook"]["status"] == "delivered"
        assert completed["request_counts"] == {"total": 10, "completed": 8, "failed": 2}
        assert completed["metadata"] == {"of": "598b9f6"}
        await _has(service, completed, LINES - REFUSED, REFUSED)
        await _has(service, cancelled, {f"line-{n}" for n in (0, 1, 3, 4)}, {f"line-{n}" for n in (2, 5, 6, 7, 8, 9)})
        running = await until(service, running["id"])
        assert running["request_counts"] == {"total": 10, "completed": 8, "failed": 2}
        await _has(service, running, LINES - REFUSED, REFUSED)
        await waiting.until(lambda: len(client.sent) == 2)
        sent = {message.batch_id: (message.num_attempts, receiver.url) for message, receiver in client.sent}
        hook = "https://example.com/hook?x=1"
        assert sent == {pending["id"]: (2, hook), running["id"]: (1, hook)}
        known = {file["id"] for file in await all_files(service)}
        assert known == {path.name for path in (folder / "files").iterdir()}
        assert not list((folder / "drafts").iterdir())
    assert echo.asked == {f"line-{n}": 1 for n in (6, 7, 9)}, "only lines that had not ended"


async def _has(service: Any, batch: dict[str, Any], output: set[str], errors: set[str]) -> None:
    found = await ends(service, batch)
    assert tuple(each.keys() for each in found) == (output, errors)
