"""The real `openai` package on an application in this process, without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai


@asynccontextmanager
async def openai_client(app: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client that never tries again, so that a test sees every answer."""
    async with (
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app)) as http,
        openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0) as client,
    ):
        yield client
