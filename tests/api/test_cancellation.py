"""POST /v1/requests/{id}/cancel: the client is told, the replica is freed, and only its key or an admin may do it."""

from __future__ import annotations

from typing import Any

import pytest

from app.text import Tokenizer
from tests.kit.fleet import LocalFleet
from tests.kit.service import ADMIN_KEY, KEY, OTHER_KEY, Answer, Connection, Service, bearer, entry
from tests.waiting import until

KEYS = [entry(), entry(OTHER_KEY, "bob"), entry(ADMIN_KEY, "root", admin=True)]
BODY = {"prompt": [5, 6], "max_tokens": 100, "ignore_eos": True}


async def posted(app: Any, path: str, key: str) -> Answer:
    async with Connection(app, "POST", path, None, bearer(key)) as connection:
        return await connection.finished()


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("key", [KEY, ADMIN_KEY])
async def test_a_request_is_cancelled_by_its_own_key_or_an_admin(
    tokenizer: Tokenizer, key: str, is_streamed: bool
) -> None:
    async with LocalFleet(1) as local:
        service = Service(tokenizer, generate=local.fleet.generate, keys=KEYS)
        app = service.built(fleets={"demo": local.fleet})
        [replica] = local.replicas
        local.hold(replica, before=3)
        headers = bearer() | {"x-request-id": "mine"}
        body = BODY | {"stream": is_streamed}
        async with Connection(app, "POST", "/v1/completions", body, headers) as connection:
            await local.held(replica)
            stranger = await posted(app, "/v1/requests/mine/cancel", OTHER_KEY)
            assert (stranger.status, stranger.error["code"]) == (404, "request_not_found")
            assert local.fleet.num_in_flight == 1
            done = await posted(app, "/v1/requests/mine/cancel", key)
            assert done.json == {"id": "mine", "object": "request", "status": "cancelled"}
            answer = await connection.finished()
        if is_streamed:
            assert '"code":"request_cancelled"' in answer.data[-2]
            assert answer.data[-1] == "[DONE]"
        else:
            assert (answer.status, answer.error["code"]) == (400, "request_cancelled")
        assert local.fleet.num_in_flight == 0
        local.go()
        await until(lambda: replica.aborted)
        again = await posted(app, "/v1/requests/mine/cancel", key)
        assert again.status == 404


@pytest.mark.parametrize("suffix", ["-0", ""])
async def test_the_ids_of_the_response_and_of_the_engine_name_the_request_too(
    tokenizer: Tokenizer, suffix: str
) -> None:
    async with LocalFleet(1) as local:
        service = Service(tokenizer, generate=local.fleet.generate)
        app = service.built(fleets={"demo": local.fleet})
        [replica] = local.replicas
        local.hold(replica, before=3)
        async with Connection(app, "POST", "/v1/completions", BODY, {}) as connection:
            await local.held(replica)
            [served] = replica.served
            known_id = served.request_id.removesuffix(suffix)
            assert (await posted(app, f"/v1/requests/{known_id}/cancel", KEY)).status == 200
            assert (await connection.finished()).error["code"] == "request_cancelled"
        local.go()


@pytest.mark.parametrize("step", [{"kind": "ensemble", "models": ["a", "b"]}, {"kind": "generate", "model": "a"}])
async def test_a_pipeline_is_cancelled_while_its_models_answer(tokenizer: Tokenizer, step: dict[str, Any]) -> None:
    async with LocalFleet(1) as local:
        pipelines = [{"name": "p", "steps": [step]}]
        service = Service(tokenizer, generate=local.fleet.generate, names=("a", "b"), pipelines=pipelines)
        app = service.built(fleets=dict.fromkeys(("a", "b"), local.fleet))
        [replica] = local.replicas
        local.hold(replica, before=3)
        headers = {"x-request-id": "mine"}
        async with Connection(app, "POST", "/v1/completions", BODY | {"model": "p"}, headers) as connection:
            await local.held(replica)
            assert (await posted(app, "/v1/requests/mine/cancel", KEY)).status == 200
            assert (await connection.finished()).error["code"] == "request_cancelled"
        assert local.fleet.num_in_flight == 0
        local.go()
        await until(lambda: replica.aborted)
        assert (await posted(app, "/v1/requests/mine/cancel", KEY)).status == 404
