"""Files and batches over HTTP: the real `openai` package, and requests that no honest client sends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest

from app.api import Answering, batch_routes, build_app
from app.batches import LocalBatchService
from app.config import ApiConfig, BatchesConfig
from app.errors import Overloaded
from app.metrics import RequestMetrics
from app.text import Tokenizer
from tests.api.fakes import Service, say

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "cancelled", "expired")


def chat_line(custom_id: str, **fields: Any) -> bytes:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]} | fields
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}).encode() + b"\n"


@asynccontextmanager
async def served(service: Service, folder: Path, **settings: Any) -> AsyncIterator[Any]:
    """The app of a scripted model, with files and batches in `folder`."""
    config = BatchesConfig(**settings)
    answering = Answering(service.models, ApiConfig(), RequestMetrics(model.name for model in service.models))
    async with LocalBatchService(folder, config, answering.answer) as batches:
        yield build_app(
            service.models,
            ApiConfig(),
            service._is_ready,
            batch_routes=batch_routes(batches, max_file_bytes=config.max_file_bytes),
        )


def with_openai(
    service: Service, folder: Path, use: Callable[[openai.AsyncOpenAI], Awaitable[None]], **settings: Any
) -> None:
    async def main() -> None:
        async with (
            served(service, folder, **settings) as app,
            httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app)) as http,
            openai.AsyncOpenAI(
                base_url="http://carousel/v1", api_key="none", http_client=http, max_retries=0
            ) as client,
        ):
            await use(client)

    asyncio.run(main())


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    """The batch once it has ended."""
    async with asyncio.timeout(20):
        while (batch := await client.batches.retrieve(batch_id)).status not in ENDED:
            await asyncio.sleep(0.01)
    return batch


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """The lines of a file by custom id, each there once."""
    if file_id is None:
        return {}
    lines = [json.loads(line) for line in (await client.files.content(file_id)).content.splitlines()]
    by_id = {line["custom_id"]: line for line in lines}
    assert len(by_id) == len(lines)
    return by_id


def test_the_openai_package_drives_a_whole_batch(service: Service, tmp_path: Path) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        content = b"".join(chat_line(f"line-{n}", max_tokens=8) for n in range(20)) + chat_line("bad", temperature=9)
        file = await client.files.create(file=("mine.jsonl", content), purpose="batch")
        assert (file.bytes, file.filename, file.purpose, file.status) == (
            len(content), "mine.jsonl", "batch", "processed",
        )  # fmt: skip
        assert (await client.files.content(file.id)).content == content

        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"night": "first"}
        )
        assert batch.status == "validating"
        batch = await ended(client, batch.id)
        assert batch.status == "completed"
        assert batch.metadata == {"night": "first"}
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 21, "completed": 20, "failed": 1}
        assert batch.usage is not None
        assert batch.usage.output_tokens == 20 * 5
        assert batch.model == "demo"
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at  # type: ignore[operator]

        output, errors = await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)
        assert output.keys() == {f"line-{n}" for n in range(20)}
        response = output["line-3"]["response"]
        assert response["status_code"] == 200
        assert response["body"]["choices"][0]["message"]["content"] == "3 4 5."
        assert errors.keys() == {"bad"}
        assert errors["bad"]["response"]["status_code"] == 400
        assert errors["bad"]["response"]["body"]["error"]["param"] == "temperature"

        assert [each.id async for each in client.batches.list(limit=1)] == [batch.id]
        assert {each.purpose async for each in client.files.list()} == {"batch", "batch_output"}
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)

    with_openai(service, tmp_path, use)
    assert {request.priority for request in service.generate.requests} == {100}
