"""The real `openai` package on an application in this process, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai

Use = Callable[[openai.AsyncOpenAI], Awaitable[None]]


@asynccontextmanager
async def openai_client(app: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client that never tries again, so that a test sees every answer."""
    async with (
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app)) as http,
        openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0) as client,
    ):
        yield client


def with_client(app: Any, use: Use) -> None:
    """Runs what uses a client, in an event loop of its own."""

    async def main() -> None:
        async with openai_client(app) as client:
            await use(client)

    asyncio.run(main())
