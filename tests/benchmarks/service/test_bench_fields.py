"""A body for every field: what there is, what the sweep measures, and that none of them holds the event loop."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.http.openapi import BATCH_BODIES, BODIES, openapi_document
from app.api.json_structure import MAX_VALUES, check_structure
from app.api.prepared_request import RequestLimits
from app.config import ApiConfig
from app.engine.request import FILTERS, FinishReason, Pooling, Request, TokenDelta
from app.text import Tokenizer
from app.text.tool_calls import FORMATS
from benchmarks.harness.http_call import Target
from benchmarks.service.field_bodies import LARGEST_ANSWER, MAX_INPUTS, FieldBody, endpoint_schemas, field_bodies
from benchmarks.service.fields import (
    EMBEDDING_SIZE,
    Cost,
    HonestStream,
    application,
    figures_of,
    longest_step_s,
    sent_bodies,
)
from deployments.serve.process import freeze_loaded
from deployments.serve.settings import parse
from tests.kit.service import MAX_MODEL_LEN, Service, Step, client_of, say, served
from tests.stalls import slowness, stalls_of_loop

SIZE = RequestLimits().max_body_bytes // 16
# A body of the full size may hold the loop for 50 ms; these are a sixteenth, but their answers may be whole. On a slow
# machine it is as much longer as Python is slower there.
MAX_HELD_S = 0.05
NUM_TRIES = 10  # of a body that is over the bound: one that nothing else disturbs is enough
DOCUMENT = openapi_document(ApiConfig(), RequestLimits(), has_batches=True)
PATHS = [
    path
    for path, operations in DOCUMENT["paths"].items()
    if "application/json" in operations.get("post", {}).get("requestBody", {}).get("content", {})
]


def bodies(size: int, document: Mapping[str, Any] = DOCUMENT) -> list[FieldBody]:
    return list(field_bodies(document, size=size, max_model_len=MAX_MODEL_LEN))


@contextmanager
def collecting_garbage_as_served() -> Iterator[None]:
    """A collection does not look at what was there before: thousands of tests leave more than a service."""
    thresholds = gc.get_threshold()
    freeze_loaded()
    yield
    gc.set_threshold(*thresholds)


async def held_s(client: httpx.AsyncClient, path: str, data: bytes) -> float:
    """How long the event loop was held at most while this body was answered, on a machine that is not slow."""
    async with stalls_of_loop() as stalls:
        answer = await client.post(path, content=data, headers={"Content-Type": "application/json"})
    assert answer.status_code < 500, (data[:300], answer.text)
    longest_s = stalls.longest_process_s
    return longest_s if longest_s <= MAX_HELD_S else longest_s / slowness()


def service_at(demo_path: Path, embedding_size: int = 4) -> Service:
    """It answers everything with `3 4 5.`, or with a vector."""
    tokenizer = Tokenizer.load(str(demo_path))
    says = say(tokenizer, "3 4 5.")

    def script(request: Request) -> Iterable[Step]:
        if request.pooling is None:
            yield from says(request)
        else:
            yield TokenDelta(request.request_id, (), FinishReason.STOP, embedding=numbers)

    numbers = array("f", [3.0, 4.0, 0.0, 1.0] * (embedding_size // 4)).tobytes()
    model_info = {"embedding_size": embedding_size}
    return Service(tokenizer, script, tool_format=FORMATS["hermes"], pooling=Pooling.MEAN, model_info=model_info)


def top_field(body: FieldBody) -> str:
    return body.name.split()[1].partition(".")[0].partition("[")[0]


def is_of_completions(body: FieldBody) -> bool:
    """Whether completions are sent its field, as all generation has it. Of a batch each prompt has it, too."""
    name = top_field(body)
    if body.path not in ("/v1/chat/completions", "/v1/responses", "/v1/messages") or name == "documents":
        return False  # documents go to a chat's template
    of_completions = DOCUMENT["components"]["schemas"]["CompletionRequest"]["properties"]
    schemas = (schema["properties"] for path, schema in endpoint_schemas(DOCUMENT) if path == body.path)
    return any(name in schema and schema[name] == of_completions.get(name) for schema in schemas)


# The fields of the latter are those of messages, and it takes seconds to count the tokens of each such body.
@pytest.mark.parametrize("path", [path for path in PATHS if path != "/v1/messages/count_tokens"])
def test_no_field_holds_the_event_loop(path: str, demo_path: Path, tmp_path: Path) -> None:
    document = DOCUMENT | {"paths": {path: DOCUMENT["paths"][path]}}
    # With as many values as are parsed a body is none of a sixteenth: these are for the sweep itself, and so are all
    # kinds of text, of which a prompt has each, and items that are repeated in items that are.
    left = {"within"} if path == "/v1/completions" else {"within", "letter", "spaces", "signs", "x32"}
    sent = [
        body
        for body in field_bodies(document, size=SIZE, max_model_len=MAX_MODEL_LEN, with_pairs=False)
        if left.isdisjoint(body.name.split()) and not is_of_completions(body)
    ]
    assert over_the_bound(service_at(demo_path), sent, tmp_path) == {}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/score"])
def test_no_list_beside_the_least_numbers_holds_the_event_loop_with_long_vectors(
    path: str, demo_path: Path, tmp_path: Path
) -> None:
    document = DOCUMENT | {"paths": {path: DOCUMENT["paths"][path]}}
    sent = [
        body
        for body in field_bodies(document, size=SIZE, max_model_len=MAX_MODEL_LEN)
        if body.is_full and body.name.endswith("+ least numbers")
    ]
    assert any(len(value) == MAX_INPUTS for body in sent for value in body.value.values() if isinstance(value, list))
    assert over_the_bound(service_at(demo_path, EMBEDDING_SIZE), sent, tmp_path) == {}


def over_the_bound(service: Service, sent: Iterable[FieldBody], folder: Path) -> dict[str, list[float]]:
    """The bodies that held the event loop for too long each time, with those times."""
    over: dict[str, list[float]] = {}

    async def send_all() -> None:
        async with served(service, folder) as app, client_of(app) as client:
            for body in sent:
                data, tries = body.data(), list[float]()
                while len(tries) < NUM_TRIES and min(tries, default=1.0) > MAX_HELD_S:
                    tries.append(await held_s(client, body.path, data))
                if min(tries) > MAX_HELD_S:
                    over[body.name] = [round(each, 3) for each in tries]

    with collecting_garbage_as_served():
        asyncio.run(send_all())
    return over


def test_what_has_more_values_than_are_parsed_is_there_with_so_many_too() -> None:
    document = DOCUMENT | {"paths": {"/v1/completions": DOCUMENT["paths"]["/v1/completions"]}}
    [within] = [
        body
        for body in field_bodies(document, size=15 * SIZE, max_model_len=MAX_MODEL_LEN, with_pairs=False)
        if body.name == "/v1/completions structured_outputs.json list within"
    ]
    check_structure([within.data()], "the body")
    assert len(within.value["structured_outputs"]["json"]["k"]) > 0.8 * MAX_VALUES


def test_lists_go_to_long_vectors_and_prompts_to_pipelines_and_one_answer_is_not_read() -> None:
    sent = [each for body in bodies(2000) for each in sent_bodies(body)]

    def models(of: str) -> dict[str, Any]:
        [found] = [json.loads(each.data) for each in sent if each.name.startswith(f"{of}, ")]
        return dict(found)

    assert models("/v1/rerank documents most + least numbers of long vectors")["model"] == "vectors"
    assert models("/v1/rerank documents most + least numbers")["max_tokens_per_doc"] == 1
    assert models("/v1/chat/completions messages most to pipelines")["model"] == "nested"
    assert models("/v1/chat/completions documents most to pipelines")["model"] == "ranked"
    unread = [each for each in sent if not each.is_read]
    generating = {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/batch"}
    # These read a body of one that generates, and pass over `stream`.
    assert {each.path for each in unread} == generating | {"/tokenize", "/v1/messages/count_tokens"}
    assert all(json.loads(each.data)["stream"] for each in unread)


def test_the_swept_service_may_be_started(demo_path: Path, tmp_path: Path) -> None:
    given = argparse.Namespace(step_ms=20.0)
    config = parse(application(given, str(demo_path), str(tmp_path)))
    assert [each.name for each in config.pipelines] == ["together", "nested", "ranked"]


def test_there_is_a_body_for_every_field_of_every_schema() -> None:
    names = set(map(top_field, bodies(2000)))
    expected = {
        field.alias or name for schema in (*BODIES, *BATCH_BODIES) for name, field in schema.model_fields.items()
    }
    assert expected - names == NOT_FILLED
    assert {body.path for body in bodies(2000)} == set(PATHS)


# Of one value.
NOT_FILLED = {"completion_window"}


def test_the_longest_pause_ends_with_a_token_or_has_not_ended() -> None:
    now_s = time.perf_counter()
    honest = HonestStream(Target.parse("http://127.0.0.1:1"), 8, arrived_s=[now_s - 9, now_s - 5, now_s - 4])
    assert honest.longest_pause_s(now_s - 4.5) >= 4  # since the last token
    assert 4 <= honest.longest_pause_s(now_s - 10) < 4.5
    assert 0 <= honest.longest_pause_s(now_s) < 1


def test_the_longest_step_is_that_of_the_model_which_the_honest_stream_goes_to() -> None:
    def scraped(**counts: tuple[int, int, int]) -> list[tuple[str, str, float]]:
        bounds = ("0.02", "0.03", "+Inf")
        return [
            ("carousel_step_seconds_bucket", f'model_name="{model}",replica="a",le="{bound}"', float(count))
            for model, of_model in counts.items()
            for bound, count in zip(bounds, of_model, strict=True)
        ]

    before = scraped(swept=(5, 9, 9), vectors=(1, 1, 1))
    assert longest_step_s(before, scraped(swept=(8, 12, 12), vectors=(1, 1, 7))) == 0.02
    assert longest_step_s(before, scraped(swept=(8, 13, 13), vectors=(1, 1, 7))) == 0.03


def test_a_body_is_over_the_targets_that_it_does_not_keep() -> None:
    calm = cost(step_ms=20.0)
    assert cost(step_ms=30.0, pause_ms=100.0, grown_mib=100.0).over(calm) == []
    assert cost(step_ms=50.0, stall_ms=51.0, status="503").over(calm) == ["stall_ms", "step_ms", "status"]
    figures = figures_of({"one": cost(), "other": cost(pause_ms=300.0)}, calm)
    assert [(each["body"], each["targets"], each["pause_ms"]) for each in figures["over"]] == [
        ("other", ["pause_ms"], 300.0)
    ]
    assert (figures["bodies"], figures["pause_ms"], figures["statuses"]) == (2, 300.0, {"200": 2})


def cost(**figures: Any) -> Cost:
    nothing = {"seconds": 0.1, "stall_ms": 0.0, "pause_ms": 10.0, "step_ms": 10.0, "cpu_s": 0.1, "grown_mib": 0.0}
    return Cost(**{"status": "200", "grown": "ingress", **nothing, **figures})


def test_the_largest_answer_of_each_endpoint_that_generates_has_all_filters() -> None:
    largest = [each for each in bodies(2000) if each.name.endswith(LARGEST_ANSWER)]
    assert {each.path for each in largest} >= {"/v1/completions", "/v1/chat/completions", "/v1/responses"}
    for each in largest:
        assert each.value.items() >= FILTERS.items(), each.path
