"""Fields of other servers: honoured, refused with what to send instead, or ignored and named in a header."""

from __future__ import annotations

import re
from typing import Any

import pytest

from app.api.endpoints.table import ENDPOINTS
from app.api.schemas.parameters import UnknownFields, parse, unavailable
from app.api.schemas.requests import ChatRequest
from app.engine.request import GrammarKind
from app.errors import InvalidRequest
from tests.kit.service import Service

PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    "completions": ("/v1/completions", {"prompt": "Hi"}),
    "responses": ("/v1/responses", {"input": "Hi"}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}),
}
PATHS_WITHOUT_TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "embeddings": ("/v1/embeddings", {"input": "Hi"}),
    "classify": ("/v1/classify", {"input": "Hi"}),
    "rerank": ("/v1/rerank", {"query": "Hi", "documents": ["Ho"]}),
    "score": ("/v1/score", {"text_1": "Hi", "text_2": "Ho"}),
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
AS_TEXT = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
GBNF = 'root ::= "a" | "b"'


@pytest.mark.parametrize("endpoint", PATHS)
@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"ebnf": GBNF}, GrammarKind.GRAMMAR, GBNF),
        ({"grammar": GBNF}, GrammarKind.GRAMMAR, GBNF),
        ({"json_schema": SCHEMA}, GrammarKind.JSON_SCHEMA, AS_TEXT),
        ({"json_schema": AS_TEXT}, GrammarKind.JSON_SCHEMA, AS_TEXT),
        ({"json_schema": {}}, GrammarKind.JSON_SCHEMA, "{}"),
    ],
    ids=str,
)
def test_a_form_by_another_servers_name_is_kept(
    service: Service, endpoint: str, fields: dict[str, Any], kind: GrammarKind, text: str
) -> None:
    path, body = PATHS[endpoint]
    answer = service.call("POST", path, body | fields)
    assert answer.status == 200, answer.body
    grammar = service.request.sampling.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text, grammar.param) == (kind, text, next(iter(fields)))
    assert grammar.is_lenient == (kind is GrammarKind.JSON_SCHEMA), "where nothing says strict, a schema is best effort"


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_beside_the_type_of_a_format_is_kept(service: Service, kind: str) -> None:
    assert service.chat(response_format={"type": kind, "schema": SCHEMA}).status == 200
    grammar = service.request.sampling.grammar
    assert grammar is not None
    assert (grammar.text, grammar.is_lenient, grammar.param) == (AS_TEXT, True, "response_format.schema")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"regex": "a", "structured_outputs": {"regex": "a"}}, "regex", "structured_outputs and regex each define"),
        ({"regex": "a", "ebnf": GBNF}, "ebnf", "send only one of them"),
        ({"grammar": GBNF, "response_format": {"type": "json_object"}}, "grammar", "response_format and grammar"),
        ({"json_schema": "{"}, "json_schema", "json_schema is not valid JSON"),
        ({"json_schema": 5}, "json_schema", "json_schema should be an object or a valid string; got 5"),
        ({"regex": ["a"]}, "regex", "valid string"),
        ({"grammar": {"type": "regex", "value": "a"}}, "grammar", "valid string; got an object of 2"),
        ({"response_format": {"type": "json_object", "value": {}}}, "response_format.value", "there is no field"),
        ({"response_format": {"type": "json_object", "Value[": 1}}, "response_format.Value[", "there is no field"),
        (
            {"response_format": {"type": "text", "schema": {}}},
            "response_format.schema",
            "not allowed with the type text",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
            "response_format.json_schema",
            "is not allowed with the type json_object; leave it out",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}, "schema": {}}},
            "response_format.schema",
            "is not allowed with the type json_schema and a json_schema",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {}, "strict": True}}, "response_format.strict", ""),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "",
        ),
    ],
    ids=str,
)
def test_a_form_that_cannot_be_kept_is_refused(
    service: Service, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = service.chat(**fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert words in answer.error["message"]


def test_options_of_a_form_that_are_off_ask_for_nothing(service: Service) -> None:
    given = {"regex": "a", "json_object": False, "disable_fallback": False, "whitespace_pattern": None}
    assert service.chat(structured_outputs=given, regex="", grammar="", json_schema="").status == 200


# What a request may ask for by a field that has another name here, or none. From the request models of vLLM 0.33,
# SGLang 0.5.23, llama.cpp's server, Ollama, TGI, OpenRouter and OpenAI.
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "chat": [
        ({"guided_json": SCHEMA}, 'send structured_outputs: {"json": ...}'),
        ({"guided_choice": ["a"]}, 'send structured_outputs: {"choice": [...]}'),
        ({"structural_tag": "{}"}, 'send structured_outputs: {"structural_tag": ...}'),
        ({"format": "json"}, 'send structured_outputs: {"json": ...}'),
        ({"stop_regex": "a+"}, "send `stop` with texts"),
        ({"max_new_tokens": 5}, "send max_tokens"),
        ({"n_predict": 5}, "send max_tokens"),
        ({"repetition_detection": {"max_pattern_size": 5}}, "leave it out"),
        ({"custom_logit_processor": "x"}, "leave it out"),
        ({"use_beam_search": True}, "leave it out"),
        ({"length_penalty": 0.5}, "leave it out"),
        ({"do_sample": False}, "send temperature: 0"),
        ({"sampling_seed": 5}, "send seed"),
        ({"repeat_penalty": 1.1}, "send repetition_penalty"),
        ({"mirostat": 2}, "leave it out"),
        ({"typical_p": 0.5}, "leave it out"),
        ({"dry_multiplier": 0.8}, "leave it out"),
        ({"top_a": 0.5}, "leave it out"),
        ({"options": {"temperature": 0}}, "send its fields directly in the body"),
        ({"sampling_params": {"temperature": 0}}, "send its fields directly in the body"),
        ({"extra_body": {"top_k": 1}}, "send its fields directly in the body"),
        ({"enable_thinking": False}, 'send chat_template_kwargs: {"enable_thinking": ...}'),
        ({"think": False}, "send reasoning_effort"),
        ({"thinking": {"type": "disabled"}}, "send thinking_token_budget"),
        ({"reasoning": {"effort": "low"}}, "send reasoning_effort or thinking_token_budget"),
        ({"system": "Be brief."}, "send a message with the role 'system'"),
        ({"input_ids": [5]}, "send them as `prompt` to /v1/completions"),
        ({"plugins": [{"id": "web"}]}, "leave it out"),
        ({"lora_path": "a"}, "send the adapter's name as `model`"),
        ({"functions": [{}]}, "send `tools`"),
    ],
    "completions": [
        ({"suffix": "x"}, "send a prompt with the model's own fill-in-the-middle tokens"),
        ({"thinking_token_budget": 5}, "send a chat to /v1/chat/completions"),
        ({"n_cmpl": 2}, "send `n`"),
        ({"max_completion_tokens": 5}, "send max_tokens"),
    ],
    "responses": [
        ({"max_tokens": 5}, "send max_output_tokens"),
        ({"response_format": {"type": "json_object"}}, "send text.format"),
        ({"reasoning_effort": "low"}, "send reasoning.effort"),
        ({"options": {"temperature": 0}}, "send its fields directly in the body"),
    ],
    "messages": [
        ({"output_format": {"type": "json_schema"}}, "send output_config.format"),
        ({"stop": ["a"]}, "send stop_sequences"),
        ({"reasoning_effort": "low"}, "send `thinking`"),
    ],
    "embeddings": [
        ({"task": "retrieval.query"}, "send the prefix that the model expects in front of the text, as a part of the"),
        ({"input_type": "search_query"}, "send the prefix that the model expects"),
        ({"embd_normalize": -1}, "send `normalize`"),
        ({"embedding_types": ["int8"]}, "send encoding_format"),
        ({"output_dimension": 2}, "send `dimensions`"),
        ({"truncate": True}, "send truncate_prompt_tokens, with -1"),
        ({"late_chunking": True}, "leave it out"),
    ],
    "rerank": [
        ({"instruction": "Find it."}, "send the prefix that the model expects"),
        ({"truncation_side": "left"}, "leave it out"),
        ({"texts": ["a"]}, "send `documents`"),
        ({"top_k": 2}, "send top_n"),
        ({"return_text": True}, "send return_documents"),
    ],
    "score": [
        ({"instruction": "Find it."}, "send the prefix that the model expects"),
        ({"softmax": False}, "send use_activation"),
    ],
    "classify": [({"messages": [{"role": "user", "content": "a"}]}, "send `input`")],
}


@pytest.mark.parametrize(
    ("endpoint", "fields", "words"),
    [(endpoint, *row) for endpoint, rows in REFUSED.items() for row in rows],
    ids=lambda value: str(value)[:60],
)
def test_a_field_that_would_change_the_output_is_refused_with_what_to_send(
    service: Service, endpoint: str, fields: dict[str, Any], words: str
) -> None:
    path, body = (PATHS | PATHS_WITHOUT_TEXT)[endpoint]
    answer = service.call("POST", path, body | fields)
    [name] = fields
    assert answer.status == 400
    assert f"`{name}` is not supported by this version; {words}" in answer.json["error"]["message"]
    assert not service.generate.requests


def test_values_with_which_others_switch_a_field_off_ask_for_nothing(service: Service) -> None:
    off = {name: field.harmless[0] for name, field in unavailable(ChatRequest).items() if field.harmless}
    assert len(off) > 40
    answer = service.chat(**off | {"length_penalty": 1.0, "repeat_penalty": 1.0})
    assert answer.status == 200, answer.body
    assert "x-carousel-ignored" not in answer.headers


@pytest.mark.parametrize(
    "fields", [{"top_p": 0}, {"best_of": 0}, {"max_tokens": -1}, {"max_completion_tokens": -1.0}, {"top_k": -1}]
)
def test_the_least_values_of_clients_are_accepted(service: Service, fields: dict[str, Any]) -> None:
    assert service.chat(**fields).status == 200
    [request] = service.generate.requests
    assert request.sampling.max_tokens > 100
    assert 0 < request.sampling.top_p <= 1


def test_an_endpoint_keeps_the_fields_of_its_own(service: Service) -> None:
    assert service.complete(raw=True).status == 200, "no prompt of a completion goes through a chat template"
    path, body = PATHS["messages"]
    assert service.call("POST", path, body | {"system": "Be brief."}).status == 200
    path, body = PATHS["responses"]
    own = {"reasoning": {"summary": "auto"}, "text": {"verbosity": "medium"}, "max_tool_calls": 3}
    answer = service.call("POST", path, body | own)
    assert (answer.status, answer.json["max_tool_calls"]) == (200, 3)


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_names_the_fields_that_had_no_effect(service: Service, stream: bool) -> None:
    ignored = {"kv_transfer_params": {"a": 1}, "provider": {"order": ["x"]}, "keep_alive": "5m"}
    answer = service.chat(stream=stream, metadata={"a": "b"}, rid=None, **ignored)
    assert (answer.status, answer.headers["x-carousel-ignored"]) == (200, "kv_transfer_params, provider, keep_alive")
    assert "x-carousel-ignored" not in service.chat(metadata={"a": "b"}).headers


@pytest.mark.parametrize(
    ("names", "value"),
    [
        (["a\r\nset-cookie: b", "é, c"], "a??set-cookie??b, ???c"),
        (["", "x" * 100], ", " + "x" * 64),
        ([f"f{number}" for number in range(25)], ", ".join(f"f{number}" for number in range(20)) + ", ..."),
    ],
    ids=["odd", "empty and long", "many"],
)
def test_names_in_the_header_are_few_short_and_plain(service: Service, names: list[str], value: str) -> None:
    answer = service.complete(**dict.fromkeys(names, 1))
    assert (answer.status, answer.headers["x-carousel-ignored"]) == (200, value)


VALUES: list[Any] = [
    5, True, "x", "", [], {}, [1], [{}], ["a", [1]], {"type": "function"}, {"type": "function", "function": {}},
    {"type": "function", "function": {"name": 5}}, {"json": 5}, {"structural_tag": 5}, {"choice": 5},
    {"format": {"type": "json_schema", "schema": 5}}, [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    [{"type": "function_call_output", "call_id": "a", "output": 5}],
    {"type": "json_schema", "json_schema": {"schema": 5}},
]  # fmt: skip


@pytest.mark.parametrize("endpoint", PATHS | PATHS_WITHOUT_TEXT)
def test_an_error_names_fields_and_no_kinds_of_values_as_our_code_calls_them(endpoint: str) -> None:
    path, body = (PATHS | PATHS_WITHOUT_TEXT)[endpoint]
    schema, messages = ENDPOINTS[path].schema, []
    for name in schema.model_fields:
        for value in VALUES:
            try:
                parse(body | {name: value}, schema, UnknownFields())
            except InvalidRequest as error:
                messages.append(str(error))
    assert len(messages) > 100
    inner = re.compile(r"literal\[|function-|dict\[|list\[|NamedTool|instance of|dictionary|#|extra inputs|\.str\b")
    assert not [message for message in messages if inner.search(message)]
