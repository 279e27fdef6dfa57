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
from app.jobs.http_client import RowFailed, Service, ServiceFull, ServiceGone
from app.jobs.questions import Question
from app.jobs.record import Record
from tests.benchmarks.servers import serving

QUESTION = Question(number=4, row_id="a", url="/v1/completions", body={"prompt": "x"})
USAGE = {"prompt_tokens": 3, "completion_tokens": 5}


def error(status: int, code: str = "some_code", **headers: str) -> Response:
    return JSONResponse({"error": {"message": "in words", "code": code}}, status_code=status, headers=headers)


def answer(**choice: Any) -> Response:
    return JSONResponse({"choices": [{"finish_reason": "stop"} | choice], "usage": USAGE})


def asked(response: Response, *, base: str = "", seen: list[Request] | None = None) -> Record:
    """What `Service.ask` makes of a response."""

    async def complete(request: Request) -> Response:
        if seen is not None:
            seen.append(request)
        return response

    async def ask(url: str) -> Record:
        async with Service(url + base, "secret") as service:
            return await service.ask(QUESTION)

    with serving(Starlette(routes=[Route("/v1/completions", complete, methods=["POST"])])) as url:
        return asyncio.run(ask(url))


@pytest.mark.parametrize("base", ["", "/", "/v1", "/v1/"])
def test_an_answer_becomes_the_record_and_the_key_goes_along(base: str) -> None:
    seen: list[Request] = []
    record = asked(answer(text="so"), base=base, seen=seen)
    assert record == Record(row=4, id="a", text="so", finish_reason="stop", prompt_tokens=3, completion_tokens=5)
    assert seen[0].headers["authorization"] == "Bearer secret"


def test_a_turn_without_a_text_is_kept_whole() -> None:
    assert asked(answer(message={"role": "assistant", "content": "so"})).text == "so"
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert json.loads(str(asked(answer(message=call)).text)) == call


@pytest.mark.parametrize("status", [400, 403, 404, 408, 413])
def test_a_row_that_is_refused_has_the_reason_as_its_error(status: int) -> None:
    assert asked(error(status)) == Record(row=4, id="a", error="in words")


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
        with pytest.raises(RowFailed, match="in words"):
            asked(failure)
    # A proxy in front of an application that starts again knows neither its routes nor its form.
    for outage in (error(503), PlainTextResponse("no such route", 404), PlainTextResponse("bad gateway", 502)):
        with pytest.raises(ServiceGone):
            asked(outage)


def test_an_answer_that_is_none_costs_only_its_row() -> None:
    assert "2 choices" in str(asked(JSONResponse({"choices": [{}, {}]})).error)
    assert "no completion" in str(asked(JSONResponse({"choices": [{"index": 0}]})).error)


def test_a_key_that_is_not_known_ends_the_run() -> None:
    with pytest.raises(Failure, match="does not take this API key any more"):
        asked(error(401))


def test_a_service_that_is_not_there_is_gone_and_an_address_that_is_none_is_told() -> None:
    async def ask(url: str) -> Record:
        async with Service(url, None) as service:
            return await service.ask(QUESTION)

    with pytest.raises(ServiceGone):
        asyncio.run(ask("http://127.0.0.1:9"))
    with pytest.raises(InvalidSetup, match="write it as http://HOST:PORT"):
        Service("127.0.0.1:8000", None)
