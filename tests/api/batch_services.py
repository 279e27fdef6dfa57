"""Apps of scripted models with files and batches in a folder, for tests of their endpoints."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from app.api import RequestHandler, batch_routes, build_app
from app.api.http.guard import owner_of
from app.api.prepared_request import RequestLimits
from app.batches import BatchLimits
from app.config import ApiConfig, BatchesConfig
from app.jobs.executors import FleetExecution
from app.jobs.local_service import LocalBatchService
from app.webhooks.client import WebhookClient
from tests.api.fakes import Service
from tests.api.keys import ring
from tests.api.openai_clients import openai_client
from tests.waiting import until

ENDED = ("completed", "failed", "cancelled", "expired")


@asynccontextmanager
async def served(
    service: Service,
    folder: Path,
    *,
    keys: Sequence[Mapping[str, Any]] = (),
    limits: RequestLimits | None = None,
    batch_limits: BatchLimits = BatchLimits(),  # noqa: B008 - frozen
    client: WebhookClient | None = None,
    **settings: Any,
) -> AsyncIterator[Any]:
    """The app with these API keys. Their limits count for lines by themselves, as in a process of their own."""
    config = BatchesConfig(**settings)
    handler, of_items = (
        RequestHandler(
            service.models,
            ApiConfig(),
            authenticator=ring(keys) if keys else None,
            pipelines=service.pipelines,
            limits=limits or RequestLimits(),
        )
        for _ in range(2)
    )
    execution = FleetExecution(of_items.handle_item, max_in_flight=config.max_in_flight)
    async with LocalBatchService(folder, config, execution, limits=batch_limits, client=client) as batches:
        routes = batch_routes(batches, handler, max_file_bytes=batch_limits.max_file_bytes, owner_of=owner_of)
        yield build_app(handler, service._is_ready, batch_routes=routes)


def client_of(app: Any) -> httpx.AsyncClient:
    """A client of this app."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")


@asynccontextmanager
async def http_client(service: Service, folder: Path, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app with files and batches."""
    async with served(service, folder, **settings) as app, client_of(app) as client:
        yield client


@asynccontextmanager
async def openai_batches(service: Service, folder: Path, **settings: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """The `openai` package on that app."""
    async with served(service, folder, **settings) as app, openai_client(app) as client:
        yield client


async def job_ended(client: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    """A job once it has ended."""
    answer = await until(lambda: client.get(f"/v1/batch/{job_id}"), lambda answer: answer.json()["status"] in ENDED)
    return dict(answer.json())


def line_of(custom_id: str, url: str = "/v1/completions", **body: Any) -> bytes:
    """A line of a file for a batch."""
    given = body if "messages" in body else {"prompt": "Hi"} | body
    line = {"custom_id": custom_id, "method": "POST", "url": url, "body": given}
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


async def sent_batch(client: httpx.AsyncClient, content: bytes, endpoint: str = "/v1/completions") -> dict[str, Any]:
    """The body that begins a batch over a file with this content, which is uploaded."""
    form: dict[str, Any] = {"files": {"file": ("a.jsonl", content)}, "data": {"purpose": "batch"}}
    file = (await client.post("/v1/files", **form)).json()
    return {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}


async def begun_batch(client: httpx.AsyncClient, content: bytes, endpoint: str = "/v1/completions") -> str:
    """The id of a batch over these lines."""
    return str((await client.post("/v1/batches", json=await sent_batch(client, content, endpoint))).json()["id"])
