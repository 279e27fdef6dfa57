"""A switch of strategy and policy on a live service: no stream notices, and a replica that is started later has it."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import httpx

from tests.deployments.conftest import SHARED
from tests.deployments.strikes import replica_pids
from tests.waiting import PATIENCE_S, eventually

MODEL = "switched"
NUM_TOKENS = 100  # two seconds


async def tokens_of(client: httpx.AsyncClient, url: str) -> list[int]:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": NUM_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = await client.post(f"{url}/v1/completions", json=body)
    return list(answer.json()["choices"][0]["token_ids"])


def in_force(answer: httpx.Response) -> list[tuple[Any, Any]]:
    """Strategy and policy of each replica of the model."""
    content = answer.json()
    [entry] = [each for each in content.get("data", [content]) if each["model"] == MODEL]
    return [(each["strategy"], each["policy"]["name"]) for each in entry["replicas"]]


def test_a_switch_holds_on_every_replica_also_on_one_that_is_started_later_and_loses_no_token(shared: str) -> None:
    url = shared
    static = {"name": "static", "max_wait_ms": 40.0}

    async def main() -> None:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            [expected] = await asyncio.gather(tokens_of(client, url))
            streams = [asyncio.create_task(tokens_of(client, url)) for _ in range(8)]
            await asyncio.sleep(0.3)
            body = {"model": MODEL, "strategy": {"name": "static", "max_wait_ms": 40}, "policy": "fair"}
            switched = await client.post(f"{url}/admin/scheduler", json=body)
            assert in_force(switched) == [(static, "fair")] * 2
            assert not any(stream.done() for stream in streams)
            assert await asyncio.gather(*streams) == [expected] * 8
            wrong = await client.post(f"{url}/admin/scheduler", json={"model": MODEL, "strategy": "magic"})
            assert wrong.status_code == 400

    asyncio.run(main())
    before = replica_pids(SHARED, f"replica-{MODEL}")
    os.kill(before[0], signal.SIGKILL)

    def now() -> list[tuple[Any, Any]]:
        return in_force(httpx.get(f"{url}/admin/scheduler", timeout=PATIENCE_S))

    eventually(lambda: set(replica_pids(SHARED, f"replica-{MODEL}")) - set(before))
    eventually(now, lambda found: found == [(static, "fair")] * 2)
    back = httpx.post(f"{url}/admin/scheduler", json={"model": MODEL}, timeout=PATIENCE_S)
    assert [each["switched_at"] for each in back.json()["replicas"]] == [None, None]
    assert [strategy["name"] for strategy, _ in in_force(back)] == ["continuous"] * 2
