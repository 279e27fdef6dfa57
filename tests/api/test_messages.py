"""/v1/messages: what it asks of the model, its answers, whole and as events, its errors; and count_tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.batches import ItemResponse
from app.engine.request import FinishReason, Request
from app.errors import Overloaded, StepFailed
from app.jobs.job import Item
from app.jobs.outputs import BatchFormat
from app.text import Tokenizer
from app.text.tool_calls import FORMATS
from tests.kit.service import CALL, KEY, Answer, Service, Step, bearer, calling, entry, last, say

PATH = "/v1/messages"
TOOL = {"name": "f", "description": "Does it.", "input_schema": {"type": "object"}}


def ask(service: Service, headers: dict[str, str] | None = None, path: str = PATH, **fields: Any) -> Answer:
    given = {"messages": [{"role": "user", "content": "Hi"}]} | ({"max_tokens": 20} if path == PATH else {})
    return service.call("POST", path, given | fields, headers)


def together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events build up, as clients put it together."""
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                delta, block = event["delta"], message["content"][event["index"]]
                if delta["type"] == "input_json_delta":
                    inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "content_block_stop":
                if event["index"] in inputs:
                    message["content"][event["index"]]["input"] = json.loads(inputs[event["index"]])
            case "message_delta":
                message |= event["delta"] | {"usage": message["usage"] | event["usage"]}
    return message


def prompt_of(service: Service) -> tuple[int, ...]:
    return service.request.prompt_token_ids


def chat_prompt(service: Service, *messages: tuple[str, str]) -> tuple[int, ...]:
    return service.tokenizer.encode_chat([{"role": role, "content": content} for role, content in messages])


def test_a_message(service: Service) -> None:
    answer = ask(service, {"x-request-id": "mine", "anthropic-version": "2023-06-01"})
    message = answer.json
    assert message.pop("id").startswith("msg_mine-")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "text", "text": "3 4 5."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(prompt_of(service)) - 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 5,
        },
    }
    assert answer.headers["request-id"] == "mine"


def test_it_is_the_chat_that_it_looks_like(service: Service) -> None:
    text, cached = {"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [text, cached]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "e"}]},
    ]
    ask(
        service, messages=messages, system=[text, cached], max_tokens=7, temperature=0.5, top_p=0.9, top_k=3,
        metadata={"user_id": "me"}, seed=1, logit_bias={"5": 1}, stop_sequences=["x"],
    )  # fmt: skip
    request = service.request
    expected = chat_prompt(service, ("system", "a\nb"), ("user", "a\nb"), ("assistant", "c"), ("user", "d\ne"))
    assert request.prompt_token_ids == expected
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.9, 3)
    assert (sampling.seed, sampling.logit_bias, request.tenant) == (1, ((5, 1.0),), "me")


def test_the_last_message_of_the_assistant_goes_on(service: Service) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "3 "}]
    ask(service, messages=messages)
    assert prompt_of(service) == service.tokenizer.encode_chat(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    counted = ask(service, path=f"{PATH}/count_tokens", messages=messages).json
    assert counted == {"input_tokens": len(prompt_of(service))}


def test_events_build_the_message_up(service: Service) -> None:
    events = ask(service, stream=True).events
    assert [event["type"] for event in events] == [
        "message_start", "ping", "content_block_start", *["content_block_delta"] * 4, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["cache_read_input_tokens"]) == ([], None, 2)
    assert events[2]["content_block"] == {"type": "text", "text": ""}
    whole = ask(service).json
    assert together(events) | {"id": ""} == whole | {"id": ""}


@pytest.mark.parametrize(
    ("fields", "reason", "expected"),
    [
        ({"stop_sequences": [" 5"]}, FinishReason.STOP, ("stop_sequence", " 5", "3 4")),
        ({}, FinishReason.LENGTH, ("max_tokens", None, "3 4 5.")),
        ({"stop_token_ids": [4]}, FinishReason.STOP, ("end_turn", None, "3 4 5.")),
    ],
)
def test_stop_reasons(
    tokenizer: Tokenizer, fields: dict[str, Any], reason: FinishReason, expected: tuple[str, str | None, str]
) -> None:
    service = Service(tokenizer, say(tokenizer, "3 4 5.", reason=reason))
    for message in (ask(service, **fields).json, together(ask(service, stream=True, **fields).events)):
        found = message["stop_reason"], message["stop_sequence"], message["content"][0]["text"]
        assert found == expected


def test_a_message_without_text_has_no_block(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, say(tokenizer, ""))
    assert ask(service).json["content"] == together(ask(service, stream=True).events)["content"] == []


def test_text_and_calls_are_blocks_one_after_the_other(tools_tokenizer: Tokenizer) -> None:
    service = calling(tools_tokenizer, f"Let me see.\n{CALL}\n{CALL.replace('1', '2')}")
    message = ask(service, tools=[TOOL]).json
    text, first, second = message["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert [(call["type"], call["name"], call["input"]) for call in (first, second)] == [
        ("tool_use", "f", {"a": 1}), ("tool_use", "f", {"a": 2}),
    ]  # fmt: skip
    assert message["stop_reason"] == "tool_use"
    streamed = together(ask(service, tools=[TOOL], stream=True).events)
    for each in (streamed, message):
        for block in [each, *each["content"]]:
            block.pop("id", None)
    assert streamed == message


def test_arguments_that_break_off_are_an_object_as_far_as_they_go(tools_tokenizer: Tokenizer) -> None:
    cut = '<tool_call>\n{"name": "f", "arguments": {"a": [1, 2], "b": "wor'
    message = ask(calling(tools_tokenizer, cut, FinishReason.LENGTH), tools=[TOOL]).json
    assert (message["content"][0]["input"], message["stop_reason"]) == ({"a": [1, 2]}, "max_tokens")


def test_a_number_beyond_float_in_arguments_is_null(tools_tokenizer: Tokenizer) -> None:
    answer = ask(calling(tools_tokenizer, CALL.replace("1", "[1e999, 2]")), tools=[TOOL])
    assert answer.json["content"][0]["input"] == {"a": [None, 2]}
    assert b"Infinity" not in answer.body


def test_calls_and_what_came_of_them_go_back_to_the_model(tools_tokenizer: Tokenizer) -> None:
    service = calling(tools_tokenizer, "1")
    uses = [{"type": "tool_use", "id": f"c{n}", "name": "f", "input": {"a": n}} for n in (1, 2)]
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "4"},
        {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "5"}], "is_error": True},
        {"type": "text", "text": "And?"},
    ]
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": [{"type": "text", "text": "Well."}, *uses]},
        {"role": "user", "content": results},
    ]
    ask(service, messages=messages, tools=[TOOL])
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": f'{{"a": {n}}}'}} for n in (1, 2)
    ]
    chat = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "Well.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "tool", "tool_call_id": "c2", "content": "5"},
        {"role": "user", "content": "And?"},
    ]
    function = {"name": "f", "description": "Does it.", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    assert prompt_of(service) == tools_tokenizer.encode_chat(chat, tools=tools)
    counted = ask(service, path=f"{PATH}/count_tokens", messages=messages, tools=[TOOL]).json
    assert counted == {"input_tokens": len(prompt_of(service))}
    without = ask(service, path=f"{PATH}/count_tokens", messages=messages, tools=[TOOL], tool_choice={"type": "none"})
    assert without.json["input_tokens"] == len(tools_tokenizer.encode_chat(chat))


TEXT = {"type": "text", "text": "Here it is."}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A dog."}}, "A dog."),
        (
            {"type": "document", "title": "Dogs", "context": "Page 1", "citations": {"enabled": False},
             "source": {"type": "content", "content": [TEXT, TEXT]}},
            "Dogs\nPage 1\nHere it is.\nHere it is.",
        ),
        (
            {"type": "search_result", "source": "https://dogs", "title": "Dogs", "content": [TEXT]},
            "Dogs\nhttps://dogs\nHere it is.",
        ),
    ],
)  # fmt: skip
def test_documents_and_search_results_are_read_as_their_texts(
    tools_tokenizer: Tokenizer, block: dict[str, Any], text: str
) -> None:
    service = Service(tools_tokenizer, say(tools_tokenizer, "3"), max_model_len=2000)
    assert ask(service, messages=[{"role": "user", "content": [block, TEXT]}]).status == 200
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block, TEXT]}
    assert ask(service, messages=[{"role": "user", "content": [result]}]).status == 200
    asked = [service.tokenizer.decode(each.prompt_token_ids) for each in service.generate.requests]
    assert all(f"{text}\nHere it is." in each for each in asked)


def test_a_reference_to_a_tool_is_read_as_its_name(tools_tokenizer: Tokenizer) -> None:
    service = Service(tools_tokenizer, say(tools_tokenizer, "3"), max_model_len=2000)
    found = [{"type": "tool_reference", "tool_name": "get_weather"}, {"type": "tool_reference", "tool_name": "f"}]
    messages = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "search", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": found}]},
    ]
    assert ask(service, messages=messages).status == 200
    assert "get_weather\nf" in service.tokenizer.decode(service.request.prompt_token_ids)


@pytest.mark.parametrize(
    ("choice", "chat_choice"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "any", "disable_parallel_tool_use": True}, "required"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
        ({"type": "none"}, "none"),
    ],
)
def test_tool_choice_asks_what_it_asks_in_a_chat(
    tools_tokenizer: Tokenizer, choice: dict[str, Any], chat_choice: Any
) -> None:
    service = calling(tools_tokenizer, "1")
    assert ask(service, tools=[TOOL], tool_choice=choice).status == 200
    function = {"name": "f", "description": "Does it.", "parameters": TOOL["input_schema"]}
    parallel = not choice.get("disable_parallel_tool_use", False)
    service.chat(
        tools=[{"type": "function", "function": function}], tool_choice=chat_choice, parallel_tool_calls=parallel,
        max_tokens=20,
    )  # fmt: skip
    message, chat = service.generate.requests
    assert message.sampling.grammar == chat.sampling.grammar
    assert message.prompt_token_ids == chat.prompt_token_ids


def test_the_form_of_the_text_is_that_of_a_chat(service: Service) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    ask(service, output_config={"format": {"type": "json_schema", "schema": schema}})
    service.chat(
        response_format={"type": "json_schema", "json_schema": {"name": "o", "schema": schema, "strict": True}}
    )
    message, chat = service.generate.requests
    assert message.sampling.grammar is not None
    assert message.sampling.grammar.text == chat.sampling.grammar.text  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         "messages[0].content has an image in the part with index 0, of type 'image'; this service supports only text"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]},
         "messages[0].content[0].source is required"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": ""}}]}]},
         'messages[0].content[0].source should have the type "text" or "content"; this server cannot read PDF files'),
        ({"messages": [{"role": "user", "content": [{"type": "tool_reference", "tool_name": "f"}]}]},
         "a block of type 'tool_reference'"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "audio"}]}
        ]}]}, "messages[0].content[0].content has audio in the part with index 0, of type 'audio'; this"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
         "has the role 'user', which may not have blocks of type 'tool_use'"),
        ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages[0].role"),
        ({"tools": [{"type": "bash", "name": "bash", "input_schema": {}}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice requires `tools`"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice of type tool requires a name"),
        ({"stop_sequences": ["a"] * 33}, "`stop_sequences` contains 33 strings; this server accepts at most 32"),
        ({"stop": ["a"]}, "send stop_sequences"),
        ({"n": 2}, "`n` is not supported"),
        ({"max_tokens": 1000}, "prompt has"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_in_anthropics_shape(service: Service, fields: dict[str, Any], words: str) -> None:
    answer = ask(service, {"x-request-id": "mine"}, **fields)
    assert answer.status == 400
    assert answer.json.keys() == {"type", "error", "request_id"}
    assert (answer.json["type"], answer.json["request_id"]) == ("error", "mine")
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert words in answer.json["error"]["message"]


def test_errors_before_the_endpoint_have_the_same_shape(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, say(tokenizer, "3"), keys=[entry()])
    for path, headers, status, kind in (
        (PATH, {}, 401, "authentication_error"),
        (PATH, {"x-api-key": "sk-wrong"}, 401, "authentication_error"),
        (PATH, {"x-api-key": KEY, "content-type": "text/plain"}, 415, "invalid_request_error"),
        (f"{PATH}/nothing", bearer(), 404, "not_found_error"),
    ):
        answer = ask(service, headers, path)
        assert (answer.status, answer.json["error"]["type"]) == (status, kind)
    answer = ask(service, bearer(), model="nope")
    assert (answer.status, answer.json["error"]["type"]) == (404, "not_found_error")
    assert ask(service, {"x-api-key": KEY}).status == 200
    for more in (bearer(), {"authorization": "Bearer sk-wrong"}, {"authorization": ""}):
        assert ask(service, {"x-api-key": KEY} | more).status == 200


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [(Overloaded("full", retry_after_s=3), 429, "rate_limit_error"), (StepFailed("broken"), 500, "api_error")],
)
def test_errors_of_the_engine(tokenizer: Tokenizer, error: Exception, status: int, kind: str) -> None:
    service = Service(tokenizer, lambda _: [error])
    for answer in (ask(service), ask(service, stream=True)):
        assert (answer.status, answer.json["error"]["type"]) == (status, kind)
    assert "broken" not in answer.body.decode()


def test_an_error_within_a_stream_is_its_last_event(tokenizer: Tokenizer) -> None:
    def script(request: Request) -> Iterable[Step]:
        yield tokenizer.encode("3 4", add_special_tokens=False)
        yield StepFailed("broken")

    events = ask(Service(tokenizer, script), stream=True).events
    assert [event["type"] for event in events][-2:] == ["content_block_delta", "error"]
    assert events[-1]["error"]["type"] == "api_error"


def test_unknown_fields_are_refused_where_that_is_asked_for(service: Service) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "Hi", "colour": 1, "cache_control": {}}]}
    answer = ask(service, {"x-strict": "true"}, messages=[message], service_tier="standard_only")
    assert (answer.status, "there is no field messages[0].content[0].colour;" in answer.json["error"]["message"]) == (
        400, True,
    )  # fmt: skip


def test_usage_of_an_item_counts_cached_tokens_as_input(service: Service) -> None:
    message = ask(service).json
    item = Item(number=0, id="a", url=PATH, body={})
    result = BatchFormat("b").answered(item, ItemResponse(200, message))
    assert (result.num_input_tokens, result.num_cached_tokens) == (len(prompt_of(service)), 2)
    assert result.num_output_tokens == 5


@given(
    cuts=st.sets(st.integers(1, 100)),
    text=st.sampled_from(
        [f"Well.\n{CALL}", f"{CALL}\n{CALL}", "a <tool_", "é😀.", f"{CALL} then <tool_", f"One {CALL} and {CALL} too."]
    ),
)
@settings(max_examples=40, deadline=None)
def test_however_the_text_is_cut_the_message_is_the_same(tools_tokenizer: Tokenizer, cuts: set[int], text: str) -> None:
    def script(request: Request) -> Iterable[Step]:
        ids = tools_tokenizer.encode(text, add_special_tokens=False)
        borders = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
        yield from (ids[start:end] for start, end in pairwise(borders))
        yield last(request, (4,), FinishReason.STOP, stop_token_id=4)

    def comparable(message: dict[str, Any]) -> Any:
        return [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]

    service = Service(tools_tokenizer, script, tool_format=FORMATS["hermes"], max_model_len=2000)
    whole = ask(calling(tools_tokenizer, text), tools=[TOOL]).json
    streamed = together(ask(service, tools=[TOOL], stream=True).events)
    assert comparable(streamed) == comparable(whole)
    assert streamed["stop_reason"] == whole["stop_reason"]
