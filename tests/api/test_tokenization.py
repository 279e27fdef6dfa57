"""/tokenize, /detokenize, /tokenizer_info and /version, as vLLM's clients use them."""

from __future__ import annotations

from typing import Any

import pytest

from app.text import Tokenizer
from app.text.reasoning import MARKS
from app.text.tool_calls import FORMATS
from tests.kit.service import MAX_MODEL_LEN, Service, say
from tests.text.tool_calls.templates import TEMPLATES, tokenizer_with

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
LONG: dict[str, Any] = {"max_model_len": 5000}  # the tools take many tokens of bytes


def test_a_text_becomes_its_token_ids_and_comes_back(service: Service) -> None:
    answer = service.call("POST", "/tokenize", {"prompt": "Count from 3 to 9.", "return_token_strs": True}).json
    tokens = list(service.tokenizer.encode("Count from 3 to 9.", add_special_tokens=True))
    assert answer["tokens"] == tokens
    assert answer["count"] == len(tokens) == len(answer["token_strs"])
    assert answer["max_model_len"] == MAX_MODEL_LEN
    assert service.call("POST", "/detokenize", {"tokens": tokens}).json == {"prompt": "Count from 3 to 9."}


def test_token_strings_come_only_when_asked_for(service: Service) -> None:
    assert service.call("POST", "/tokenize", {"prompt": "3"}).json["token_strs"] is None


def test_a_conversation_is_tokenized_as_a_chat_would_be(service: Service) -> None:
    messages = [{"role": "user", "content": "Count from 3 to 9."}]
    answer = service.call("POST", "/tokenize", {"messages": messages, "prompt": None}).json
    assert service.chat(messages=messages).status == 200
    assert tuple(answer["tokens"]) == service.request.prompt_token_ids


def test_a_chat_that_would_be_refused_for_its_limits_is_not_tokenized(service: Service) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "stop": ["a"] * 33}
    refusals = [service.call("POST", path, body | {"model": "demo"}) for path in ("/tokenize", "/v1/chat/completions")]
    assert [(each.status, each.error["param"]) for each in refusals] == [(400, "stop")] * 2
    assert refusals[0].error["message"] == refusals[1].error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"documents": ["Max is a dog."]},
        {"continue_final_message": True},
        {"add_generation_prompt": False},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": "required"},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"truncate_prompt_tokens": 7},
        {"truncate_prompt_tokens": -1, "max_tokens": 150},
    ],
)
def test_the_tokens_of_a_chat_are_those_that_the_same_body_is_answered_for(fields: dict[str, Any]) -> None:
    tokenizer = tokenizer_with(TEMPLATES["hermes"] + "{{ enable_thinking }}")
    service = Service(tokenizer, say(tokenizer, "3"), tool_format=FORMATS["hermes"], reasoning_marks=MARKS[0], **LONG)
    messages = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "It is,"}]
    answer = service.call("POST", "/tokenize", {"messages": messages, **fields})
    assert answer.status == 200, answer.body
    assert service.chat(messages=messages, **fields).status == 200
    assert tuple(answer.json["tokens"]) == service.request.prompt_token_ids
    assert answer.json["count"] == len(service.request.prompt_token_ids)


@pytest.mark.parametrize("fields", [{"documents": ["Max is a dog."]}, {"truncate_prompt_tokens": 7}])
def test_the_tokens_of_a_message_are_counted_as_its_answer_counts_them(
    service: Service, fields: dict[str, Any]
) -> None:
    body = {"messages": [{"role": "user", "content": "Is it a dog or is it a cat?"}], **fields}
    counted = service.call("POST", "/v1/messages/count_tokens", body).json["input_tokens"]
    assert service.call("POST", "/v1/messages", body | {"max_tokens": 1}).status == 200
    assert counted == len(service.request.prompt_token_ids)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "3"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "3"}]}),
        ("/detokenize", {"tokens": [9]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "3"}]}),
    ],
)
def test_fields_without_effect_are_named(service: Service, path: str, body: dict[str, Any]) -> None:
    answer = service.call("POST", path, body | {"foo": 1, "bar": None})
    assert (answer.status, answer.headers["x-carousel-ignored"]) == (200, "foo")
    assert "x-carousel-ignored" not in service.call("POST", path, body).headers
    assert service.call("POST", path, body | {"foo": 1}, {"x-strict": "true"}).status == 400


def test_long_texts_and_lists_come_out_the_same(service: Service) -> None:
    text = "Count from 3 to 9. " * 500
    answer = service.call("POST", "/tokenize", {"prompt": text, "add_special_tokens": False}).json
    assert service.call("POST", "/detokenize", {"tokens": answer["tokens"]}).json["prompt"] == text


def test_the_tokenizer_tells_its_special_tokens_and_template(service: Service) -> None:
    answer = service.call("GET", "/tokenizer_info").json
    assert service.tokenizer.encode(answer["eos_token"], add_special_tokens=False) == (4,)
    assert "message" in answer["chat_template"]


def test_the_tokenizer_of_several_must_be_named(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, say(tokenizer, "3"), names=("small", "large"))
    assert service.call("GET", "/tokenizer_info").error["param"] == "model"
    assert service.call("GET", "/tokenizer_info", query="model=large").status == 200


def test_the_version_is_that_of_the_package(service: Service) -> None:
    assert service.call("GET", "/version").json.keys() == {"version"}


def test_a_model_is_served_under_its_aliases_too(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, say(tokenizer, "3"), aliases=("gpt-4o", "default"))
    listed = service.call("GET", "/v1/models").json["data"]
    assert [(entry["id"], entry["root"]) for entry in listed] == [
        ("demo", "demo"), ("gpt-4o", "demo"), ("default", "demo"),
    ]  # fmt: skip
    assert service.complete(model="gpt-4o").json["model"] == "demo"
    assert service.complete().status == 200, "one model under three names is still the only one"
    assert service.call("GET", "/v1/models/gpt-4o").json["id"] == "gpt-4o"
