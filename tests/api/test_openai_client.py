"""Errors that the `openai` package raises. What else it reads is checked by `benchmarks.clients.with_openai`."""

from __future__ import annotations

import openai
import pytest

from app.errors import Overloaded
from app.text import Tokenizer
from tests.kit.service import Service, openai_client

USER = {"role": "user", "content": "Hi"}


async def test_a_full_service_is_a_rate_limit(tokenizer: Tokenizer) -> None:
    async with openai_client(Service(tokenizer, lambda request: [Overloaded("full")]).app) as client:
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="demo", messages=[USER])


async def test_an_error_in_mid_stream_is_raised(tokenizer: Tokenizer) -> None:
    async with openai_client(Service(tokenizer, lambda request: [(20,), Overloaded("full")]).app) as client:
        stream = await client.chat.completions.create(model="demo", messages=[USER], stream=True)
        with pytest.raises(openai.APIError, match="full"):
            async for _ in stream:
                pass
