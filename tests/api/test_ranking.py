"""/v1/rerank and /v1/score: what they ask of the engine, how scores are written; a real cross-encoder at the end."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from app.api import generation
from app.build import build_engine
from app.config import EngineConfig, ModelConfig
from app.engine.request import Pooling, Request
from app.errors import Overloaded
from app.json_pieces import json_pieces
from app.text import Tokenizer
from tests.kit.service import WAIT, Answer, Connection, Service, Step, bearer, entry, hang_up, vector
from tests.tiny_encoders import VOCAB_SIZE, save_tiny_encoder, tiny_tokenizer

CROSS_ENCODER = {"generates": False, "scores_pairs": True, "embedding_size": None, "vocab_size": VOCAB_SIZE}
# By the last word of a text: its direction in the plane, in degrees.
ANGLES = {10: 0.0, 20: 60.0, 30: 20.0, 40: 180.0}
COSINES = {20: 0.5, 30: math.cos(math.radians(20)), 40: -1.0}


def embed(request: Request) -> Iterable[Step]:
    angle = math.radians(ANGLES[request.prompt_token_ids[-2]])
    return vector(request, [3 * math.cos(angle), 3 * math.sin(angle)])


def judge(request: Request) -> Iterable[Step]:
    """A pair's score: a hundredth of the last word of its second text."""
    return vector(request, [request.prompt_token_ids[-2] / 100])


@pytest.fixture
def words() -> Tokenizer:
    return Tokenizer(tiny_tokenizer())


@pytest.fixture
def embedding(words: Tokenizer) -> Service:
    return Service(words, embed, pooling=Pooling.MEAN, model_info={"vocab_size": VOCAB_SIZE}, max_model_len=20)


@pytest.fixture
def crossing(words: Tokenizer) -> Service:
    return Service(words, judge, model_info=CROSS_ENCODER, max_model_len=20)


def rerank(service: Service, headers: dict[str, str] | None = None, path: str = "/v1/rerank", **fields: Any) -> Answer:
    body = {"query": "w10", "documents": ["w20", "w5 w30", {"text": "w40"}]} | fields
    return service.call("POST", path, body, headers)


def score(service: Service, **fields: Any) -> Answer:
    return service.call("POST", "/v1/score", {"text_1": "w10", "text_2": ["w20", "w30"]} | fields)


def prompts(service: Service) -> dict[int, tuple[int, ...]]:
    """By the number of the request."""
    return {int(each.request_id.rpartition("-")[2]): each.prompt_token_ids for each in service.generate.requests}


def test_documents_come_in_the_order_of_their_cosines(embedding: Service) -> None:
    answer = rerank(embedding, user="me", priority=3)
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "application/json"
    results = answer.json["results"]
    assert [each["index"] for each in results] == [1, 0, 2]
    expected = [COSINES[30], COSINES[20], COSINES[40]]
    assert [each["relevance_score"] for each in results] == pytest.approx(expected, abs=1e-6)
    assert all(each.keys() == {"index", "relevance_score"} for each in results)
    assert answer.json["usage"] == {"prompt_tokens": 13, "total_tokens": 13}
    assert answer.json["meta"]["tokens"] == {"input_tokens": 13}
    assert prompts(embedding) == {0: (1, 10, 2), 1: (1, 20, 2), 2: (1, 5, 30, 2), 3: (1, 40, 2)}
    for request in embedding.generate.requests:
        assert (request.pooling, request.sampling.max_tokens) == (Pooling.MEAN, 0)
        assert (request.tenant, request.priority, request.second_text_at) == ("me", 3, 0)


def test_a_cross_encoder_reads_pairs(crossing: Service) -> None:
    answer = rerank(crossing)
    assert [(each["index"], each["relevance_score"]) for each in answer.json["results"]] == [
        (2, pytest.approx(0.4)), (1, pytest.approx(0.3)), (0, pytest.approx(0.2)),
    ]  # fmt: skip
    assert prompts(crossing) == {0: (1, 10, 2, 20, 2), 1: (1, 10, 2, 5, 30, 2), 2: (1, 10, 2, 40, 2)}
    assert {(each.pooling, each.second_text_at) for each in crossing.generate.requests} == {(Pooling.SCORE, 3)}
    assert answer.json["usage"]["prompt_tokens"] == 16


def test_the_best_and_their_texts(embedding: Service) -> None:
    answer = rerank(embedding, top_n=2, return_documents=True)
    assert [each["document"] for each in answer.json["results"]] == [{"text": "w5 w30"}, {"text": "w20"}]
    assert len(rerank(embedding, top_n=50).json["results"]) == 3


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_vllms_zeros_ask_for_nothing(embedding: Service, path: str) -> None:
    assert len(rerank(embedding, path=path, top_n=0, max_tokens_per_doc=0).json["results"]) == 3


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize("names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
def test_the_texts_of_a_score_have_the_names_of_vllm(embedding: Service, names: tuple[str, str], path: str) -> None:
    first, second = names
    data = embedding.call("POST", path, {first: "w10", second: ["w20", "w30"]}).json["data"]
    assert [each["score"] for each in data] == pytest.approx([0.5, COSINES[30]], abs=1e-6)
    for body, param, words in (
        ({first: ["w1", "w2"], second: ["w3"] * 3}, first, f"`{first}` contains 2 texts and `{second}` contains 3"),
        ({first: "w1"}, "text_2", "text_2 is required"),
        ({second: "w1"}, "text_1", "text_1 is required"),
        ({first: "w1", second: "w2", "text_2": "w3"}, second, f"`text_2` and `{second}` are names of the same field"),
        ({first: "w1", second: [5]}, second, "should contain only strings"),
    ):
        refused = embedding.call("POST", path, body)
        assert (refused.status, refused.error["param"]) == (400, param)
        assert words in refused.error["message"]


@pytest.mark.parametrize("fields", [{"use_activation": False}, {"activation": False}, {"raw_scores": True}])
def test_scores_are_asked_for_as_logits(crossing: Service, embedding: Service, fields: dict[str, bool]) -> None:
    for answer in (rerank(crossing, **fields), score(crossing, **fields)):
        assert (answer.status, answer.headers.get("x-carousel-ignored")) == (200, None)
    assert {each.pooling for each in crossing.generate.requests} == {Pooling.LOGIT}
    assert rerank(embedding, **fields).json["results"] == rerank(embedding).json["results"], (
        "cosines are of no function"
    )


def test_texts_and_pairs_are_cut_to_a_number_of_tokens(crossing: Service, embedding: Service) -> None:
    fields = {"query": "w10", "documents": ["w20 w21 w22 w23"], "truncate_prompt_tokens": 6}
    rerank(crossing, **fields)
    assert crossing.request.prompt_token_ids == (1, 10, 2, 20, 21, 2)
    embedding.generate.script = lambda request: vector(request, [1.0, 0.0])
    rerank(embedding, **fields | {"query": "w10 w11 w12", "truncate_prompt_tokens": 4})
    assert prompts(embedding) == {0: (1, 10, 11, 2), 1: (1, 20, 21, 2)}
    refused = rerank(crossing, **fields | {"truncate_prompt_tokens": 4})
    assert (refused.status, refused.error["param"]) == (400, "documents")
    assert "has 8 tokens; truncate_prompt_tokens is 4; shorten it" in refused.error["message"]
    rerank(crossing, **fields | {"documents": ["w20 " * 40], "truncate_prompt_tokens": -1})
    assert len(crossing.generate.requests[-1].prompt_token_ids) == 20


def test_equal_scores_keep_the_order_of_the_documents(crossing: Service) -> None:
    results = rerank(crossing, documents=["w20", "w30", "w20", "w30"]).json["results"]
    assert [each["index"] for each in results] == [1, 3, 0, 2]


def test_scores_come_in_the_order_of_the_texts(embedding: Service, crossing: Service) -> None:
    data = score(embedding).json["data"]
    assert [each["index"] for each in data] == [0, 1]
    assert [each["score"] for each in data] == pytest.approx([0.5, COSINES[30]], abs=1e-6)
    assert [each["score"] for each in score(crossing).json["data"]] == pytest.approx([0.2, 0.3])
    assert [each["score"] for each in score(crossing, text_2="w50").json["data"]] == pytest.approx([0.5])


def test_texts_may_be_compared_pair_by_pair(embedding: Service, crossing: Service) -> None:
    many = {"text_1": ["w20", "w10", "w40"], "text_2": ["w10", "w30", "w40"]}
    data = score(embedding, **many).json["data"]
    assert [each["score"] for each in data] == pytest.approx([0.5, COSINES[30], 1.0], abs=1e-6)
    score(crossing, **many)
    assert prompts(crossing) == {0: (1, 20, 2, 10, 2), 1: (1, 10, 2, 30, 2), 2: (1, 40, 2, 40, 2)}
    answer = score(crossing, text_1=["w10", "w20"], text_2=["w30", "w40", "w50"])
    assert (answer.status, answer.error["param"]) == (400, "text_1")
    assert "`text_1` contains 2 texts and `text_2` contains 3" in answer.error["message"]


def test_long_documents_are_cut_where_that_is_wanted(embedding: Service, crossing: Service) -> None:
    long = " ".join(["w20"] * 30)
    refused = rerank(crossing, documents=["w20", long])
    assert (refused.status, refused.error["param"]) == (400, "documents")
    assert "a pair of `query` and `documents` has 34 tokens; this model accepts at most 20" in refused.error["message"]
    assert "send max_tokens_per_doc" in refused.error["message"]
    assert "a text in `documents` has 32 tokens" in rerank(embedding, documents=[long]).error["message"]
    assert rerank(crossing, documents=[long], max_tokens_per_doc=4096).status == 200
    assert len(crossing.request.prompt_token_ids) == 20
    rerank(embedding, documents=[long], max_tokens_per_doc=4)
    assert prompts(embedding)[1] == (1, 20, 20, 20, 20, 2)
    assert rerank(crossing, query=" ".join(["w20"] * 30), max_tokens_per_doc=5).status == 400


def test_a_small_body_cannot_ask_for_any_number_of_tokens(words: Tokenizer) -> None:
    service = Service(words, judge, model_info=CROSS_ENCODER, max_model_len=2000)
    answer = rerank(service, query=" ".join(["w10"] * 1000), documents=["w20"] * 1000)
    assert (answer.status, answer.error["param"]) == (400, "documents")
    assert "have 1,004,000 tokens; at most 1,000,000" in answer.error["message"]
    assert not service.generate.requests


def test_texts_alone_have_a_bound_too_and_what_is_cut_off_does_not_count(
    embedding: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MAX_CALL_TOKENS", 1000)
    documents = [" ".join(["w20"] * 10)] * 84
    answer = rerank(embedding, documents=documents)
    assert (answer.status, answer.error["param"]) == (400, "documents")
    assert "query and documents have 1,011 tokens; at most 1,000" in answer.error["message"]
    assert not embedding.generate.requests
    assert rerank(embedding, documents=documents, max_tokens_per_doc=1).status == 200


def test_pairs_of_a_long_query_are_not_made_on_the_event_loop(words: Tokenizer) -> None:
    service = Service(words, judge, model_info=CROSS_ENCODER, max_model_len=500)
    names: list[str] = []
    pairs = words.pairs

    def noted(*given: Any, **options: Any) -> Any:
        names.append(threading.current_thread().name)
        return pairs(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "pairs", noted)
        assert rerank(service).status == 200
        assert rerank(service, query=" ".join(["w10"] * 100), documents=["w20"] * 100).status == 200
    assert names[0] == threading.main_thread().name
    assert names[1].startswith("preparation")


def test_models_that_give_no_scores_or_no_text_say_so(words: Tokenizer, crossing: Service) -> None:
    answer = rerank(Service(words, embed, model_info={"vocab_size": VOCAB_SIZE}))
    assert (answer.status, answer.error["param"]) == (400, "model")
    for path, body in (
        ("/v1/completions", {"prompt": "w10"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w10"}]}),
        ("/v1/embeddings", {"input": "w10"}),
    ):
        answer = crossing.call("POST", path, body)
        assert (answer.status, answer.error["param"]) == (400, "model"), path
    assert "is an encoder" in crossing.call("POST", "/v1/completions", {"prompt": "w10"}).error["message"]
    assert not crossing.generate.requests


def test_a_refusal_and_what_is_no_score(words: Tokenizer) -> None:
    def service(script: Any) -> Service:
        return Service(words, script, model_info=CROSS_ENCODER)

    assert rerank(service(lambda request: [Overloaded("full")])).status == 429
    assert rerank(service(lambda request: vector(request, [math.nan]))).status == 500


def test_the_tokens_of_all_documents_count_for_the_key(words: Tokenizer) -> None:
    service = Service(words, judge, model_info=CROSS_ENCODER, keys=[entry(tokens_per_minute=40)])
    assert rerank(service, bearer()).headers["x-ratelimit-remaining-tokens"] == "24"
    assert rerank(service, bearer(), documents=["w20"] * 5).status == 429
    assert {request.tenant for request in service.generate.requests} == {"alice"}
    text = service.call("GET", "/metrics", headers=bearer()).body.decode()
    assert 'request_success_total{finished_reason="stop",model_name="demo"} 3.0' in text


async def test_a_client_that_goes_ends_all_documents(words: Tokenizer) -> None:
    service = Service(words, lambda request: [WAIT], model_info=CROSS_ENCODER)

    body = {"query": "w10", "documents": ["w20"] * 5}
    await hang_up(service.app, "/v1/rerank", body, lambda: len(service.generate.open) == 5)
    assert service.generate.open == set()


def test_cohere_asks_at_a_path_of_its_own_and_an_item_of_a_batch_at_the_first(crossing: Service) -> None:
    assert rerank(crossing, path="/v2/rerank").json["results"] == rerank(crossing).json["results"]
    body = {"query": "w10", "documents": ["w20"]}
    answered = asyncio.run(crossing.handler.handle_item("", "/v1/rerank", body))
    assert answered.status_code == 200
    written = json.loads(b"".join(json_pieces(answered.body)))
    assert written["results"] == [{"index": 0, "relevance_score": pytest.approx(0.2)}]
    assert crossing.generate.requests[-1].is_background


async def test_a_real_cross_encoder_gives_what_transformers_gives(tmp_path: Path) -> None:
    model, theirs = save_tiny_encoder("bert", tmp_path, num_labels=1), tiny_tokenizer()
    query, documents = "w10 w11", [f"w{at} w{at + 7} w{at + 3}" for at in range(4, 44)]
    with torch.inference_mode():
        padded = theirs([query] * 40, documents, return_tensors="pt", padding=True)
        expected = model(**padded).logits[:, 0].sigmoid().tolist()

    config = EngineConfig(model=ModelConfig(path=str(tmp_path), dtype="float32", device="cpu"))
    engine = await asyncio.to_thread(build_engine, config)
    try:
        service = Service(Tokenizer(theirs), generate=engine.generate, model_info=CROSS_ENCODER)
        body = {"query": query, "documents": documents}
        async with Connection(service.app, "POST", "/v1/rerank", body, {}) as connection:
            results = (await connection.finished()).json["results"]
    finally:
        engine.shutdown()
    assert [each["relevance_score"] for each in results] == pytest.approx(sorted(expected, reverse=True), abs=1e-4)
    for each in results:
        assert each["relevance_score"] == pytest.approx(expected[each["index"]], abs=1e-4)
