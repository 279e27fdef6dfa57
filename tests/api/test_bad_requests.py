"""What bad input gets: a 4xx naming the parameter, with nothing generated."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from app.api.http import body as http_body
from app.api.schemas.fields import MAX_DETOKENIZED
from app.api.schemas.requests import ChatRequest, CompletionRequest, DetokenizeRequest
from app.api.schemas.responses import LOGPROBS, ResponsesRequest
from app.engine.request import Pooling, SamplingParams
from app.text import Tokenizer
from tests.kit.service import MAX_MODEL_LEN, Answer, Connection, Service, check_error, say

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
RESPONSES_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
NAMESPACE = {"type": "namespace", "name": "n", "description": "Does it.", "tools": [RESPONSES_TOOL]}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [USER]}),
    "completions": ("/v1/completions", {"prompt": "Hi"}),
    "responses": ("/v1/responses", {"input": "Hi"}),
    "embeddings": ("/v1/embeddings", {"input": [7]}),
    "rerank": ("/v1/rerank", {"query": "Hi", "documents": ["Hi", {"text": "Ho"}]}),
    "tokenize": ("/tokenize", {"prompt": "Hi"}),
    "detokenize": ("/detokenize", {"tokens": [7]}),
}
# Fields that are wrong at each endpoint, the parameter that the error names, and some of its words.
WRONG: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "chat": [
        ({"temperature": 2.5}, "temperature", "temperature should be less than or equal to 2; got 2.5"),
        ({"temperature": -0.1}, "temperature", "got -0.1"),
        ({"temperature": "hot"}, "temperature", "temperature should be a valid number; got 'hot'"),
        ({"temperature": True}, "temperature", "valid number"),
        ({"top_p": -0.1}, "top_p", "greater than or equal to 0"),
        ({"top_p": 1.1}, "top_p", "less than or equal to 1"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"top_k": 1.5}, "top_k", "valid integer"),
        ({"min_p": 2}, "min_p", "got 2"),
        ({"top_n_sigma": -2}, "top_n_sigma", "greater than or equal to -1; got -2"),
        ({"top_n_sigma": 1001}, "top_n_sigma", "less than or equal to 1000; got 1001"),
        ({"top_n_sigma": "1"}, "top_n_sigma", "valid number; got '1'"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": -1}, "n", "got -1"),
        ({"n": 129}, "n", "n is 129; this server accepts at most 128"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_completion_tokens": -5}, "max_completion_tokens", "got -5"),
        ({"max_tokens": "5"}, "max_tokens", "valid integer; got '5'"),
        ({"max_tokens": 10**30}, "max_tokens", "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "min_tokens is 9 and max_tokens is 8"),
        ({"seed": 2**63}, "seed", "seed"),
        ({"seed": 1.5}, "seed", "valid integer"),
        ({"presence_penalty": 3}, "presence_penalty", "got 3"),
        ({"frequency_penalty": -3}, "frequency_penalty", "got -3"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"repetition_penalty": 1e-45}, "repetition_penalty", "greater than or equal to 0.01; got 1e-45"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "has the key 'a', which is not a token id"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "not a token id"),
        ({"logit_bias": {"1": "x"}}, "logit_bias", "has a bias for token 1 that is not a number"),
        ({"logit_bias": {"763": 1}}, "logit_bias", "token id 763; this model's token ids are 0 to 762"),
        ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias", "has 1,025 entries; at most 1,024"),
        ({"logit_bias": [1]}, "logit_bias", "should be an object"),
        (
            {"stop": [str(n) for n in range(10_000)]},
            "stop",
            "`stop` contains 10,000 strings; this server accepts at most 32",
        ),
        ({"stop": "x" * 257}, "stop", "a string of 257 characters; this server accepts at most 256"),
        ({"stop": ""}, "stop", "empty string"),
        ({"stop": 5}, "stop", "a string or a list of strings"),
        ({"stop_token_ids": [763]}, "stop_token_ids", "token id 763"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "token id -1"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "valid integer"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids", "at most 128"),
        ({"ignore_eos": "yes"}, "ignore_eos", "valid boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream_options requires `stream: true`"),
        ({"best_of": 2, "n": 3}, "best_of", "best_of is 2, which is less than `n`, 3"),
        ({"best_of": 129}, "best_of", "best_of is 129; this server accepts at most 128"),
        ({"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        ({"top_logprobs": 3}, "top_logprobs", "top_logprobs requires `logprobs: true`"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "this server accepts at most 20"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "greater than or equal to 0"),
        ({"logprobs": 3}, "logprobs", "valid boolean"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "this server accepts at most 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "leaves no prompt"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than or equal to -1"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "both true"),
        ({"cache_salt": "x" * 257}, "cache_salt", "at most 256 characters"),
        ({"user": "x" * 257}, "user", "at most 256 characters"),
        ({"user": 5}, "user", "valid string"),
        ({"priority": 101}, "priority", "less than or equal to 100; got 101"),
        ({"priority": -101}, "priority", "greater than or equal to -100"),
        ({"priority": "high"}, "priority", "valid integer"),
        ({"deadline_s": 0}, "deadline_s", "greater than 0; got 0"),
        ({"deadline_s": 1e6}, "deadline_s", "less than or equal to 86400"),
        ({"deadline_s": "soon"}, "deadline_s", "valid number"),
        ({"request_id": "a\nb"}, "request_id", "request_id"),
        ({"model": 5}, "model", "valid string"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": None}, "messages", "messages is required"),
        ({"messages": "Hi"}, "messages", "valid list"),
        ({"messages": ["Hi"]}, "messages[0]", "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role", "'system', 'developer', 'user'"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role", "is required"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content", "is required in a message of role 'user'"),
        ({"messages": [USER | {"content": 5}]}, "messages[0].content", "a string or a list of text parts"),
        ({"messages": [USER | {"content": [{"type": "image_url"}]}]}, "messages[0].content", "has an image in"),
        (
            {"messages": [USER, USER | {"content": [{"type": "text", "text": "Hi"}, {"type": "input_audio"}]}]},
            "messages[1].content",
            "has audio in the part with index 1, of type 'input_audio'; this service supports only text",
        ),
        ({"messages": [USER | {"content": [{"type": "video_url"}]}]}, "messages[0].content", "has a video in"),
        ({"messages": [USER | {"content": [{"type": "file"}]}]}, "messages[0].content", "has a file in"),
        ({"messages": [USER | {"content": [{"type": "smell"}]}]}, "messages[0].content", "parts are not supported"),
        ({"messages": [USER | {"tool_calls": [{}]}]}, "messages[0].tool_calls[0].id", "is required"),
        ({"messages": [USER | {"function_call": {"name": "f"}}]}, "messages[0].function_call", "send tool_calls"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is required"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].custom", "is required"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "match pattern"),
        ({"tools": [TOOL] * 129}, "tools", "at most 128"),
        ({"tools": [TOOL]}, "tools", "format of this model's tool calls is unknown"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice requires `tools`"),
        ({"tool_choice": "sometimes"}, "tool_choice", "should be none, auto, required or an object"),
        ({"tool_choice": 5}, "tool_choice", "should be none, auto, required or an object"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "type: f"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "may not contain tokenize"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs", "chat_template_kwargs should be an object; got 3"),
        ({"functions": [{}]}, "functions", "`functions` is not supported by this version; send `tools`"),
        ({"modalities": ["audio"]}, "modalities", "not supported"),
        ({"audio": {"voice": "x"}}, "audio", "not supported"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "not supported"),
    ],
    "completions": [
        ({"prompt": ""}, "prompt", "`prompt` has no tokens"),
        ({"prompt": []}, "prompt", "should be a string"),
        ({"prompt": [[]]}, "prompt", "`prompt` has no tokens"),
        ({"prompt": ["Hi", ""]}, "prompt", "`prompt` has no tokens"),
        ({"prompt": None}, "prompt", "prompt is required"),
        ({"prompt": [1, "a"]}, "prompt", "should contain only"),
        ({"prompt": [True]}, "prompt", "should contain only"),
        ({"prompt": [[1.5]]}, "prompt", "should contain only"),
        ({"prompt": {"a": 1}}, "prompt", "should be a string"),
        ({"prompt": [763]}, "prompt", "token id 763; this model's token ids are 0 to 762"),
        ({"prompt": [[5], [-1]]}, "prompt", "token id -1"),
        ({"prompt": ["a"] * 129}, "prompt", "`prompt` contains 129 prompts; this server accepts at most 128"),
        (
            {"prompt": ["Hi"] * 20, "n": 16},
            "n",
            "20 prompts with `n` set to 16 request 320 choices; this server accepts at most 128",
        ),
        ({"prompt": ["Hi"] * 20, "best_of": 16}, "best_of", "20 prompts with `best_of` set to 16 request 320 choices"),
        ({"logprobs": 21}, "logprobs", "logprobs is 21; this server accepts at most 20"),
        ({"logprobs": True}, "logprobs", "valid integer"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0, which generates nothing"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "greater than or equal to 0"),
        ({"prompt": [7] * 201, "max_tokens": 0, "echo": True}, "prompt", "prompt has 201 tokens"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"prompt_embeds": ["x"]}, "prompt_embeds", "not supported"),
    ],
    "responses": [
        ({"store": True}, "store", "send the whole conversation as input"),
        (
            {"previous_response_id": "resp_1"},
            "previous_response_id",
            "requires a service that stores files and batches",
        ),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"background": True}, "background", "requires `store: true`"),
        ({"n": 2}, "n", "not supported"),
        ({"max_tokens": 5}, "max_tokens", "not supported"),
        ({"truncation": "middle"}, "truncation", "should be 'auto' or 'disabled'"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "send the item itself"),
        ({"input": [{"type": "compaction"}]}, "input", "an item at index 0"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "should be 'low', 'medium' or 'high'; got 'loud'"),
        ({"max_tool_calls": 0}, "max_tool_calls", "greater than or equal to 1"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "'system'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content", "has an image in"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content", "has a file in"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "is required"),
        ({"max_output_tokens": 10_000}, "max_output_tokens", "max_output_tokens is 10,000"),
        ({"input": "3 " * 1000}, "input", "this model accepts"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "got 'yaml'"),
        ({"tools": [{"type": "functoin", "name": "f"}]}, "tools[0].type", "'function'"),
        (
            {"tools": [RESPONSES_TOOL], "tool_choice": {"type": "function", "name": "g"}},
            "tool_choice",
            "of that type: f",
        ),
        ({"tools": [RESPONSES_TOOL]}, "tools", "format of this model's tool calls is unknown"),
        ({"tools": [NAMESPACE, NAMESPACE]}, "tools", "the full name 'n.f' of a tool in a namespace is already in use"),
        ({"tools": [NAMESPACE | {"name": "n" * 127}]}, "tools", "exceeds 128 characters"),
        ({"tools": [NAMESPACE | {"tools": [RESPONSES_TOOL] * 65}] * 2}, "tools", "130 tools"),
        ({"top_logprobs": 3}, "top_logprobs", "send both"),
        ({"include": [LOGPROBS], "top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({"include": [LOGPROBS], "top_logprobs": -1}, "top_logprobs", "greater than or equal to 0"),
        ({"include": [5]}, "include[0]", "should be a valid string"),
        ({"include": "all"}, "include", "valid list"),
    ],
    "embeddings": [
        ({"input": ""}, "input", "without tokens"),
        ({"input": []}, "input", "input"),
        ({"input": None}, "input", "is required"),
        ({"input": [[763]]}, "input", "token id 763"),
        ({"input": [[5]] * 2049}, "input", "2,049 texts; this server accepts at most 2,048"),
        ({"input": [5] * 201}, "input", "a text of 201 tokens, but this model accepts at most 200"),
        ({"dimensions": 5}, "dimensions", "`dimensions` is 5, but this model's embeddings have only 4"),
        ({"dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"encoding_format": "hex"}, "encoding_format", "got 'hex'"),
    ],
    "rerank": [
        ({"query": None}, "query", "is required"),
        ({"query": ""}, "query", "at least 1 character"),
        ({"documents": []}, "documents", "at least one"),
        ({"documents": "Hi"}, "documents", "a list of strings"),
        ({"documents": [3]}, "documents", "only strings or objects"),
        ({"documents": [{"title": "Hi"}]}, "documents", "only strings or objects"),
        ({"documents": ["Hi"] * 2049}, "documents", "2,049 texts; this server accepts at most 2,048"),
        ({"documents": [{}] * 10_001}, "documents", "10,001 texts; at most 10,000"),
        ({"rank_fields": ["title"]}, "rank_fields", "not supported"),
    ],
    "tokenize": [
        ({"prompt": None}, "prompt", "is required"),
        ({"prompt": 3}, "prompt", "valid string"),
        ({"messages": []}, "messages", "at least 1 item"),
    ],
    "detokenize": [
        ({"tokens": None}, "tokens", "is required"),
        ({"tokens": [10**6]}, "tokens", "token id 1000000"),
        ({"tokens": [-1]}, "tokens[0]", "greater than or equal to 0"),
        ({"tokens": [True]}, "tokens[0]", "valid integer"),
        ({"tokens": "3"}, "tokens", "valid list"),
        ({"tokens": [-1] * (MAX_DETOKENIZED + 1)}, "tokens", "at most 1,000,000 are accepted"),
    ],
}


@pytest.mark.parametrize(
    ("endpoint", "fields", "param", "words"),
    [(endpoint, *row) for endpoint, rows in WRONG.items() for row in rows],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_field_is_a_400_that_names_it_and_nothing_begins(
    tokenizer: Tokenizer, endpoint: str, fields: dict[str, Any], param: str, words: str
) -> None:
    service, (path, body) = Service(tokenizer, say(tokenizer, "3"), pooling=Pooling.MEAN), BODIES[endpoint]
    answer = service.call("POST", path, body | fields)
    assert (answer.status, answer.error["type"], answer.error["param"]) == (400, "invalid_request_error", param)
    assert words in answer.error["message"]
    assert not service.generate.requests


def test_prompt_and_max_tokens_over_the_context_are_a_400_with_the_numbers(service: Service) -> None:
    answer = service.complete(prompt=[7] * 100, max_tokens=101)
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"
    assert answer.error["param"] == "max_tokens"
    assert "prompt has 100 tokens and max_tokens is 101; this model accepts 200" in answer.error["message"]
    assert service.complete(prompt=[7] * 100, max_tokens=100).status == 200


def test_a_prompt_that_fills_the_context_leaves_no_room(service: Service) -> None:
    error = service.complete(prompt=[7] * MAX_MODEL_LEN).error
    assert error["code"] == "context_length_exceeded"
    assert "prompt has 200 tokens; this model accepts 200" in error["message"]
    error = service.chat(messages=[{"role": "user", "content": "!" * 500}], max_completion_tokens=5).error
    assert error["param"] == "messages"


def test_one_bad_prompt_of_several_stops_all(service: Service) -> None:
    assert service.complete(prompt=["Hi", [5]]).status == 200
    service.generate.requests.clear()
    assert service.complete(prompt=[[5], [7] * 300]).status == 400
    assert not service.generate.requests


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"hi"',
        b"null",
        b"\xff\xfe",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "logit_bias": {"1": 1e999}, "top_p": -1e999}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"prompt": ' * 50_000,
        b'{"n": ' + b"9" * 5000 + b"}",
        b"prompt=a&model=demo",
    ],
)
def test_what_is_not_a_json_object_is_a_400(service: Service, body: bytes) -> None:
    answer = service.call("POST", "/v1/completions", body)
    assert answer.status == 400
    check_error(answer.error)
    assert not service.generate.requests


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 400])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", '"input": "Hi", "metadata": {"a": %s}'),
        (
            "/v1/responses",
            '"input": "Hi", "tool_choice": "none", "tools": [{"type": "function", "name": "f", "a": %s}]',
        ),
        ("/v1/chat/completions", '"messages": [{"role": "user", "content": "Hi"}], "unknown": [%s]'),
    ],
)
def test_a_number_beyond_float_is_refused_wherever_it_stands(
    service: Service, path: str, fields: str, number: str
) -> None:
    error = service.call("POST", path, f"{{{fields % number}}}".encode()).error
    assert error["code"] == "invalid_json"
    assert "beyond the largest float" in error["message"]


@pytest.mark.parametrize("schema", ['{"const": 1e999}', '{"const": NaN}', '{"const": "\\ud800"}'])
def test_a_schema_in_a_string_is_read_as_a_body_is(service: Service, schema: str) -> None:
    error = service.chat(structured_outputs={"json": schema}).error
    assert error["param"] == "structured_outputs.json"
    assert "is not valid JSON" in error["message"]


def test_a_body_over_the_limit_is_a_413_by_its_header_or_while_it_is_read(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, say(tokenizer, "3"), max_body_bytes=1024)
    small = json.dumps({"prompt": "Hi"}).encode()
    assert service.call("POST", "/v1/completions", small, {"content-length": str(len(small))}).status == 200
    for length in ("1025", "9" * 30):
        answer = service.call("POST", "/v1/completions", small, {"content-length": length})
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        assert "this server accepts at most 1,024" in answer.error["message"]
    assert service.call("POST", "/v1/completions", [small, b" " * 600, b" " * 600]).status == 413
    assert service.call("POST", "/v1/completions", [small, b" " * 600, b" " * 300]).status == 200
    assert service.call("POST", "/v1/completions", small, {"content-length": "many"}).status == 200


def test_an_unknown_model_is_a_404(service: Service) -> None:
    answer = service.chat(model="gpt")
    assert answer.status == 404
    assert answer.error["code"] == "model_not_found"
    assert answer.error["param"] == "model"
    assert answer.error["message"] == "there is no model 'gpt'; this server has demo"


@pytest.mark.parametrize("value", ["soon", "", "-1", "0", "nan", "inf", "1e9"])
def test_a_bad_deadline_header_is_a_400(service: Service, value: str) -> None:
    answer = service.call("POST", "/v1/completions", {"prompt": "Hi"}, {"x-carousel-deadline-s": value})
    assert (answer.status, answer.error["param"]) == (400, "deadline_s")
    assert not service.generate.requests


def test_among_several_models_one_must_be_named(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, say(tokenizer, "3"), names=("a", "org/b"))
    answer = service.chat()
    assert (answer.status, answer.error["param"]) == (400, "model")
    assert "`model` is required; this server has a, org/b" in answer.error["message"]
    assert service.chat(model="org/b").json["model"] == "org/b"


def test_unknown_fields_are_logged_once_and_known_ones_never(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="app.api.schemas.parameters")
    for _ in range(2):
        service.chat(a_field_of_tomorrow=1, user="me", tools=[])
    assert [record.getMessage() for record in caplog.records] == [
        "ignoring the unknown field 'a_field_of_tomorrow' in a ChatRequest"
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = (
    "model messages prompt max_completion_tokens n stream stream_options stop user priority deadline_s "
    "tools tool_choice response_format best_of cache_salt request_id chat_template_kwargs echo suffix prediction"
).split() + [each.name for each in fields(SamplingParams)]
LIKELY = st.sampled_from([0, 1, -1, 2, True, False, None, "demo", "Hi", [], {}, [1, 2], ["a"], [[1]], {"1": 1}, 1e308])
_MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "x"]), "content": JSON | st.text()}), max_size=2
)


def test_no_json_body_gives_a_5xx(service: Service) -> None:
    body = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), LIKELY | JSON, max_size=6)

    @settings(max_examples=300, deadline=None)
    @given(body, _MESSAGES | JSON, st.text(max_size=5) | JSON, st.booleans(), st.booleans())
    def check(body: dict[str, Any], messages: Any, prompt: Any, chat: bool, plain: bool) -> None:
        path = "/v1/chat/completions" if chat else "/v1/completions"
        body = body | ({"messages": messages, "prompt": prompt} if plain else {})
        answer = service.call("POST", path, body)
        assert answer.status in (200, 400, 404), answer.body
        if answer.status != 200:
            check_error(answer.error)
        assert not service.generate.open

    check()


def test_no_bytes_give_a_5xx(service: Service) -> None:
    @settings(max_examples=100, deadline=None)
    @given(st.binary(max_size=60))
    def check(body: bytes) -> None:
        assert service.call("POST", "/v1/completions", body).status == 400

    check()


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/chat/completions", {"messages": [USER] * 4097}, "messages .* at most 4096 items"),
        ("/tokenize", {"messages": [USER] * 4097}, "messages .* at most 4096 items"),
        (
            "/v1/chat/completions",
            {"messages": [USER | {"content": [{"type": "text", "text": ""}] * 4097}]},
            r"messages\[0\].content has 4,097 parts; at most 4,096",
        ),
        ("/v1/completions", {"prompt": [[1]] * 10_001}, "prompt contains 10,001 prompts; at most 10,000"),
    ],
)
def test_what_takes_long_to_look_through_is_refused_at_once(
    service: Service, path: str, body: dict[str, Any], words: str
) -> None:
    answer = service.call("POST", path, body)
    assert answer.status == 400
    assert re.search(words, answer.error["message"])


async def test_a_body_that_comes_too_slowly_is_a_408(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, body_timeout_s=0.05)
    async with Connection(service.app, "POST", "/v1/completions", [], {}) as connection:  # it never comes
        answer = await connection.finished()
    assert (answer.status, answer.error["type"], answer.error["code"]) == (408, "timeout_error", "body_timeout")
    assert "only 0 bytes of the body arrived within 0.05 s" in answer.error["message"]
    assert answer.headers["connection"] == "close"


def test_a_body_that_trickles_is_cut_off_long_before_the_whole_time_and_a_steady_one_is_not(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_body, "PATIENCE_S", 0.3, raising=False)
    monkeypatch.setattr(http_body, "MIN_BYTES_PER_S", 200, raising=False)
    service = Service(tokenizer, say(tokenizer, "3"), body_timeout_s=20.0)
    whole = json.dumps({"prompt": "Hi", "user": "x" * 250}).encode()

    async def sent(num_bytes: int, every_s: float) -> tuple[Answer, int]:
        """The answer to the body in pieces of so many bytes, and after how many bytes it came."""
        async with Connection(service.app, "POST", "/v1/completions", [], {}) as connection:
            for start in range(0, len(whole), num_bytes):
                if connection.messages:
                    break
                connection.send_body(whole[start : start + num_bytes], more=start + num_bytes < len(whole))
                await asyncio.sleep(every_s)
            await connection.finished()
            return connection.answer(), start

    trickled, at = asyncio.run(sent(1, every_s=0.02))
    assert (trickled.status, trickled.error["code"]) == (408, "body_timeout")
    assert at < 60, "not 20 s, nor the whole body"
    assert "at least 200 bytes a second after the first 0.3 s" in trickled.error["message"]
    assert asyncio.run(sent(16, every_s=0.001))[0].status == 200


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (DetokenizeRequest, {"tokens": [-1] * 9999}),
        (ChatRequest, {"messages": [{"role": "unknown"}] * 9999}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [7] * 9999}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": "Hi"}], "tools": [7] * 9999}),
        (CompletionRequest, {"prompt": "Hi", "stop_token_ids": ["x"] * 9999}),
        (CompletionRequest, {"prompt": "Hi", "bad_words": [7] * 9999}),
        (CompletionRequest, {"prompt": "Hi", "structured_outputs": {"choice": [7] * 9999}}),
        (ResponsesRequest, {"input": [{"role": "unknown", "content": "Hi"}] * 9999}),
    ],
)
def test_a_list_of_mistakes_costs_no_more_than_its_first(schema: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(body)
    assert caught.value.error_count() == 1
