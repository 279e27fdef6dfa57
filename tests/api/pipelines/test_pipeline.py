"""What a pipeline may be made of; one that only generates answers as its model does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import pytest
from pydantic import ValidationError

from app.api import pipelines_of
from app.config import ApplicationConfig
from app.engine.async_engine import AsyncEngine
from app.engine.request import Pooling, Request
from app.errors import InvalidSetup, Overloaded
from app.text import Tokenizer
from deployments.serve.settings import parse
from tests.kit.service import (
    CASCADE,
    WAIT,
    Answer,
    Service,
    Step,
    bearer,
    entry,
    hang_up,
    say,
    say_likely,
    vector,
    without_times,
)
from tests.metrics.test_exposition import value

GENERATE = {"kind": "generate", "model": "a"}
RERANK = {"kind": "rerank", "model": "b"}


def checked(*steps: Any, **more: Any) -> ApplicationConfig:
    pipelines = [{"name": "p", "steps": steps}, *({"name": name, "steps": each} for name, each in more.items())]
    return ApplicationConfig.model_validate({"models": [{"name": "a"}, {"name": "b"}], "pipelines": pipelines})


@pytest.mark.parametrize(
    ("steps", "more", "words"),
    [
        ([], {}, "at least 1 item"),
        ([RERANK], {}, "steps[0]: the last step is of kind rerank, which does not produce an answer; add a step"),
        ([GENERATE, GENERATE], {}, "steps[0]: a step of kind generate produces the answer, so no step may follow it"),
        ([{"kind": "sort"}], {}, "got 'sort'; must be one of rerank, "),
        ([{"model": "a"}], {}, "without a kind"),
        ([GENERATE | {"top_n": 3}], {}, "generate has no parameter 'top_n'; it has model"),
        ([{"kind": "generate", "model": "c"}], {}, "[0].model: there is no model or pipeline 'c'; use one of a, b, p"),
        ([RERANK | {"model": "q"}, GENERATE], {"q": [GENERATE]}, "[0].model: there is no model 'q'; use one of a, b"),
        ([{"kind": "generate", "model": "p"}], {}, "pipelines[0]: the pipeline would call itself: p → p"),
        ([{"kind": "generate", "model": "q"}], {"q": [{"kind": "cascade", "small": "a", "large": "p"}]}, "p → q → p"),
        ([{"kind": "cascade", "small": "a", "large": "a"}], {}, "small and large are both 'a'"),
        ([{"kind": "cascade", "small": "a", "large": "b", "min_mean_logprob": 1}], {}, "less than or equal to 0"),
        ([GENERATE], {"a": [GENERATE]}, "pipelines are named a"),
    ],
)  # fmt: skip
def test_its_settings_are_checked(steps: list[Any], more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        checked(*steps, **more)
    assert words in str(refused.value)


def test_an_unknown_setting_of_a_case_is_named_with_its_place() -> None:
    cases = [{"model": "a", "value": ["x"]}, {"model": "b"}]
    step = {"kind": "route", "header": "x-tier", "cases": cases}
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
    assert service.call("GET", "/v1/models/outer").json["max_model_len"] == 200


def test_pipelines_that_each_name_the_two_before_are_checked_and_listed_at_once(tokenizer: Tokenizer) -> None:
    names = ["a", "b", *(f"p{index}" for index in range(40))]
    route = {"kind": "route", "header": "x-tier"}
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
    with pytest.raises(ValidationError, match=r"pipelines\[0\]: the pipeline would call itself: p → r → s → r"):
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
    route = {"kind": "route", "header": "x-tier", "cases": cases}
    checked(route, **inner)  # one of them
    with pytest.raises(ValidationError, match=r"p would run 66 models"):
        checked(RERANK, RERANK, route, **inner)
    route |= {"header": None, "classifier": "b"}
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
    ("model_info", "pooling", "steps", "words"),
    [
        ({"generates": False}, Pooling.LAST, [GENERATE], "pipelines[0].steps[0].model: a is an encoder"),
        ({}, None, [RERANK, GENERATE], "pipelines[0].steps[0].model: b does not support embeddings or scores"),
    ],
)
def test_a_model_that_cannot_do_what_a_step_asks_is_refused_at_the_start(
    tokenizer: Tokenizer, model_info: dict[str, Any], pooling: Pooling | None, steps: list[Any], words: str
) -> None:
    service = Service(tokenizer, names=("a", "b"), model_info=model_info, pooling=pooling)
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


def classified(*names: str) -> dict[str, Any]:
    """A route to one of these models by the examples of each."""
    cases = [{"model": name, "examples": [name]} for name in names]
    return {"kind": "route", "classifier": "b", "cases": cases}


# Of each kind: the steps, how many requests are asked first, how many of those that answer run at the same time.
KINDS: dict[str, tuple[list[dict[str, Any]], int, int]] = {
    "generate": ([GENERATE], 1, 1),
    "cascade": ([{"kind": "cascade", "small": "a", "large": "b", "min_mean_logprob": -0.5}], 1, 1),
    "ensemble": ([{"kind": "ensemble", "models": ["a", "b"], "choose": "vote"}], 2, 2),
    "rerank": ([RERANK | {"top_n": 1}, GENERATE], 3, 1),
    "route": ([classified("a", "b")], 1, 1),
}
BODY = {"model": "p", "prompt": "Hi", "max_tokens": 8}


class OfKind:
    """A pipeline of one kind over the models `a` and `b`, of which none is sure."""

    def __init__(self, tokenizer: Tokenizer, kind: str, **settings: Any) -> None:
        steps, self.num_first, self.num_answering = KINDS[kind]
        self.says, pipelines = say_likely(tokenizer, "3 4", -0.9), [{"name": "p", "steps": steps}]
        self.service = Service(
            tokenizer, self.answered, names=("a", "b"), pipelines=pipelines, pooling=Pooling.LAST, **settings
        )
        self.body = BODY | ({"documents": ["x", "y"]} if kind == "rerank" else {})

    def answered(self, request: Request) -> Iterable[Step]:
        return vector(request, [1.0, 0.0]) if request.pooling else self.says(request)

    def ask(self) -> Answer:
        return self.service.call("POST", "/v1/completions", self.body, bearer())


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_counts_for_the_key_and_in_the_metrics_of_its_model(tokenizer: Tokenizer, kind: str) -> None:
    """Examples of a route are the service's own."""
    of = OfKind(tokenizer, kind, keys=[entry(tokens_per_minute=100_000)])
    steps = of.ask().json["usage"]["pipeline"]["steps"]
    used = sum(step["prompt_tokens"] + step["completion_tokens"] for step in steps)
    assert of.service.handler.authenticator.account_named("alice").usage.num_tokens == used
    text = of.service.call("GET", "/metrics", headers=bearer()).body
    asked = [each for each in of.service.generate.requests if each.tenant == "alice"]
    ended = sum(
        value(text, "vllm:request_success_total", model_name=model, finished_reason=reason)
        for model in "ab"
        for reason in ("stop", "length")
    )
    assert ended == len(asked)
    for model in "ab":
        tokens = sum(step["completion_tokens"] for step in steps if step["model"] == model)
        assert value(text, "vllm:generation_tokens_total", model_name=model) == tokens


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "generate"])
def test_a_key_must_be_for_all_models_and_so_must_that_of_a_line(tokenizer: Tokenizer, kind: str) -> None:
    of = OfKind(tokenizer, kind, keys=[entry(models=["a"])])
    assert of.ask().status == 403
    listed = of.service.call("GET", "/v1/models", headers=bearer()).json["data"]
    assert [model["id"] for model in listed] == ["a"]
    line = asyncio.run(of.service.handler.handle_item("alice", "/v1/completions", of.body))
    assert line.status_code == 403
    assert not of.service.generate.requests


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_of_a_batch_is_answered_as_the_call_is(tokenizer: Tokenizer, kind: str) -> None:
    of = OfKind(tokenizer, kind)
    online, before = of.ask().json, len(of.service.generate.requests)
    line = asyncio.run(of.service.handler.handle_item("", "/v1/completions", of.body))
    assert (line.status_code, line.body["model"]) == (200, online["model"])
    assert without_times(line.body["usage"]) == without_times(online["usage"])
    assert all(each.is_background for each in of.service.generate.requests[before:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_answering", [False, True])
async def test_a_client_that_goes_ends_the_step_that_runs(tokenizer: Tokenizer, kind: str, is_answering: bool) -> None:
    of = OfKind(tokenizer, kind)

    def waiting(request: Request) -> Iterable[Step]:
        return of.answered(request) if is_answering and request.pooling else [WAIT]

    of.service.generate.script = waiting
    number = of.num_answering if is_answering else of.num_first
    await hang_up(of.service.app, "/v1/completions", of.body, lambda: len(of.service.generate.open) == number)
    assert not of.service.generate.open


@pytest.mark.parametrize("kind", KINDS)
def test_a_refusal_of_the_first_step_is_one_of_the_call(tokenizer: Tokenizer, kind: str) -> None:
    of = OfKind(tokenizer, kind)
    of.service.generate.script = lambda request: [Overloaded("full")]
    assert of.ask().status == 429
    assert len(of.service.generate.requests) <= of.num_first
