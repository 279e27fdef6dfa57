"""/v1/classify: what it asks of the engine, how probabilities are written; a real classifier at the end."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from app.api import generation
from app.build import build_engine
from app.config import EngineConfig, ModelConfig
from app.engine.request import Pooling, Request
from app.json_pieces import json_pieces
from app.text import Tokenizer
from tests.kit.service import Answer, Service, Step, bearer, begun_batch, entry, http_client, vector
from tests.tiny_encoders import VOCAB_SIZE, save_tiny_encoder, tiny_tokenizer
from tests.waiting import until

LABELS = ("code", "poem", "talk")
CLASSIFIER = {"generates": False, "labels": LABELS, "embedding_size": None, "vocab_size": VOCAB_SIZE}
PATH = "/v1/classify"


def judge(request: Request) -> Iterable[Step]:
    """The label of a text: its last word modulo three, with 3/4."""
    best = request.prompt_token_ids[-2] % 3
    return vector(request, [0.75 if index == best else 0.125 for index in range(3)])


@pytest.fixture
def words() -> Tokenizer:
    return Tokenizer(tiny_tokenizer())


@pytest.fixture
def classifying(words: Tokenizer) -> Service:
    return Service(words, judge, model_info=CLASSIFIER, max_model_len=20)


def classify(service: Service, headers: dict[str, str] | None = None, path: str = PATH, **fields: Any) -> Answer:
    return service.call("POST", path, {"input": ["w10", "w5 w30"]} | fields, headers)


def test_each_text_has_a_label_and_the_probability_of_every_label(classifying: Service) -> None:
    answer = classify(classifying, user="me", priority=3)
    assert answer.status == 200, answer.body
    assert answer.json["data"] == [
        {"index": 0, "label": "poem", "probs": [0.125, 0.75, 0.125], "num_classes": 3},
        {"index": 1, "label": "code", "probs": [0.75, 0.125, 0.125], "num_classes": 3},
    ]
    assert (answer.json["object"], answer.json["model"]) == ("list", "demo")
    assert answer.json["id"].startswith("classify-")
    assert answer.json["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    asked = classifying.generate.requests
    assert sorted(each.prompt_token_ids for each in asked) == [(1, 5, 30, 2), (1, 10, 2)]
    for request in asked:
        assert (request.pooling, request.sampling.max_tokens) == (Pooling.SCORE, 0)
        assert (request.tenant, request.priority) == ("me", 3)


def test_one_text_may_come_alone_without_special_tokens_and_where_vllm_has_it(classifying: Service) -> None:
    alone = classify(classifying, input="w11")
    assert [each["label"] for each in alone.json["data"]] == ["talk"]
    assert classify(classifying, input="w11", path="/classify").json["data"] == alone.json["data"]
    classify(classifying, input="w11 w12", add_special_tokens=False)
    assert classifying.generate.requests[-1].prompt_token_ids == (11, 12)


def test_of_equal_labels_the_first_is_named(words: Tokenizer) -> None:
    service = Service(words, lambda request: vector(request, [0.25, 0.5, 0.5]), model_info=CLASSIFIER)
    assert classify(service, input="w4").json["data"][0]["label"] == "poem"


@pytest.mark.parametrize(
    "model_info",
    [{}, {"generates": False}, {"generates": False, "scores_pairs": True, "embedding_size": None}],
    ids=["generates", "encoder", "cross-encoder"],
)
def test_a_model_without_labels_is_refused_by_its_name(words: Tokenizer, model_info: dict[str, Any]) -> None:
    service = Service(words, judge, model_info={"vocab_size": VOCAB_SIZE} | model_info)
    answer = classify(service)
    assert (answer.status, answer.error["param"]) == (400, "model")
    assert answer.error["message"] == "the model 'demo' is not a classifier; choose a model with labels"
    assert not service.generate.requests


def test_a_classifier_says_where_it_answers(classifying: Service) -> None:
    message = classifying.call("POST", "/v1/completions", {"prompt": "w10"}).error["message"]
    assert message.endswith("generates no text; choose another model, or use /v1/classify")
    for path, body in (("/v1/embeddings", {"input": "w10"}), ("/v1/rerank", {"query": "w4", "documents": ["w5"]})):
        answer = classifying.call("POST", path, body)
        assert (answer.status, answer.error["param"]) == (400, "model"), path
    assert not classifying.generate.requests


@pytest.mark.parametrize(
    ("fields", "param", "words_of_error"),
    [
        ({"input": None}, "input", "is required"),
        ({"input": []}, "input", "a string or a list of strings"),
        ({"input": [7]}, "input", "only strings"),
        ({"input": {"text": "w4"}}, "input", "a string or a list of strings"),
        ({"input": ["w4"] * 2049}, "input", "2,049 texts; this server accepts at most 2,048"),
        ({"input": ["w4"] * 10_001}, "input", "10,001 texts; at most 10,000"),
        ({"input": " ".join(["w4"] * 19)}, "input", "a text of 21 tokens, but this model accepts at most 20"),
        ({"input": "", "add_special_tokens": False}, "input", "without tokens"),
        (
            {"truncate_prompt_tokens": 1, "input": "w4 w5"},
            "truncate_prompt_tokens",
            "must be at least 2, because the tokenizer adds 2 tokens",
        ),
        ({"messages": [{"role": "user", "content": "w4"}]}, "messages", "not supported"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_field_is_a_400_that_names_it_and_nothing_begins(
    classifying: Service, fields: dict[str, Any], param: str, words_of_error: str
) -> None:
    answer = classify(classifying, **fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert words_of_error in answer.error["message"]
    assert not classifying.generate.requests


def test_all_texts_together_have_a_bound(classifying: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_CALL_TOKENS", 100)
    answer = classify(classifying, input=["w4"] * 40)
    assert (answer.status, answer.error["param"]) == (400, "input")
    assert "at most 100 are accepted in one call" in answer.error["message"]


@pytest.mark.parametrize("scores", [[0.5, math.nan, 0.5], [0.5, 0.5]], ids=["not numbers", "too few"])
def test_what_are_no_scores_of_the_labels_is_an_error_of_the_server(words: Tokenizer, scores: list[float]) -> None:
    assert classify(Service(words, lambda request: vector(request, scores), model_info=CLASSIFIER)).status == 500


def test_the_tokens_of_all_texts_count_for_the_key_and_its_requests_for_the_metrics(words: Tokenizer) -> None:
    service = Service(words, judge, model_info=CLASSIFIER, keys=[entry(tokens_per_minute=20)])
    assert classify(service, bearer()).headers["x-ratelimit-remaining-tokens"] == "13"
    assert classify(service, bearer(), input=["w4"] * 5).status == 429
    assert classify(service, {}).status == 401
    assert {request.tenant for request in service.generate.requests} == {"alice"}
    text = service.call("GET", "/metrics", headers=bearer()).body.decode()
    assert 'request_success_total{finished_reason="stop",model_name="demo"} 2.0' in text
    assert 'prompt_tokens_total{model_name="demo"} 7.0' in text


def test_a_key_for_other_models_is_refused(words: Tokenizer) -> None:
    service = Service(words, judge, model_info=CLASSIFIER, keys=[entry(models=["other"])])
    assert classify(service, bearer(), model="demo").status == 403


async def test_a_batch_classifies_line_by_line_and_counts_its_tokens(classifying: Service, tmp_path: Path) -> None:
    lines = [
        json.dumps({"custom_id": text, "method": "POST", "url": PATH, "body": {"input": text}}).encode() + b"\n"
        for text in ("w10", "w11")
    ]
    async with http_client(classifying, tmp_path) as client:
        batch_id = await begun_batch(client, b"".join(lines), PATH)
        batch = await until(
            lambda: client.get(f"/v1/batches/{batch_id}"), lambda answer: answer.json()["status"] == "completed"
        )
        assert batch.json()["usage"]["input_tokens"] == 6
        written = (await client.get(f"/v1/files/{batch.json()['output_file_id']}/content")).text
    found = {each["custom_id"]: each["response"]["body"] for each in map(json.loads, written.splitlines())}
    assert {name: body["data"][0]["label"] for name, body in found.items()} == {"w10": "poem", "w11": "talk"}
    assert all(request.is_background for request in classifying.generate.requests)


async def test_a_real_classifier_gives_what_transformers_gives(tmp_path: Path) -> None:
    model, theirs = (
        save_tiny_encoder("bert", tmp_path, num_labels=3, id2label=dict(enumerate(LABELS))),
        tiny_tokenizer(),
    )
    texts = [" ".join(f"w{at + step}" for step in range(1 + at % 5)) for at in range(4, 44)]
    with torch.inference_mode():
        logits = model(**theirs(texts, return_tensors="pt", padding=True)).logits
    expected = logits.softmax(dim=-1)

    engine = await asyncio.to_thread(
        build_engine, EngineConfig(model=ModelConfig(path=str(tmp_path), dtype="float32", device="cpu"))
    )
    try:
        service = Service(Tokenizer(theirs), generate=engine.generate, model_info=CLASSIFIER)
        whole = await service.answer("POST", PATH, {"input": texts})
        raw = await service.answer("POST", PATH, {"input": texts, "use_activation": False})
        answered = await service.handler.handle_item("", PATH, {"input": texts[0]})
    finally:
        engine.shutdown()
    data = whole.json["data"]
    assert torch.tensor([each["probs"] for each in data]).sub(expected).abs().max() <= 1e-4
    assert torch.tensor([each["probs"] for each in raw.json["data"]]).sub(logits).abs().max() <= 1e-4
    assert [each["label"] for each in data] == [LABELS[index] for index in expected.argmax(dim=-1).tolist()]
    assert [each["index"] for each in data] == list(range(40))
    assert json.loads(b"".join(json_pieces(answered.body)))["data"][0]["label"] == data[0]["label"]
