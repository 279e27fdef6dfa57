"""What a service says, over real HTTP, and what becomes of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from app.errors import Failure, InvalidSetup
from app.jobs.executors import ServiceFull, ServiceGone
from app.jobs.http_client import HttpClient
from app.jobs.job import Item, ItemOutput, ItemResult
from app.jobs.outputs import RecordFormat
from tests.benchmarks.servers import serving

ITEM = Item(number=4, id="a", url="/v1/completions", body={"prompt": "x"})
USAGE = {"prompt_tokens": 3, "completion_tokens": 5}


def error(status: int, code: str = "some_code", **headers: str) -> Response:
    return JSONResponse({"error": {"message": "in words", "code": code}}, status_code=status, headers=headers)


def answer(**choice: Any) -> Response:
    return JSONResponse({"choices": [{"finish_reason": "stop"} | choice], "usage": USAGE})


def as_record(result: ItemResult) -> dict[str, Any]:
    return dict(json.loads(result.line))


def record(**fields: Any) -> dict[str, Any]:
    return as_record(RecordFormat().generated(ItemOutput(number=4, id="a", **fields)))


def asked(response: Response, *, base: str = "", seen: list[tuple[str, str, Any]] | None = None) -> dict[str, Any]:
    """The record that comes of a response."""

    async def complete(request: Request) -> Response:
        if seen is not None:
            seen.append((request.headers["authorization"], request.headers["x-request-id"], await request.json()))
        return response

    async def ask(url: str) -> dict[str, Any]:
        async with HttpClient(url + base, "secret", model="small", job_id="night") as client:
            return as_record(RecordFormat().answered(ITEM, await client.answer(ITEM)))

    with serving(Starlette(routes=[Route("/v1/completions", complete, methods=["POST"])])) as url:
        return asyncio.run(ask(url))


@pytest.mark.parametrize("base", ["", "/", "/v1", "/v1/"])
def test_an_answer_becomes_the_record_and_the_key_and_the_id_of_the_row_go_along(base: str) -> None:
    seen: list[tuple[str, str, Any]] = []
    found = asked(answer(text="so"), base=base, seen=seen)
    assert found == record(text="so", finish_reason="stop", prompt_tokens=3, completion_tokens=5)
    assert seen == [("Bearer secret", "night-4", {"model": "small", "prompt": "x", "service_tier": "flex"})]


def test_a_turn_without_a_text_is_kept_whole() -> None:
    assert asked(answer(message={"role": "assistant", "content": "so"}))["text"] == "so"
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert json.loads(asked(answer(message=call))["text"]) == call


@pytest.mark.parametrize("status", [400, 403, 404, 408, 413])
def test_a_row_that_is_refused_has_the_reason_as_its_error(status: int) -> None:
    assert asked(error(status)) == record(error="in words")


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after-ms": "250", "Retry-After": "1"}, 0.25),
        ({"Retry-After": "7"}, 7),
        ({}, 1),
        ({"Retry-After": "x"}, 1),
    ],
)
def test_a_full_service_says_when_to_come_back(headers: dict[str, str], seconds: float) -> None:
    with pytest.raises(ServiceFull) as full:
        asked(error(429, **headers))
    assert full.value.retry_after_s == seconds


def test_what_the_service_fails_on_is_the_rows_and_what_it_cannot_do_now_is_not() -> None:
    for failure in (error(500), error(503, "replicas_lost")):
        assert "failed on this item 3 times, the last time: in words" in asked(failure)["error"]
    # A proxy in front of an application that starts again knows neither its routes nor its form.
    for outage in (error(503), PlainTextResponse("no such route", 404), PlainTextResponse("bad gateway", 502)):
        with pytest.raises(ServiceGone):
            asked(outage)


def test_an_answer_that_is_none_costs_only_its_row() -> None:
    assert "2 choices" in asked(JSONResponse({"choices": [{}, {}]}))["error"]
    assert "no completion" in asked(JSONResponse({"choices": [{"index": 0}]}))["error"]


def test_a_key_that_is_not_known_ends_the_run() -> None:
    with pytest.raises(Failure, match="does not take this API key any more"):
        asked(error(401))


def test_a_service_that_is_not_there_is_gone_and_an_address_that_is_none_is_told() -> None:
    async def ask(url: str) -> dict[str, Any]:
        async with HttpClient(url, None) as client:
            return as_record(RecordFormat().answered(ITEM, await client.answer(ITEM)))

    with pytest.raises(ServiceGone):
        asyncio.run(ask("http://127.0.0.1:9"))
    with pytest.raises(InvalidSetup, match="write it as http://HOST:PORT"):
        HttpClient("127.0.0.1:8000", None)
