"""Nothing of a request waits for the garbage collector, which seldom runs in an ingress, however the request ends."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from app.api.output.response_state import ResponseState
from app.text import Tokenizer
from app.text.tool_calls import FORMATS
from tests.kit.garbage import in_memory, no_garbage
from tests.kit.service import CALL, CASCADE, WAIT, Connection, Service, calling, say_likely, served
from tests.waiting import until

NAMES = ("small", "large")
PIPELINES = [CASCADE, {"name": "all", "steps": [{"kind": "ensemble", "models": NAMES}]}]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def leaves_nothing(ask: Callable[[], Awaitable[object]]) -> None:
    """Checks a request that was made before: caches have by then what they keep."""
    await ask()
    with no_garbage():
        await ask()
        await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["both", "all"])
async def test_of_an_answer_of_a_pipeline(tokenizer: Tokenizer, model: str, stream: bool) -> None:
    service = Service(tokenizer, say_likely(tokenizer, "3 4", -0.6), names=NAMES, pipelines=PIPELINES)

    async def ask() -> None:
        answer = await service.answer("POST", "/v1/chat/completions", CHAT | {"model": model, "stream": stream})
        assert answer.status == 200

    await leaves_nothing(ask)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", [CALL, "3 4", '{"name": "f", "arguments": {'])
async def test_of_a_request_with_tools(tools_tokenizer: Tokenizer, name: str, text: str) -> None:
    service = calling(tools_tokenizer, text, form=FORMATS[name])

    async def ask() -> None:
        assert (await service.answer("POST", "/v1/chat/completions", CHAT | {"tools": [TOOL]})).status == 200

    await leaves_nothing(ask)


@pytest.mark.parametrize("num_before", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_of_a_request_whose_client_has_gone(tokenizer: Tokenizer, num_before: int, stream: bool) -> None:
    service = Service(tokenizer, lambda _: [*[(20,)] * num_before, WAIT])

    async def ask() -> None:
        async with begun(service, stream) as connection:
            connection.hang_up()
            await until(lambda: not service.generate.open)

    await leaves_nothing(ask)


@pytest.mark.parametrize("stream", [False, True])
async def test_of_a_request_that_the_server_cancels_though_the_server_keeps_the_error(
    tokenizer: Tokenizer, stream: bool
) -> None:
    """Ray Serve keeps it in a reference cycle, with what its traceback refers to."""
    service = Service(tokenizer, lambda _: [(20,), (20,), WAIT])
    gc.collect()
    gc.disable()
    try:
        async with begun(service, stream) as connection:
            assert in_memory(ResponseState)
            connection.cancel()
        assert connection.error is not None
        assert not in_memory(ResponseState)
    finally:
        gc.enable()


@asynccontextmanager
async def begun(service: Service, stream: bool) -> AsyncIterator[Connection]:
    """A request that waits for the next token."""
    body = CHAT | {"stream": stream}
    async with Connection(service.app, "POST", "/v1/chat/completions", body, {}) as connection:
        await until(lambda: service.generate.open)
        await asyncio.sleep(0.01)
        yield connection


async def test_of_an_upload(tokenizer: Tokenizer, tmp_path: Path) -> None:
    part = '--b\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n{}\r\n'
    body = part.format("purpose", "", "batch") + part.format("file", '; filename="a.jsonl"', "{}") + "--b--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=b"}
    async with served(Service(tokenizer), tmp_path) as app:

        async def ask() -> None:
            async with Connection(app, "POST", "/v1/files", body.encode(), headers) as connection:
                assert (await connection.finished()).status == 200

        await leaves_nothing(ask)
