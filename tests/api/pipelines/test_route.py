"""A route: which case a request takes, and where it goes then."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from app.api import RequestHandler, pipelines_of
from app.config import ApiConfig, ApplicationConfig
from app.engine.request import FinishReason, Pooling, Request, TokenDelta, TokenLogprobs
from app.errors import InvalidSetup
from app.metrics import RequestMetrics
from app.text import Tokenizer
from tests.kit.service import Answer, Connection, Service, Step, bearer, by_angle, delta, entry, last, say, vector
from tests.stalls import slowness, stalls_of_loop

ANGLES = {"code": 0.0, "Write a function": 10.0, "poem": 90.0, "Sing": 80.0}


def routed(tokenizer: Tokenizer, cases: list[dict[str, Any]], **settings: Any) -> Service:
    step = {key: settings.pop(key) for key in ("header", "classifier") if key in settings}
    pipelines = [{"name": "auto", "steps": [{"kind": "route", "cases": cases, **step}]}]
    script = by_angle(tokenizer, ANGLES)
    return Service(tokenizer, script, names=("a", "b"), pipelines=pipelines, pooling=Pooling.LAST, **settings)


def taken(answer: Answer) -> tuple[str, int]:
    assert answer.status == 200, answer.body
    [case] = [step["case"] for step in answer.json["usage"]["pipeline"]["steps"] if "case" in step]
    assert answer.headers["x-carousel-pipeline-case"] == str(case)
    assert answer.json["model"] == answer.headers["x-carousel-pipeline-model"]
    return answer.json["model"], case


def test_by_length_the_first_case_with_room_is_taken(tokenizer: Tokenizer) -> None:
    cases = [{"model": "a", "max_prompt_tokens": 5}, {"model": "b"}]
    service = routed(tokenizer, cases, keys=[entry(tokens_per_minute=100_000)])
    for prompt, expected in (([5] * 5, ("a", 0)), ([5] * 6, ("b", 1))):
        body = {"model": "auto", "prompt": prompt, "max_tokens": 20}
        assert taken(service.call("POST", "/v1/completions", body, bearer())) == expected
    account = service.handler.authenticator.account_named(entry()["name"])
    assert account.usage.num_tokens == 11 + 2 * (1 + len(tokenizer.encode("3 4", add_special_tokens=False)))


def test_by_length_a_prompt_is_encoded_once_for_each_model(tokenizer: Tokenizer) -> None:
    counted: list[str] = []

    class Counting(Tokenizer):
        def encode(self, text: str, **options: Any) -> tuple[int, ...]:
            counted.append(text)
            return super().encode(text, **options)

    cases = [{"model": "a", "max_prompt_tokens": 2 + at} for at in range(60)] + [{"model": "b"}]
    service = routed(Counting(tokenizer._pretrained), cases, keys=[entry(tokens_per_minute=100_000)])
    for prompt, expected, times in (("3 " * 30, ("a", 29), 1), ("3 " * 100, ("b", 60), 2)):
        counted.clear()
        body = {"model": "auto", "prompt": prompt, "max_tokens": 5}
        assert taken(service.call("POST", "/v1/completions", body, bearer())) == expected
        assert counted.count(prompt) == times
    account = service.handler.authenticator.account_named(entry()["name"])
    assert account.usage.num_tokens > 130  # what was checked for a case, and runs, is reserved and counted


def test_a_case_that_cannot_hold_the_request_is_passed_over_and_refuses_nothing(tokenizer: Tokenizer) -> None:
    cases = [{"model": "a", "max_prompt_tokens": 1000}, {"model": "b"}]
    service = routed(tokenizer, cases)
    short, long = service.models
    models = [replace(short, model_info=replace(short.model_info, max_model_len=20)), long]
    pipelines = [{"name": "auto", "steps": [{"kind": "route", "cases": cases}]}]
    config = ApplicationConfig.model_validate({"models": [{"name": "a"}, {"name": "b"}], "pipelines": pipelines})
    metrics = RequestMetrics(["a", "b"])
    handler = RequestHandler(models, ApiConfig(), metrics, pipelines=pipelines_of(config, models))
    for num_tokens, taken_by in ((10, "a"), (30, "b")):
        body = {"model": "auto", "prompt": [5] * num_tokens, "max_tokens": 5}
        assert asyncio.run(handler.handle_item("", "/v1/completions", body)).body["model"] == taken_by
    assert not any(metrics.snapshot()["a"].refused.values())


def test_by_header_its_value_counts(tokenizer: Tokenizer) -> None:
    cases = [{"model": "a", "values": ["gold", "silver"]}, {"model": "b"}]
    service = routed(tokenizer, cases, header="x-tier")
    for headers, expected in (({"x-tier": "silver"}, ("a", 0)), ({"x-tier": "tin"}, ("b", 1)), ({}, ("b", 1))):
        body = {"model": "auto", "messages": [{"role": "user", "content": "Hi"}]}
        assert taken(service.call("POST", "/v1/chat/completions", body, headers)) == expected


def test_by_decision_the_description_that_a_model_chooses_counts(tokenizer: Tokenizer) -> None:
    def script(request: Request) -> Iterable[Step]:
        named = request.sampling.logprob_token_ids
        if not named:
            return [last(request, (9,), FinishReason.LENGTH)]
        logprobs = (-3.0, -1.0) if "Sing" in tokenizer.decode(request.prompt_token_ids) else (-1.0, -2.0)
        told = TokenLogprobs(-9.0, 3, named, logprobs)
        return [TokenDelta(request.request_id, (9,), FinishReason.LENGTH, logprobs=(told,))]

    cases = [{"model": "a", "description": "a task for code"}, {"model": "b", "description": "a task for a poet"}]
    service = routed(tokenizer, cases, classifier="a")
    service.generate.script = script
    for text, expected in (("Write a function", ("a", 0)), ("Sing", ("b", 1))):
        body = {"model": "auto", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
        answer = service.call("POST", "/v1/chat/completions", body)
        assert taken(answer) == expected
        assert answer.json["usage"]["pipeline"]["steps"][0]["confidence"] == pytest.approx(math.exp(-1))
    asked = tokenizer.decode(service.generate.requests[0].prompt_token_ids)
    assert "Write a function\n\nQuestion: What is this text?\n\nA. a task for code\nB. a task for a poet\n" in asked
    with pytest.raises(ValidationError, match=r"cases\[1\] has no condition; .*, so the case must have description"):
        routed(tokenizer, [cases[0], {"model": "b"}], classifier="a")


def test_by_classifier_the_nearest_example_counts_and_examples_are_computed_once(tokenizer: Tokenizer) -> None:
    cases = [{"model": "a", "examples": ["code", "code, please"]}, {"model": "b", "examples": ["poem"]}]
    service = routed(tokenizer, cases, classifier="a", keys=[entry(tokens_per_minute=100_000)])
    for text, expected in (("Write a function", ("a", 0)), ("Sing", ("b", 1))):
        body = {"model": "auto", "messages": [{"role": "user", "content": text}]}
        answer = service.call("POST", "/v1/chat/completions", body, bearer())
        assert taken(answer) == expected
        [classified, answered] = answer.json["usage"]["pipeline"]["steps"]
        assert (classified["model"], classified["score"]) == ("a", pytest.approx(math.cos(math.radians(10))))
        assert (answered["kind"], answered["model"]) == ("route", expected[0])
    assert len([each for each in service.generate.requests if each.pooling]) == 2 + 3
    account = service.handler.authenticator.account_named(entry()["name"])
    own = [each for each in service.generate.requests if each.tenant != account.name]
    assert len(own) == 3  # the examples, which no key pays for
    paid = sum(len(each.prompt_token_ids) for each in service.generate.requests if each not in own)
    num_generated = 2 * (1 + len(tokenizer.encode("3 4", add_special_tokens=False)))
    assert account.usage.num_tokens == paid + num_generated


@pytest.mark.usefixtures("collected_as_served")
async def test_many_examples_of_many_numbers_do_not_hold_the_event_loop(tokenizer: Tokenizer) -> None:
    size, num_examples = 4096, 2048

    async def generate(request: Request) -> AsyncIterator[TokenDelta]:
        for step in vector(request, [1.0] * size) if request.pooling else ((), last(request, (5,), FinishReason.STOP)):
            yield delta(request, step)

    cases = [{"model": "a", "examples": [f"{at} {number}" for number in range(64)]} for at in range(num_examples // 64)]
    step = {"kind": "route", "classifier": "a", "cases": cases}
    service = Service(
        tokenizer,
        generate=generate,
        names=("a",),
        pipelines=[{"name": "auto", "steps": [step]}],
        pooling=Pooling.LAST,
        model_info={"embedding_size": size},
    )
    body = {"model": "auto", "prompt": "Hi"}
    for _ in range(2):  # the first time with the examples
        async with Connection(service.app, "POST", "/v1/completions", body, {}) as connection:
            async with stalls_of_loop() as stalls:
                await connection.ended()
            assert connection.answer().status == 200
        assert stalls.longest_s < 0.05 * slowness()


LABELLED = [{"model": "b", "values": ["code", "sql"]}, {"model": "b", "values": ["poem"]}, {"model": "b"}]


def labelled(tokenizer: Tokenizer, cases: list[dict[str, Any]], scores: dict[str, list[float]]) -> Service:
    """`a` is a classifier, `b` answers."""

    def classifying(request: Request) -> Iterable[Step]:
        assert request.pooling is Pooling.SCORE
        text = tokenizer.decode(request.prompt_token_ids)
        return vector(request, next(each for words, each in scores.items() if words in text))

    step = {"kind": "route", "classifier": "a", "cases": cases}
    return Service(
        tokenizer,
        names=("a", "b"),
        scripts={"a": classifying, "b": say(tokenizer, "3 4")},
        pipelines=[{"name": "auto", "steps": [step]}],
        facts_of={"a": {"generates": False, "embedding_size": None, "labels": ("code", "poem", "talk", "sql")}},
    )


def test_by_classifier_the_label_with_the_highest_score_counts(tokenizer: Tokenizer) -> None:
    scores = {
        "function": [0.7, 0.1, 0.1, 0.1], "table": [0.2, 0.1, 0.1, 0.6], "Sing": [0.2, 0.6, 0.1, 0.1],
        "Hello": [0.3, 0.1, 0.5, 0.1],
    }  # fmt: skip
    service = labelled(tokenizer, LABELLED, scores)
    for text, case, label in (("function", 0, "code"), ("table", 0, "sql"), ("Sing", 1, "poem"), ("Hello", 2, "talk")):
        answer = service.call("POST", "/v1/completions", {"model": "auto", "prompt": f"{text}!"})
        assert taken(answer) == ("b", case)
        classified = answer.json["usage"]["pipeline"]["steps"][0]
        assert (classified["label"], classified["score"]) == (label, pytest.approx(max(scores[text])))


def test_labels_that_the_model_has_not_are_refused_and_scores_that_are_none_fail(tokenizer: Tokenizer) -> None:
    with pytest.raises(
        InvalidSetup, match=r"classifier: a has no label 'prose'; its labels are code, poem, talk, sql; name"
    ):
        labelled(tokenizer, [{"model": "b", "values": ["prose"]}, {"model": "b"}], {})
    service = labelled(tokenizer, LABELLED, {"Hi": [math.nan] * 4})
    assert service.call("POST", "/v1/completions", {"model": "auto", "prompt": "Hi"}).status == 500


def test_a_model_with_labels_gives_neither_vectors_nor_scores_of_pairs(tokenizer: Tokenizer) -> None:
    service = labelled(tokenizer, LABELLED, {})
    for path, body in (("embeddings", {"input": "x"}), ("score", {"text_1": "x", "text_2": ["y"]})):
        answer = service.call("POST", f"/v1/{path}", body | {"model": "a"})
        assert (answer.status, answer.error["param"]) == (400, "model")


XS = {"model": "a", "values": ["x"]}
BY_CLASSIFIER: dict[str, Any] = {"header": None, "classifier": "a"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"header": None}, "cases[0] has values; the route chooses by the prompt's length, so the case must have max_"),
        ({"classifier": "a"}, "a route cannot have both a header and a classifier; remove one of the two"),
        ({"cases": [{"model": "a", "values": ["x"]}]}, "at least 2 items"),
        ({"cases": [{"model": "a"}, {"model": "b"}]}, "cases[0] has no condition"),
        ({"cases": [{"model": "a", "values": ["x"]}, {"model": "b", "values": ["y"]}]}, "must have no condition"),
        ({"cases": [{"model": "a", "values": ["x"]}, {"model": "c"}]}, "steps[0].cases[1].model: there is no model or"),
        (BY_CLASSIFIER | {"cases": [XS, XS]}, "cases[1] has values; the route chooses by a classifier, so the case"),
        (BY_CLASSIFIER | {"cases": [{"model": "a"}] * 2}, "cases[0] has no condition; the route chooses by a cl"),
        (BY_CLASSIFIER | {"cases": [{"model": "a", "examples": ["x"]}, {"model": "b"}]}, "the case must have examples"),
        (BY_CLASSIFIER | {"cases": [{"model": "a"}, {"model": "b", "description": "x"}]}, "must have description"),
    ],
)  # fmt: skip
def test_its_settings_are_checked(settings: dict[str, Any], words: str) -> None:
    cases = [{"model": "a", "values": ["x"]}, {"model": "b"}]
    route = {"kind": "route", "header": "x-tier", "cases": cases} | settings
    with pytest.raises(ValidationError) as refused:
        ApplicationConfig.model_validate(
            {"models": [{"name": "a"}, {"name": "b"}], "pipelines": [{"name": "p", "steps": [route]}]}
        )
    assert words in str(refused.value)
