"""Lines of batches keep the limits of the key that sent them: they wait, and lines of other keys do not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.engine.request import Request
from app.text import Tokenizer
from tests.kit.service import KEY, OTHER_KEY, Service, bearer, begun_batch, entry, http_client, job_ended, line_of, say
from tests.waiting import until


def limited(**limits: Any) -> list[dict[str, Any]]:
    """`alice` has these limits, `bob` has none."""
    return [entry(**limits), entry(OTHER_KEY, "bob")]


async def begin(client: httpx.AsyncClient, key: str, num: int, **fields: Any) -> str:
    body = {"prompts": ["Hi"] * num, "async": True} | fields
    response = await client.post("/v1/batch", json=body, headers=bearer(key))
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


async def ended(service: Service, client: httpx.AsyncClient, key: str, job_id: str, num: int) -> dict[str, Any]:
    """A job once the fleet has seen so many of its lines. It is not asked for before: that counts for the key too."""
    await until(lambda: num_seen(service) >= num)
    url, headers = f"/v1/batch/{job_id}", bearer(key)
    shown = await until(
        lambda: client.get(url, headers=headers), lambda shown: shown.json()["status"] == "completed", every_s=0.2
    )
    return dict(shown.json())


def num_seen(service: Service, tenant: str | None = None) -> int:
    return sum(tenant in (None, request.tenant) for request in service.generate.requests)


@pytest.mark.parametrize("limits", [{"requests_per_minute": 8}, {"tokens_per_minute": 50}], ids=str)
async def test_lines_wait_for_what_their_key_may_use_and_others_do_not(
    tokenizer: Tokenizer, tmp_path: Path, limits: dict[str, int]
) -> None:
    service = Service(tokenizer, say(tokenizer, "3 4 5."))
    async with http_client(service, tmp_path, keys=limited(**limits), max_in_flight=4) as client:
        await begin(client, KEY, 40, max_tokens=5)
        await until(lambda: num_seen(service) >= 5)
        await begin(client, OTHER_KEY, 40, max_tokens=5)
        await until(lambda: num_seen(service, "bob") == 40)
        assert 5 <= num_seen(service, "alice") < 40, "a minute's worth, and what has come since"


async def test_no_more_lines_of_a_key_run_at_once_than_it_may_have(tokenizer: Tokenizer, tmp_path: Path) -> None:
    most = 0
    three = say(tokenizer, "3")

    def script(request: Request) -> Any:
        nonlocal most
        most = max(most, sum(each.startswith("cmpl") for each in service.generate.open))
        return three(request)

    service = Service(tokenizer, script)
    async with http_client(service, tmp_path, keys=limited(max_concurrency=2), max_in_flight=8) as client:
        job = await ended(service, client, KEY, await begin(client, KEY, 12), 12)
        assert job["request_counts"]["completed"] == 12
        assert 1 <= most <= 2


async def test_what_a_key_may_never_have_is_the_error_of_its_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    service = Service(tokenizer, say(tokenizer, "3"), names=("small", "large"))
    content = line_of("fine", model="small", max_tokens=5) + line_of("long", model="small", max_tokens=6)
    content += line_of("other", model="large")
    async with http_client(service, tmp_path, keys=limited(models=["small"], max_tokens=5)) as client:
        client.headers.update(bearer(KEY))
        results = (await job_ended(client, await begun_batch(client, content)))["results"]
        assert [each["status_code"] for each in results] == [200, 400, 403]
        assert results[1]["error"]["param"] == "max_tokens"
        assert results[2]["error"]["code"] == "model_not_allowed"
        [request] = service.generate.requests
        assert (request.tenant, request.sampling.max_tokens) == ("alice", 5)
        assert "alice" in request.cache_salt


async def test_lines_of_a_key_that_is_gone_are_not_answered(tokenizer: Tokenizer, tmp_path: Path) -> None:
    service = Service(tokenizer, say(tokenizer, "3"))
    async with http_client(service, tmp_path, keys=limited(requests_per_minute=1)) as client:
        job_id = await begin(client, KEY, 4)
        await until(lambda: num_seen(service) > 0)
        await asyncio.sleep(0.1)
    async with http_client(service, tmp_path, keys=[entry(OTHER_KEY, "bob")]) as client:
        assert (await client.get(f"/v1/batch/{job_id}", headers=bearer(OTHER_KEY))).status_code == 404
        await asyncio.sleep(0.2)
    assert num_seen(service) == 1, "nothing runs for a key that is not there"
    async with http_client(service, tmp_path, keys=limited()) as client:
        client.headers.update(bearer(KEY))
        job = await job_ended(client, job_id)
        assert [each["status_code"] for each in job["results"]].count(401) == 3
