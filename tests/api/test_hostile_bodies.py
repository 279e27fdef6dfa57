"""Bodies that many parsers get wrong, at every endpoint that takes one: no 5xx, and all that comes back is JSON.

`HOSTILE_BODIES=50000 python -m pytest tests/api/test_hostile_bodies.py` sends so many.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from app.build import build_engine
from app.config import EngineConfig
from app.engine.async_engine import AsyncEngine
from app.engine.request import Pooling, Request, TokenDelta
from app.text import Tokenizer
from app.text.tool_calls import FORMATS
from benchmarks.service.hostile_requests import FILE_ID, odd_bodies
from tests.kit.service import ENDED, Service, client_of, served, vector
from tests.text.tool_calls.templates import TEMPLATES
from tests.waiting import until

NUM_BODIES = int(os.environ.get("HOSTILE_BODIES", "300"))
AT_ONCE = 8


@pytest.fixture
def engine(demo_path: Path) -> Iterator[AsyncEngine]:
    """A simulated engine with real grammars."""
    model = {"path": str(demo_path), "simulated": {"step_ms": 0, "end_probability": 0.3}}
    built = build_engine(EngineConfig.model_validate({"model": model, "cache": {"num_blocks": 4096}}))
    yield built
    built.shutdown()


@pytest.fixture
def service(engine: AsyncEngine, demo_path: Path) -> Service:
    """It has tools, and makes vectors too."""
    pretrained = PreTrainedTokenizerFast.from_pretrained(demo_path)
    pretrained.chat_template = TEMPLATES["hermes"]

    async def generate(request: Request) -> AsyncIterator[TokenDelta]:
        if request.pooling is not None:
            for delta in vector(request, [0.5, -0.5, 0.5, 0.5]):
                yield delta
            return
        async for delta in engine.generate(request):
            yield delta

    return Service(
        Tokenizer(pretrained), generate=generate, tool_format=FORMATS["hermes"], pooling=Pooling.LAST,
        max_model_len=2000,
    )  # fmt: skip


@dataclass(slots=True)
class Attack:
    """A client that sends odd bodies and looks at all that comes back."""

    client: httpx.AsyncClient
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)
    file_id: str = "file-none"

    async def send(self, path: str, data: bytes) -> None:
        """Send a body, or upload a file with it as its line."""
        if path == "/v1/files":
            form: Any = {"files": {"file": ("a.jsonl", data)}, "data": {"purpose": "batch"}}
            answer = await self.client.post(path, **form)
        else:
            data = data.replace(FILE_ID.encode(), self.file_id.encode())
            answer = await self.client.post(path, content=data, headers={"content-type": "application/json"})
        self.statuses[f"{path} {answer.status_code}"] += 1
        if answer.status_code >= 500:
            self.faults.append(f"{path} {answer.status_code}: {data[:400]!r} {answer.text[:400]}")
            return
        try:
            values = values_of(answer)
        except ValueError as error:
            self.faults.append(f"{path} is no JSON ({error}): {data[:400]!r} {answer.content[:400]!r}")
            return
        if path == "/v1/files" and answer.status_code == 200:
            self.file_id = values[0]["id"]
        elif values and isinstance(values[0], dict) and values[0].get("object") == "batch":
            self.jobs.append(values[0]["id"])

    async def look_at_jobs(self) -> None:
        """Wait for all that were begun, and read the lines of their files as a client does."""
        for job_id in self.jobs:
            batch = (await until(partial(self.client.get, f"/v1/batches/{job_id}"), has_ended)).json()
            for name in ("output_file_id", "error_file_id"):
                if batch.get(name) is None:
                    continue
                for line in (await self.client.get(f"/v1/files/{batch[name]}/content")).text.splitlines():
                    try:
                        if (found := strict(line)["error"]) and found["code"] == "server_error":
                            self.faults.append(f"a line of {job_id}: {line[:400]}")
                    except ValueError as error:
                        self.faults.append(f"a line of {job_id} is no JSON ({error}): {line[:400]}")


def has_ended(answer: httpx.Response) -> bool:
    """Whether a batch has, or is not there."""
    return bool(answer.json().get("status", "gone") in (*ENDED, "gone"))


def values_of(answer: httpx.Response) -> list[Any]:
    """The JSON that came back: of each event where there are events, each on one line."""
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        return [strict(answer.content.decode())] if answer.content else []
    lines = [line for line in answer.content.decode().splitlines() if line and not line.startswith(":")]
    if not all(line.startswith(("data: ", "event: ", "id: ")) for line in lines):
        raise ValueError("a line begins as none of an event does")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [strict(each) for each in data if each != "[DONE]"]


def strict(text: str) -> Any:
    """The value of JSON that has no Infinity and no NaN. Raises ValueError."""

    def refuse(constant: str) -> None:
        raise ValueError(f"it has {constant}")

    return json.loads(text, parse_constant=refuse)


async def test_no_odd_body_is_a_server_error_and_all_that_comes_back_is_json(service: Service, tmp_path: Path) -> None:
    bodies = islice(odd_bodies(NUM_BODIES), NUM_BODIES)
    async with served(service, tmp_path) as app, client_of(app) as client:
        attack = Attack(client)

        async def send_all() -> None:
            for body in bodies:
                await attack.send(body.path, body.data)

        await asyncio.gather(*(send_all() for _ in range(AT_ONCE)))
        await attack.look_at_jobs()
        described = (await client.get("/openapi.json")).json()["paths"]
    print(dict(sorted(attack.statuses.items())), len(attack.jobs), "jobs")
    assert not attack.faults, "\n".join([f"{len(attack.faults)} faults", *attack.faults[:20]])
    with_bodies = {path for path, methods in described.items() if "requestBody" in methods.get("post", {})}
    sent = {status.partition(" ")[0] for status in attack.statuses}
    assert sent == with_bodies
    assert sum(attack.statuses.values()) == NUM_BODIES
