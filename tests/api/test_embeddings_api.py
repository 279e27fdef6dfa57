"""/v1/embeddings: what it asks of the engine, how vectors are written; the openai package and a real model."""

from __future__ import annotations

import asyncio
import base64
import math
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.api import generation
from app.build import build_engine
from app.config import CacheConfig, EngineConfig, ModelConfig
from app.engine.request import FinishReason, Pooling, Request, TokenDelta
from app.errors import Overloaded
from app.text import Tokenizer
from tests.kit.service import (
    Answer,
    Connection,
    Service,
    Step,
    bearer,
    entry,
    openai_client,
    steps_of_vectors,
    vector,
)
from tests.stalls import slowness, stalls_of_loop
from tests.tiny_encoders import tiny_tokenizer


def embedding_of(request: Request) -> list[float]:
    return [3.0, 4.0, 0.0, float(request.prompt_token_ids[0])]


def embed(request: Request) -> Iterable[Step]:
    return vector(request, embedding_of(request))


@pytest.fixture
def service(tokenizer: Tokenizer) -> Service:
    return Service(tokenizer, embed, pooling=Pooling.MEAN)


def ask(service: Service, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    return service.call("POST", "/v1/embeddings", {"input": [7]} | fields, headers)


def unit(numbers: Sequence[float]) -> list[float]:
    return [number / math.hypot(*numbers) for number in numbers]


def test_a_text_becomes_a_vector_of_length_one(service: Service) -> None:
    answer = ask(service, input="Hi there", user="me", priority=3)
    request = service.request
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    [data] = answer.json["data"]
    assert (answer.json["object"], answer.json["model"], data["object"], data["index"]) == (
        "list",
        "demo",
        "embedding",
        0,
    )
    assert data["embedding"] == pytest.approx(unit(embedding_of(request)), rel=1e-6)
    num_tokens = len(service.tokenizer.encode("Hi there", add_special_tokens=True))
    assert answer.json["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (request.pooling, request.sampling.max_tokens, request.tenant, request.priority) == (
        Pooling.MEAN,
        0,
        "me",
        3,
    )


@pytest.mark.parametrize(
    ("given", "prompts"), [([5, 6], [(5, 6)]), ([[5, 6], [7]], [(5, 6), (7,)]), (["3", "4"], None), ("3", None)]
)
def test_all_forms_of_input(service: Service, given: Any, prompts: list[tuple[int, ...]] | None) -> None:
    texts = [given] if isinstance(given, str) else given
    expected = prompts or [service.tokenizer.encode(text, add_special_tokens=True) for text in texts]
    answer = ask(service, input=given)
    by_id = {request.request_id: request.prompt_token_ids for request in service.generate.requests}
    assert [by_id[request_id] for request_id in sorted(by_id)] == expected
    assert [data["index"] for data in answer.json["data"]] == list(range(len(expected)))
    assert answer.json["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_base64_holds_the_same_numbers(service: Service) -> None:
    [written] = [data["embedding"] for data in ask(service, encoding_format="base64").json["data"]]
    assert array("f", base64.b64decode(written)).tolist() == ask(service).json["data"][0]["embedding"]


def test_the_first_numbers_are_normalised_again(service: Service) -> None:
    assert ask(service, dimensions=2).json["data"][0]["embedding"] == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("fields", [{"normalize": False}, {"use_activation": False}, {"activation": False}])
def test_vectors_come_as_they_are_computed_where_that_is_asked_for(service: Service, fields: dict[str, bool]) -> None:
    answer = ask(service, **fields)
    assert answer.json["data"][0]["embedding"] == [3.0, 4.0, 0.0, 7.0]
    assert ask(service, dimensions=2, **fields).json["data"][0]["embedding"] == [3.0, 4.0]
    assert "x-carousel-ignored" not in answer.headers


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, [5, 6]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, [8, 9]),
        ({"truncate_prompt_tokens": 9}, [5, 6, 7, 8, 9]),
    ],
)
def test_long_texts_are_cut_where_that_is_wanted(service: Service, fields: dict[str, Any], kept: list[int]) -> None:
    answer = ask(service, input=[5, 6, 7, 8, 9], **fields)
    assert service.request.prompt_token_ids == tuple(kept)
    assert answer.json["usage"]["prompt_tokens"] == len(kept)


def test_tokens_around_a_text_stay_when_it_is_cut() -> None:
    encoder = Service(Tokenizer(tiny_tokenizer()), embed, pooling=Pooling.MEAN, max_model_len=5)
    for most, side, kept in (
        (4, "right", (1, 5, 6, 2)), (4, "left", (1, 8, 9, 2)), (-1, "right", (1, 5, 6, 7, 2)), (3, "left", (1, 9, 2)),
        (2, "left", (1, 2)),
    ):  # fmt: skip
        ask(encoder, input="w5 w6 w7 w8 w9", truncate_prompt_tokens=most, truncation_side=side)
        assert encoder.generate.requests[-1].prompt_token_ids == kept
    refused = ask(encoder, input="w5 w6 w7 w8 w9", truncate_prompt_tokens=1)
    assert (refused.status, refused.error["param"]) == (400, "truncate_prompt_tokens")
    assert "is 1; it must be at least 2, because the tokenizer adds 2 tokens to each text" in refused.error["message"]
    assert ask(encoder, input="w5 w6 w7 w8 w9").error["code"] == "context_length_exceeded"


def test_a_conversation_has_the_vector_of_its_prompt(service: Service) -> None:
    messages = [{"role": "user", "content": "Is it a dog?"}, {"role": "assistant", "content": "It is"}]
    for fields in ({}, {"add_generation_prompt": True}, {"continue_final_message": True}, {"add_special_tokens": True}):
        answer = ask(service, input=None, messages=messages, **fields)
        assert len(answer.json["data"]) == 1
        same = {"messages": messages, "add_generation_prompt": False, **fields}
        tokens = service.call("POST", "/tokenize", same).json["tokens"]
        assert service.generate.requests[-1].prompt_token_ids == tuple(tokens)
    assert ask(service, messages=messages).error["param"] == "messages"
    assert ask(service, input=None).error["message"] == "input is required"


def test_first_numbers_that_are_all_zero_stay_so(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, lambda request: vector(request, [0.0, 0.0, 3.0, 4.0]), pooling=Pooling.LAST)
    answers = [ask(service, dimensions=dimensions).json["data"][0]["embedding"] for dimensions in (1, 2, 3)]
    assert answers == [[0.0], [0.0, 0.0], [0.0, 0.0, 1.0]]


def test_many_texts_are_computed_a_few_at_a_time(tokenizer: Tokenizer) -> None:
    num_open = most_open = 0

    async def generate(request: Request) -> Any:
        nonlocal num_open, most_open
        num_open += 1
        most_open = max(most_open, num_open)
        await asyncio.sleep(0)
        num_open -= 1
        for delta in embed(request):
            yield delta

    service = Service(tokenizer, generate=generate, pooling=Pooling.LAST, max_prompts=3)
    data = ask(service, input=[[number] for number in range(1, 40)]).json["data"]
    assert [each["embedding"] for each in data] == [
        pytest.approx(unit([3.0, 4.0, 0.0, float(number)]), rel=1e-6) for number in range(1, 40)
    ]
    assert most_open == 3


@pytest.mark.usefixtures("collected_as_served")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a"] * 512}),
        ("/v1/embeddings", {"input": ["a"] * 2048, "dimensions": 4095, "encoding_format": "base64"}),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 2047}),
        ("/v1/score", {"text_1": "a", "text_2": ["a"] * 2047}),
        ("/v1/classify", {"input": ["a"] * 2048}),
    ],
    ids=["numbers", "base64", "rerank", "score", "classify"],
)
async def test_many_long_vectors_do_not_hold_the_event_loop(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    service = steps_of_vectors(tokenizer, size=4096)
    async with Connection(service.app, "POST", path, body, {}) as connection:
        async with stalls_of_loop() as stalls:
            await connection.ended()
        assert connection.answer().status == 200
    assert stalls.longest_s < 0.05 * slowness()


def test_all_texts_of_a_call_have_one_bound(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_CALL_TOKENS", 1000)
    service = Service(tokenizer, embed, pooling=Pooling.MEAN)
    text = [5] * 150
    assert ask(service, input=[text] * 6).status == 200
    for path, body in (
        ("/v1/embeddings", {"input": [text] * 7}),
        ("/v1/embeddings", {"input": ["3 " * 150] * 7}),
        ("/v1/completions", {"prompt": [text] * 7}),
    ):
        answer = service.call("POST", path, body)
        [param] = body
        assert (answer.status, answer.error["param"]) == (400, param)
        assert f"at most 1,000 are accepted in one call; reduce `{param}`" in answer.error["message"]
    long = {"prompt": ["3 " * 500] * 8, "truncate_prompt_tokens": 5, "max_tokens": 1}
    assert service.call("POST", "/v1/completions", long).status != 400  # what is cut off does not count


def test_the_whole_context_may_be_used(service: Service) -> None:
    assert ask(service, input=[5] * 200).status == 200


def test_a_model_without_embeddings_says_so(tokenizer: Tokenizer) -> None:
    answer = ask(Service(tokenizer, embed))
    assert (answer.status, answer.error["param"]) == (400, "model")


def test_a_refusal_and_a_vector_without_direction(tokenizer: Tokenizer) -> None:
    assert ask(Service(tokenizer, lambda request: [Overloaded("full")], pooling=Pooling.LAST)).status == 429
    nowhere = TokenDelta("", (), FinishReason.STOP, embedding=bytes(16))
    assert ask(Service(tokenizer, lambda request: [nowhere], pooling=Pooling.LAST)).status == 500


def test_tokens_count_for_the_key(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, embed, pooling=Pooling.LAST, keys=[entry(tokens_per_minute=100)])
    assert ask(service, bearer(), input=[5] * 60).headers["x-ratelimit-remaining-tokens"] == "40"
    assert ask(service, bearer(), input=[5] * 60).status == 429
    assert service.request.tenant == "alice"


async def test_the_openai_package_gets_the_models_own_hidden_states(demo_path: Path, tokenizer: Tokenizer) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_path, dtype=torch.float32).eval()
    texts = ["Count from 3 to 5.", "Name a colour.", "3 4 5 6 7 8 9"]

    def expected(text: str) -> torch.Tensor:
        with torch.inference_mode():
            states = model.base_model(torch.tensor([tokenizer.encode(text, add_special_tokens=True)]))
        return torch.nn.functional.normalize(states.last_hidden_state[0].mean(dim=0), dim=0)

    engine = build_engine(
        EngineConfig(
            model=ModelConfig(path=str(demo_path), dtype="float32", device="cpu"), cache=CacheConfig(num_blocks=64)
        )
    )
    try:
        service = Service(tokenizer, generate=engine.generate, pooling=Pooling.MEAN)
        async with openai_client(service.app) as client:
            answer = await client.embeddings.create(model="demo", input=texts)
            for text, data in zip(texts, answer.data, strict=True):
                assert (torch.tensor(data.embedding) - expected(text)).norm() < 1e-4
    finally:
        engine.shutdown()
