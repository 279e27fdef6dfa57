"""The published description agrees with what the service does; strict mode names what has no effect."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from app.api.endpoints.table import ENDPOINTS
from app.api.http.openapi import BATCH_BODIES, BODIES, openapi_document
from app.api.prepared_request import RequestLimits
from app.api.schemas.parameters import MAX_NAME_LENGTH, MAX_REMEMBERED_NAMES, UnknownFields
from app.api.schemas.requests import CompletionRequest
from app.config import ApiConfig
from app.engine.request import Pooling, Request
from app.text import ReasoningMarks, Tokenizer
from app.text.tool_calls import FORMATS
from benchmarks.service.hostile_requests import VALID
from tests.kit.service import CALL, Service, Step, bearer, entry, http_client, routes_of, say, served, vector


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


def exactly(name: str, schemas: dict[str, Any]) -> Draft202012Validator:
    """Accepts a response with all fields that are described, and no others."""
    closed = {
        each: {**schema, "additionalProperties": False} if "properties" in schema else schema
        for each, schema in schemas.items()
    }
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": {"schemas": closed}})


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALLED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"tools": TOOLS, "tool_choice": "auto"},
    "/v1/responses": {"tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]},
    "/v1/messages": {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"}},
}


@pytest.mark.parametrize("calls", [False, True], ids=["text", "calls"])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_response_has_the_fields_of_its_type_and_no_others(tokenizer: Tokenizer, path: str, calls: bool) -> None:
    told = say(tokenizer, f"<think>5</think>3 4 {CALL if calls else 5}")

    def script(request: Request) -> Iterable[Step]:
        return told(request) if request.pooling is None else vector(request, [0.5, 0.25])

    service = Service(
        tokenizer, script, pooling=Pooling.LAST, model_info={"labels": ("a", "b"), "embedding_size": 4},
        reasoning_marks=ReasoningMarks("<think>", "</think>", frozenset()), tool_format=FORMATS["hermes"],
        max_model_len=2000,
    )  # fmt: skip
    more = {"return_token_ids": True, "stop": []} if "completions" in path else {}
    body = VALID[path] | more | (CALLED.get(path, {}) if calls else {})
    body = {name: value for name, value in body.items() if not name.startswith("stream")}
    answer = service.call("POST", path, body, {"x-carousel-timings": "true"})
    assert answer.status == 200, answer.body
    schemas = openapi_document(ApiConfig(), RequestLimits())["components"]["schemas"]
    exactly(ENDPOINTS[path].response.__name__, schemas).validate(answer.json)
