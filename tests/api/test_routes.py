"""The routes around generation, request ids, and errors of the router."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import EngineStopped, InvalidSetup, Unavailable
from app.text import Tokenizer
from tests.kit.fleet import LocalFleet
from tests.kit.service import MAX_MODEL_LEN, Connection, Service, say


def test_models_are_listed_and_retrieved_by_ids_with_slashes(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, say(tokenizer, "3"), names=("demo", "org/name"))
    listed = service.call("GET", "/v1/models").json
    assert listed["object"] == "list"
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("demo", "org/name", False)
    assert [entry["id"] for entry in listed["data"]] == ["demo", "org/name"]
    assert listed["data"][0] == {
        "id": "demo",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "carousel",
        "root": "demo",
        "parent": None,
        "max_model_len": MAX_MODEL_LEN,
        "permission": [],
        "type": "model",
        "display_name": "demo",
        "created_at": "2023-11-14T22:13:20Z",
        "lifecycle": "active",
    }
    assert service.call("GET", "/v1/models/org/name").json == listed["data"][1]


@pytest.mark.parametrize("model_id", ["nope", "", "demo/", "😀"])
def test_an_unknown_model_is_a_404(service: Service, model_id: str) -> None:
    answer = service.call("GET", f"/v1/models/{model_id}")
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


def test_health_says_the_process_lives_and_ready_that_it_serves(service: Service) -> None:
    assert service.call("GET", "/health").status == 200
    assert service.call("GET", "/ready").status == 200
    service.is_ready = False
    assert service.call("GET", "/health").status == 200
    assert service.call("GET", "/ready").status == 503


def test_a_readiness_check_that_fails_is_not_ready(tokenizer: Tokenizer) -> None:
    class Broken(Service):
        async def _is_ready(self) -> bool:
            raise RuntimeError("no controller")

    answer = Broken(tokenizer, say(tokenizer, "3")).call("GET", "/ready")
    assert (answer.status, answer.error["code"]) == (503, "unavailable")


@pytest.mark.parametrize("path", ["/v1", "/v1/nothing", "/v1/completions/", "/V1/models"])
def test_an_unknown_route_is_a_404(service: Service, path: str) -> None:
    answer = service.call("POST", path, {})
    assert (answer.status, answer.error["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/completions", "POST"), ("DELETE", "/v1/chat/completions", "POST"), ("POST", "/v1/models", "GET")],
)
def test_a_wrong_method_is_a_405_with_the_allowed_ones(service: Service, method: str, path: str, allowed: str) -> None:
    answer = service.call(method, path)
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
    assert allowed in answer.headers["allow"]


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("GET", "/nothing"), ("POST", "/v1/completions")])
def test_every_answer_has_a_request_id(service: Service, method: str, path: str) -> None:
    assert service.call(method, path, b"", {"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    ids = {service.call(method, path, b"").headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    for strange in ("", "a b", "x" * 257):
        assert service.call(method, path, b"", {"x-request-id": strange}).headers["x-request-id"] != strange


def test_a_request_id_in_the_body_counts_when_there_is_no_header(service: Service) -> None:
    body = {"prompt": "Hi", "request_id": "from-body"}
    assert service.call("POST", "/v1/completions", body).headers["x-request-id"] == "from-body"
    answer = service.call("POST", "/v1/completions", body, {"x-request-id": "from-header"})
    assert answer.headers["x-request-id"] == "from-header"


@pytest.mark.parametrize("error", [Unavailable("no replica is up"), EngineStopped("the engine is stopping")])
def test_unavailable_is_a_503_that_says_when_to_try_again(tokenizer: Tokenizer, error: Exception) -> None:
    answer = Service(tokenizer, lambda request: [error]).chat()
    assert (answer.status, answer.error["message"], answer.error["code"]) == (503, str(error), "unavailable")
    assert 1 <= int(answer.headers["retry-after"]) <= 120
    assert int(answer.headers["retry-after-ms"]) >= 1000


def test_the_operators_mistakes_are_not_shown_to_clients(tokenizer: Tokenizer) -> None:
    answer = Service(tokenizer, lambda request: [InvalidSetup("/srv/secret is missing")]).chat()
    assert answer.status == 500
    assert "secret" not in answer.error["message"]


async def test_load_is_the_number_of_requests_on_all_replicas(tokenizer: Tokenizer) -> None:
    async with LocalFleet(2) as local:
        service = Service(tokenizer, generate=local.fleet.generate)
        app = service.built(fleets={"demo": local.fleet})

        async def load() -> Any:
            async with Connection(app, "GET", "/load", None, {}) as connection:
                return (await connection.finished()).json

        assert await load() == {"server_load": 0}
        local.hold(*local.replicas, before=3)
        body = {"prompt": [5, 6], "max_tokens": 10, "ignore_eos": True, "n": 3}
        async with Connection(app, "POST", "/v1/completions", body, {}) as connection:
            await local.held(*local.replicas)
            assert await load() == {"server_load": 3}
            local.go()
            await connection.finished()
        assert await load() == {"server_load": 0}
