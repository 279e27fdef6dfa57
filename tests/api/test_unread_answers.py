"""Large answers to clients that do not read: they end as streams do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import Message

from app.api.http.answers import FileAnswer, JsonAnswer
from app.api.http.errors import ClientGone
from app.api.http.sse import UNREAD_S
from app.json_pieces import Rows
from tests.api.test_sse import Client
from tests.waiting import TimelessLoop


@pytest.fixture(autouse=True)
def loop_factory() -> Any:
    return TimelessLoop


async def pieces() -> AsyncIterator[bytes]:
    for _ in range(10):
        yield b"x" * 1000


async def receive() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("it stays connected")


def answers() -> list[Response]:
    return [FileAnswer(pieces()), JsonAnswer({"rows": Rows.of(range(10**5))}, asyncio.Lock())]


@pytest.mark.parametrize("spec_version", ["2.0", "2.4"])
@pytest.mark.parametrize("kind", [0, 1], ids=["file", "json"])
async def test_a_client_that_takes_nothing_for_a_minute_counts_as_gone(kind: int, spec_version: str) -> None:
    client, scope = Client(), {"type": "http", "asgi": {"spec_version": spec_version}}
    client.reads.clear()
    with pytest.raises(ClientGone):
        await answers()[kind](scope, receive, client)
    assert asyncio.get_running_loop().time() == UNREAD_S
    assert client.max_waiting == 1


@pytest.mark.parametrize("kind", [0, 1], ids=["file", "json"])
async def test_a_client_that_reads_slowly_gets_everything(kind: int) -> None:
    client, scope = Client(), {"type": "http", "asgi": {"spec_version": "2.4"}}
    client.read_s = UNREAD_S - 1.0
    await answers()[kind](scope, receive, client)
    assert client.has_ended
    assert len(client.bodies) > 3
