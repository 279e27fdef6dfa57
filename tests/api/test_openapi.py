"""The published description agrees with what the service does; strict mode names what has no effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.api.http.openapi import BATCH_BODIES, BODIES, openapi_document
from app.api.prepared_request import RequestLimits
from app.api.schemas.parameters import MAX_NAME_LENGTH, MAX_REMEMBERED_NAMES, UnknownFields
from app.api.schemas.requests import CompletionRequest
from app.config import ApiConfig
from app.text import Tokenizer
from tests.kit.service import Service, bearer, entry, http_client, routes_of, say, served


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "with batches"])
def document(request: pytest.FixtureRequest) -> dict[str, Any]:
    return openapi_document(ApiConfig(), RequestLimits(), has_batches=request.param)


async def test_every_route_is_described_with_its_methods(
    service: Service, tmp_path: Path, document: dict[str, Any]
) -> None:
    async with served(service, tmp_path) as with_batches:
        app = with_batches if "/v1/batch" in document["paths"] else service.app
        routes = {
            (route.path.replace(":path", ""), method.lower())
            for routes in routes_of(app)
            for route in routes
            for method in (route.methods or set()) - {"HEAD"}
        }
    assert routes == {(path, method) for path, methods in document["paths"].items() for method in methods}


def every_reference(value: Any) -> set[str]:
    """All that a document refers to."""
    if isinstance(value, dict):
        own = {value["$ref"]} if "$ref" in value else set()
        return own.union(*map(every_reference, value.values()))
    return set().union(*map(every_reference, value)) if isinstance(value, list) else set()


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    found = every_reference(document)
    assert len(found) >= 15
    assert found == {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}


def test_what_may_be_left_out_may_be_null_and_the_rest_may_not(document: dict[str, Any]) -> None:
    for body in (*BODIES, *(BATCH_BODIES if "/v1/batch" in document["paths"] else ())):
        schema = document["components"]["schemas"][body.__name__]
        for name, field in schema["properties"].items():
            is_nullable = {"type": "null"} in field.get("anyOf", [])
            assert is_nullable == (name not in schema.get("required", [])), f"{body.__name__}.{name}"


def test_limits_of_the_settings_are_published() -> None:
    document = openapi_document(ApiConfig(), RequestLimits(max_choices=3, max_stop_strings=2, max_logprobs=7))
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    for name, limit in (("n", 3), ("best_of", 3), ("logprobs", 7), ("prompt_logprobs", 7)):
        assert any(option.get("maximum") == limit for option in fields[name]["anyOf"]), name
    chat_fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert any(option.get("maximum") == 7 for option in chat_fields["top_logprobs"]["anyOf"])
    assert any(option.get("maxItems") == 2 for option in fields["stop"]["anyOf"])


def test_it_says_whether_a_key_is_needed(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, say(tokenizer, "3"), keys=[entry()])
    document = service.call("GET", "/openapi.json", headers=bearer()).json
    assert document["security"] == [{"key": []}]
    assert document["paths"]["/health"]["get"]["security"] == []
    assert openapi_document(ApiConfig(), RequestLimits())["security"] == []


STRICT = {"x-strict": "true"}


@pytest.mark.parametrize(
    ("fields", "unknown"),
    [
        ({"temprature": 1}, ["temprature"]),
        ({"a": 1, "b": {"c": 2}}, ["a", "b"]),
    ],
)
def test_strict_requests_are_refused_for_unknown_fields_by_name(
    service: Service, fields: dict[str, Any], unknown: list[str]
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]} | fields
    answer = service.call("POST", "/v1/chat/completions", body, STRICT)
    assert (answer.status, answer.error["param"]) == (400, unknown[0])
    assert f"there is no field {', '.join(unknown)};" in answer.error["message"]
    assert service.call("POST", "/v1/chat/completions", body).status == 200, "others are served without them"


def test_strict_requests_may_have_what_is_known_to_have_no_effect(service: Service) -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": 1}]}],
        "metadata": {"a": "b"}, "store": False, "logprobs": False, "unknown": None,
        "chat_template_kwargs": {"anything": 1}, "logit_bias": {"5": 1},
    }  # fmt: skip
    assert service.call("POST", "/v1/chat/completions", body, STRICT).status == 200


def test_many_unknown_fields_are_counted(service: Service) -> None:
    body = {"prompt": "Hi"} | {f"field{number}": 1 for number in range(100)}
    answer = service.call("POST", "/v1/completions", body, STRICT)
    assert "and 80 more" in answer.error["message"]


def test_fields_that_an_endpoint_does_not_take_are_published_so() -> None:
    fields = openapi_document(ApiConfig(), RequestLimits())["components"]["schemas"]["ResponsesRequest"]["properties"]
    assert fields["n"]["anyOf"] == [{"enum": [1]}, {"type": "null"}]
    assert fields["prompt_logprobs"]["anyOf"] == [{"type": "null"}]


def test_null_inside_of_fields_is_not_given(service: Service) -> None:
    call = {"id": "a", "type": None, "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert service.call("POST", "/tokenize", {"messages": [message]}).status == 200
    assert service.call("POST", "/v1/responses", {"input": "Hi", "n": 1.0}).status == 200


async def test_a_refused_method_names_those_of_all_routes_with_the_path(service: Service, tmp_path: Path) -> None:
    async with http_client(service, tmp_path) as client:
        answer = await client.request("PUT", "/v1/files")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD, POST")


def test_unknown_names_are_remembered_in_bounded_memory() -> None:
    unknown = UnknownFields()
    for number in range(2000):
        unknown.note({f"{number:04}" + "x" * 10_000: 1}, CompletionRequest)
    assert len(unknown._seen) == MAX_REMEMBERED_NAMES
    assert max(map(len, unknown._seen)) == MAX_NAME_LENGTH
