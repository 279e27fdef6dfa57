"""The real `openai` package against the app, without a socket."""

from __future__ import annotations

import openai
import pytest

from app.errors import Overloaded
from app.text import Tokenizer
from tests.kit.service import Service, openai_client

URL = "http://carousel/v1"
USER = {"role": "user", "content": "Hi"}


async def test_models_chats_and_completions(service: Service) -> None:
    async with openai_client(service.app) as client:
        models = [model.id async for model in client.models.list()]
        assert models == ["demo"]
        assert (await client.models.retrieve("demo")).id == "demo"
        chat = await client.chat.completions.create(model="demo", messages=[USER], n=2, seed=1)
        assert [choice.message.content for choice in chat.choices] == ["3 4 5."] * 2
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 10
        completion = await client.completions.create(model="demo", prompt=[[5, 6], [7]], max_tokens=8)
        assert [choice.text for choice in completion.choices] == ["3 4 5."] * 2


async def test_a_streamed_chat(service: Service) -> None:
    async with openai_client(service.app) as client:
        stream = await client.chat.completions.create(
            model="demo", messages=[USER], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "3 4 5."
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 5


async def test_errors_become_the_packages_own(tokenizer: Tokenizer) -> None:
    async with openai_client(Service(tokenizer, lambda request: [Overloaded("full")]).app) as client:
        with pytest.raises(openai.NotFoundError, match="there is no model") as not_found:
            await client.chat.completions.create(model="nope", messages=[USER])
        assert not_found.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="demo", messages=[USER], n=-1)
        assert bad.value.param == "n"
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="demo", messages=[USER])


async def test_an_error_in_mid_stream_is_raised(tokenizer: Tokenizer) -> None:
    async with openai_client(Service(tokenizer, lambda request: [(20,), Overloaded("full")]).app) as client:
        stream = await client.chat.completions.create(model="demo", messages=[USER], stream=True)
        with pytest.raises(openai.APIError, match="full"):
            async for _ in stream:
                pass
