"""What a pipeline may be made of; one that only generates answers as its model does."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pydantic import ValidationError

from app.api import pipelines_of
from app.config import ApplicationConfig
from app.engine.async_engine import AsyncEngine
from app.engine.request import Pooling
from app.errors import InvalidSetup
from app.text import Tokenizer
from deployments.serve.settings import parse
from tests.kit.service import CASCADE, Service, bearer, entry, say

GENERATE = {"kind": "generate", "model": "a"}
RERANK = {"kind": "rerank", "model": "b"}


def checked(*steps: Any, **more: Any) -> ApplicationConfig:
    pipelines = [{"name": "p", "steps": steps}, *({"name": name, "steps": each} for name, each in more.items())]
    return ApplicationConfig.model_validate({"models": [{"name": "a"}, {"name": "b"}], "pipelines": pipelines})


@pytest.mark.parametrize(
    ("steps", "more", "words"),
    [
        ([], {}, "at least 1 item"),
        ([RERANK], {}, "steps[0]: rerank is the last step and does not answer; add a step behind it"),
        ([GENERATE, GENERATE], {}, "steps[0]: generate answers, so no step comes behind it"),
        ([{"kind": "sort"}], {}, "got 'sort'; must be one of rerank, "),
        ([{"model": "a"}], {}, "without a kind"),
        ([GENERATE | {"top_n": 3}], {}, "generate has no parameter 'top_n'; it has model"),
        ([{"kind": "generate", "model": "c"}], {}, "[0].model: there is no model or pipeline 'c'; there are a, b, p"),
        ([RERANK | {"model": "q"}, GENERATE], {"q": [GENERATE]}, "[0].model: there is no model 'q'; there are a, b"),
        ([{"kind": "generate", "model": "p"}], {}, "pipelines[0]: it would answer itself: p → p"),
        ([{"kind": "generate", "model": "q"}], {"q": [{"kind": "cascade", "small": "a", "large": "p"}]}, "p → q → p"),
        ([{"kind": "cascade", "small": "a", "large": "a"}], {}, "small and large are both 'a'"),
        ([{"kind": "cascade", "small": "a", "large": "b", "min_mean_logprob": 1}], {}, "less than or equal to 0"),
        ([GENERATE], {"a": [GENERATE]}, "pipelines have the same name: a"),
    ],
)  # fmt: skip
def test_its_settings_are_checked(steps: list[Any], more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        checked(*steps, **more)
    assert words in str(refused.value)


def test_an_unknown_setting_of_a_case_is_named_with_its_place() -> None:
    cases = [{"model": "a", "value": ["x"]}, {"model": "b"}]
    step = {"kind": "route", "by": "header", "header": "x-tier", "cases": cases}
    with pytest.raises(InvalidSetup, match=r"pipelines\[0\]\.steps\[0\]\.cases\[0\]\.value: .* did you mean 'values'"):
        parse({"models": [{"name": "a"}, {"name": "b"}], "pipelines": [{"name": "p", "steps": [step]}]})


def test_cascades_are_written_as_pipelines_now() -> None:
    with pytest.raises(ValidationError, match=r"pipelines: \[\{name: ..., steps: \[\{kind: cascade"):
        ApplicationConfig.model_validate({"cascades": [{"name": "c", "small": "a", "large": "b"}]})


def test_a_pipeline_may_name_another_of_a_later_place(tokenizer: Tokenizer) -> None:
    outer = {"name": "outer", "steps": [{"kind": "generate", "model": "both"}]}
    service = Service(tokenizer, say(tokenizer, "3 4"), names=("small", "large"), pipelines=[outer, CASCADE])
    answer = service.chat(model="outer").json
    told = answer["usage"]["pipeline"]
    assert (told["name"], [step["name"] for step in told["steps"]]) == ("outer", ["both[0]"])
    assert [entry["id"] for entry in service.call("GET", "/v1/models").json["data"]] == [
        "small",
        "large",
        "outer",
        "both",
    ]


def test_pipelines_that_each_name_the_two_before_are_checked_and_listed_at_once(tokenizer: Tokenizer) -> None:
    names = ["a", "b", *(f"p{index}" for index in range(40))]
    route = {"kind": "route", "by": "header", "header": "x-tier"}
    pipelines = [
        {"name": name, "steps": [route | {"cases": [{"model": first, "values": ["gold"]}, {"model": second}]}]}
        for first, second, name in zip(names, names[1:], names[2:], strict=False)
    ]
    began_at = time.process_time()
    service = Service(tokenizer, names=("a", "b"), pipelines=pipelines[::-1], keys=[entry(models=["a", "b"])])
    listed = service.call("GET", "/v1/models", None, bearer()).json["data"]
    assert time.process_time() - began_at < 1
    assert {each["id"] for each in listed} == {*names}
    last = service.pipelines[0]
    assert [sorted(each.name for each in of) for of in (last.models, last.answering_models)] == [["a", "b"]] * 2


def test_a_circle_behind_sound_pipelines_is_found() -> None:
    inner, first = [GENERATE], [{"kind": "cascade", "small": "q", "large": "r"}]
    with pytest.raises(ValidationError, match=r"pipelines\[0\]: it would answer itself: p → r → s → r"):
        checked(
            *first, q=inner, r=[{"kind": "generate", "model": "s"}], s=[{"kind": "cascade", "small": "q", "large": "r"}]
        )


def test_pipelines_in_pipelines_run_a_bounded_number_of_models() -> None:
    def both(first: str, second: str) -> list[Any]:
        return [{"kind": "ensemble", "models": [first, second]}]

    inner = {f"p{depth}": both(f"p{depth - 1}", f"p{depth - 1}") for depth in range(1, 6)}
    inner = {"p0": both("a", "b"), **inner}
    checked(*both("a", "p4"), **inner)  # p5 runs 64
    with pytest.raises(ValidationError, match=r"pipelines\[0\]: a request for p would run 65 models.*at most 64"):
        checked(*both("a", "p5"), **inner)
    with pytest.raises(ValidationError, match=r"p would run 65 models"):
        checked(RERANK, {"kind": "generate", "model": "p5"}, **inner)
    cases = [{"model": "p5", "values": ["x"]}, {"model": "p4"}]
    route = {"kind": "route", "by": "header", "header": "x-tier", "cases": cases}
    checked(route, **inner)  # one of them
    with pytest.raises(ValidationError, match=r"p would run 66 models"):
        checked(RERANK, RERANK, route, **inner)
    route |= {"by": "classifier", "header": None, "classifier": "b"}
    cases[:] = [{"model": name, "examples": ["x"]} for name in ("p5", "a")]
    with pytest.raises(ValidationError, match=r"p would run 65 models"):
        checked(route, **inner)


def test_a_step_may_name_an_alias(tokenizer: Tokenizer) -> None:
    service = Service(
        tokenizer,
        say(tokenizer, "3 4"),
        aliases=("default",),
        models=[{"name": "demo", "aliases": ["default"]}],
        pipelines=[{"name": "p", "steps": [{"kind": "generate", "model": "default"}]}],
    )
    answer = service.chat(model="p").json
    assert (answer["model"], answer["usage"]["pipeline"]["steps"][0]["model"]) == ("demo", "demo")


@pytest.mark.parametrize(
    ("facts", "pooling", "steps", "words"),
    [
        ({"generates": False}, Pooling.LAST, [GENERATE], "pipelines[0].steps[0].model: a is an encoder"),
        ({}, None, [RERANK, GENERATE], "pipelines[0].steps[0].model: b gives neither embeddings nor scores"),
    ],
)
def test_a_model_that_cannot_do_what_a_step_asks_is_refused_at_the_start(
    tokenizer: Tokenizer, facts: dict[str, Any], pooling: Pooling | None, steps: list[Any], words: str
) -> None:
    service = Service(tokenizer, names=("a", "b"), facts=facts, pooling=pooling)
    with pytest.raises(InvalidSetup) as refused:
        pipelines_of(checked(*steps), service.models)
    assert words in str(refused.value)


def test_a_pipeline_that_only_generates_answers_as_its_model_does(engine: AsyncEngine, tokenizer: Tokenizer) -> None:
    alone = [{"name": "alone", "steps": [{"kind": "generate", "model": "demo"}]}]
    service = Service(tokenizer, generate=engine.generate, pipelines=alone)
    fields = {"temperature": 0.9, "seed": 5, "n": 2, "max_tokens": 12, "logprobs": 1}
    answers = [service.complete(model=name, **fields).json for name in ("demo", "alone")]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"].items() < answers[1]["usage"].items()
    assert answers[1]["model"] == "demo"
