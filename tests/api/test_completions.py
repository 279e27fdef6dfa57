"""Whole responses: what clients get back, and what the engine was asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.engine.request import FILTERS, FinishReason
from app.text import Tokenizer
from tests.kit.service import MAX_MODEL_LEN, Service, last, say

USER = {"role": "user", "content": "Hi"}


def test_a_chat_gets_one_message_with_usage(service: Service) -> None:
    answer = service.chat(model="demo", max_tokens=10)
    assert answer.status == 200
    body = answer.json
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    prompt = service.tokenizer.encode_chat([USER])
    assert service.request.prompt_token_ids == prompt
    assert body == {
        "object": "chat.completion",
        "model": "demo",
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "3 4 5.", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": 5,  # the end token counts
            "total_tokens": len(prompt) + 5,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_a_completion_gets_its_text(service: Service) -> None:
    body = service.complete(model="demo").json
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "3 4 5.", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert service.request.prompt_token_ids == service.tokenizer.encode("Hi", add_special_tokens=True)


def test_max_tokens_is_16_for_completions_and_the_rest_of_the_context_for_chats(service: Service) -> None:
    service.complete()
    assert service.generate.requests[-1].sampling.max_tokens == 16
    service.complete(prompt=[7] * (MAX_MODEL_LEN - 3))
    assert service.generate.requests[-1].sampling.max_tokens == 3, "the default never exceeds the room"
    service.chat()
    request = service.generate.requests[-1]
    assert request.sampling.max_tokens + len(request.prompt_token_ids) == MAX_MODEL_LEN
    service.chat(max_tokens=5, max_completion_tokens=7)
    assert service.generate.requests[-1].sampling.max_tokens == 7


def test_sampling_fields_reach_the_engine(service: Service) -> None:
    fields = {
        "temperature": 0.5,
        **FILTERS,
        "seed": 7,
        "presence_penalty": -1,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.1,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": [11, 12],
        "ignore_eos": True,
    }
    assert service.chat(**fields, logit_bias={"3": 200, "4": -1.5}, cache_salt="mine").status == 200
    sampling = service.request.sampling
    for name, value in fields.items():
        expected = tuple(value) if isinstance(value, list) else value
        assert getattr(sampling, name) == expected, name
    assert sampling.logit_bias == ((3, 100.0), (4, -1.5))
    assert service.request.cache_salt == "mine"


@pytest.mark.parametrize("value", [-1, 0])
@pytest.mark.parametrize("name", ["top_k", "top_n_sigma"])
def test_minus_one_and_zero_keep_all_tokens(service: Service, name: str, value: float) -> None:
    assert service.chat(**{name: value}).status == 200
    assert getattr(service.request.sampling, name) == 0


def test_null_is_not_given(service: Service) -> None:
    names = (
        "model temperature top_p top_k n stop seed max_tokens max_completion_tokens stream stream_options logit_bias "
        "logprobs top_logprobs tools tool_choice response_format user presence_penalty min_tokens stop_token_ids "
        "cache_salt request_id priority deadline_s chat_template_kwargs add_generation_prompt skip_special_tokens"
    ).split()
    assert service.chat(**dict.fromkeys(names)).json["model"] == "demo", "the only one needs no name"


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "auto", "functions": []},
        {"response_format": {"type": "text"}, "modalities": ["text"], "continue_final_message": False},
        {"metadata": {"a": "b"}, "service_tier": "auto", "store": True, "parallel_tool_calls": True},
        {"stop": [], "logit_bias": {}, "best_of": 1, "return_token_ids": False},
        {"include_stop_str_in_output": False, "repetition_penalty": 1.0, "a_field_of_tomorrow": [1]},
    ],
)
def test_values_that_ask_for_nothing_are_accepted(service: Service, fields: dict[str, Any]) -> None:
    assert service.chat(**fields).status == 200


def test_a_request_may_name_its_user_its_priority_and_its_deadline(service: Service) -> None:
    service.chat()
    plain = service.generate.requests[-1]
    assert (plain.tenant, plain.priority, plain.deadline_s) == ("", 0, None)
    service.complete(user="me", priority=-7, deadline_s=2.5)
    request = service.generate.requests[-1]
    assert (request.tenant, request.priority, request.deadline_s) == ("me", -7, 2.5)


def test_a_request_that_names_no_deadline_has_the_models(service: Service) -> None:
    [model] = service.models
    service.handler.names.models["demo"] = replace(model, deadline_s=30.0)
    for fields in ({}, {"deadline_s": 2}, {"service_tier": "flex"}, {"service_tier": "flex", "deadline_s": 3}):
        service.complete(model="demo", **fields)
    assert [request.deadline_s for request in service.generate.requests] == [30.0, 2, None, 3]


def test_the_deadline_may_come_in_a_header(service: Service) -> None:
    def deadline_s(**body: Any) -> float | None:
        header = {"x-carousel-deadline-s": "3.5"}
        assert service.call("POST", "/v1/completions", {"prompt": "Hi"} | body, header).status == 200
        return service.generate.requests[-1].deadline_s

    assert deadline_s() == 3.5
    assert deadline_s(deadline_s=None) == 3.5
    assert deadline_s(deadline_s=1.5) == 1.5


def test_text_parts_and_all_roles_reach_the_template(service: Service) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": parts, "name": "me"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]
    assert service.chat(messages=messages).status == 200
    plain = [dict(message, content=text) for message, text in zip(messages, "s d a\nb _ t".split(" "), strict=True)]
    plain[3]["content"] = ""
    assert service.request.prompt_token_ids == service.tokenizer.encode_chat(plain)


def test_the_generation_prompt_can_be_left_out(service: Service) -> None:
    service.chat(add_generation_prompt=False)
    assert service.request.prompt_token_ids == service.tokenizer.encode_chat([USER], add_generation_prompt=False)


# ---- several choices


def echo(request: Any) -> Any:
    """Says the last prompt token and the sample's seed parity, so that choices can be told apart."""
    yield (request.prompt_token_ids[-1],)
    yield last(request, (), FinishReason.LENGTH)


def test_samples_have_seeds_of_their_own_and_the_first_has_the_given_one(service: Service) -> None:
    body = service.chat(n=3, seed=5).json
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    seeds = [request.sampling.seed for request in service.generate.requests]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    service.chat(n=3, seed=5)
    assert [request.sampling.seed for request in service.generate.requests[3:]] == seeds, "the same every time"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_has_up_to_128_choices(service: Service, stream: bool) -> None:
    answer = service.chat(n=128, stream=stream, max_tokens=3)
    assert answer.status == 200, answer.body
    said = answer.chunks if stream else [answer.json]
    assert {choice["index"] for chunk in said for choice in chunk["choices"]} == set(range(128))


@pytest.mark.parametrize(("param", "n"), [("n", 63), ("best_of", 63)])
def test_choices_have_no_more_prompt_tokens_than_several_prompts(tokenizer: Tokenizer, param: str, n: int) -> None:
    service = Service(tokenizer, say(tokenizer, "3"), max_model_len=20_000)
    answer = service.complete(prompt=[7] * 16_000, max_tokens=1, **{param: n})
    assert (answer.status, answer.error["param"]) == (400, param)
    words = (
        "63 choices with 16,000 prompt tokens each have 1,008,000 tokens; at most 1,000,000 are accepted in one call"
    )
    assert words in answer.error["message"]
    assert service.complete(prompt=[7] * 16_000, max_tokens=1, **{param: n - 1}).status == 200


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 0])
def test_any_int64_is_a_seed(service: Service, seed: int) -> None:
    assert service.chat(seed=seed).status == 200
    assert 0 <= service.request.sampling.seed < 2**63


def test_without_a_seed_every_prompt_gets_another(service: Service) -> None:
    service.complete(prompt=["Hi", "Hi"], n=2)
    assert len({request.sampling.seed for request in service.generate.requests}) == 4


def test_prompt_lists_are_answered_prompt_by_prompt(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, echo)
    ids = [tokenizer.encode(text, add_special_tokens=False)[0] for text in "abc"]
    body = service.complete(prompt=[[5, ids[0]], [6, ids[1]], [ids[2]]], n=2).json
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == list(enumerate("aabbcc"))
    assert body["usage"]["prompt_tokens"] == 5, "each prompt counts once"
    assert body["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("Hi", ["Hi"]), (["Hi", "3"], ["Hi", "3"]), ([77, 78], [[77, 78]]), ([[77], [78]], [[77], [78]])],
)
def test_the_four_forms_of_prompt(service: Service, prompt: Any, expected: list[Any]) -> None:
    assert service.complete(prompt=prompt).status == 200
    for request, form in zip(service.generate.requests, expected, strict=True):
        ids = service.tokenizer.encode(form, add_special_tokens=True) if isinstance(form, str) else tuple(form)
        assert request.prompt_token_ids == ids


# ---- stop strings


def test_a_stop_string_ends_the_text_and_closes_the_stream(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, say(tokenizer, "3 4 5 6 7"))
    body = service.chat(stop=["9", "5 6"]).json
    [choice] = body["choices"]
    assert choice["message"]["content"] == "3 4 "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "5 6")
    assert body["usage"]["completion_tokens"] == 4
    assert not service.generate.open


def test_a_stop_string_may_be_a_special_token(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, lambda request: [(20,), (2,), last(request, (21,), FinishReason.LENGTH)])
    body = service.complete(stop=[str(number) for number in range(5, 9)] + ["<|user|>"]).json
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("0", "stop", "<|user|>")
    assert body["usage"]["completion_tokens"] == 2
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        assert service.complete(stop="<|user|>", **{name: True}).json["choices"][0]["text"] == "0<|user|>"


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_that_is_too_long_is_cut_at_the_side_that_is_named(service: Service, side: str) -> None:
    fields = {"truncate_prompt_tokens": 3, "truncation_side": side}
    kept = {"left": (8, 9, 10), "right": (5, 6, 7)}[side]
    assert service.complete(prompt=[5, 6, 7, 8, 9, 10], **fields).status == 200
    assert service.request.prompt_token_ids == kept


def test_a_stop_token_id_is_named_but_the_end_token_is_not(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, lambda request: [last(request, (30, 31), FinishReason.STOP, stop_token_id=31)])
    [choice] = service.complete(stop_token_ids=[31]).json["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        ";"[:0] + tokenizer.decode([30]),
        "stop",
        31,
    )
    service = Service(tokenizer, say(tokenizer, "3"))
    assert service.complete().json["choices"][0]["stop_reason"] is None


def test_special_tokens_show_on_request(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, lambda request: [(2,), last(request, (20,), FinishReason.LENGTH)])
    assert service.complete().json["choices"][0]["text"] == "0"
    assert service.complete(skip_special_tokens=False).json["choices"][0]["text"] == "<|user|>0"


@pytest.mark.parametrize(
    ("tier", "is_background"), [("flex", True), ("auto", False), ("default", False), (None, False)]
)
def test_the_flex_tier_is_background_work(service: Service, tier: str | None, is_background: bool) -> None:
    service.complete(service_tier=tier)
    assert service.request.is_background == is_background


def test_whole_numbers_may_be_written_with_a_point(service: Service) -> None:
    answer = service.complete(prompt=[5.0, 6], n=1.0, max_tokens=3.0, seed=7.0, stop_token_ids=[9.0])
    assert answer.status == 200
    request = service.request
    assert request.prompt_token_ids == (5, 6)
    assert (request.sampling.max_tokens, request.sampling.seed, request.sampling.stop_token_ids) == (3, 7, (9,))
    assert service.complete(n=1.5).error["param"] == "n"
