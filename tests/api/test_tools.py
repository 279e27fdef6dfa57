"""Tools in chats: what the model is told of them, and its calls in responses and streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.engine.request import FinishReason
from app.text import Tokenizer
from app.text.tool_calls import FORMATS, format_of
from tests.kit.service import CALL, WAIT, Service, calling, openai_client, say
from tests.metrics.test_exposition import value
from tests.text.tool_calls import published
from tests.text.tool_calls.templates import TEMPLATES, tokenizer_with

TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "Does it.", "parameters": {"type": "object"}, "strict": True},
}
OTHER = {"type": "function", "function": {"name": "g"}}


def together(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """The messages of a stream, by choice, as clients put them together."""
    messages: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        message = messages.setdefault(choice["index"], {"content": "", "calls": [], "finish_reason": None})
        message["content"] += choice["delta"].get("content") or ""
        message["finish_reason"] = choice["finish_reason"] or message["finish_reason"]
        for call in choice["delta"].get("tool_calls", []):
            if call["index"] == len(message["calls"]):
                assert call["type"] == "function"
                message["calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            else:
                assert call.keys() == {"index", "function"}, "id and name come once"
            message["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return messages


def test_a_call_is_a_message_of_its_own_kind(tools_tokenizer: Tokenizer) -> None:
    answer = calling(tools_tokenizer, CALL).chat(tools=[TOOL])
    [choice] = answer.json["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    [call] = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "f", "arguments": '{"a": 1}'})
    assert call["id"].startswith("call_")


def test_metrics_count_calls_as_text_that_stopped(tools_tokenizer: Tokenizer) -> None:
    service = calling(tools_tokenizer, CALL)
    service.chat(tools=[TOOL])
    text = service.call("GET", "/metrics").body
    assert value(text, "vllm:request_success_total", finished_reason="stop") == 1
    assert b"tool_calls" not in text


def test_text_and_several_calls_whole_and_streamed(tools_tokenizer: Tokenizer) -> None:
    service = calling(tools_tokenizer, f"Let me see.\n{CALL}\n{CALL.replace('1', '2')}")
    whole = service.chat(tools=[TOOL], n=2).json["choices"]
    chunks = service.chat(tools=[TOOL], n=2, stream=True).chunks
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for index, streamed in together(chunks).items():
        message = whole[index]["message"]
        assert streamed["content"] == message["content"] == "Let me see."
        assert streamed["finish_reason"] == whole[index]["finish_reason"] == "tool_calls"
        assert [(call["name"], call["arguments"]) for call in streamed["calls"]] == [
            ("f", '{"a": 1}'),
            ("f", '{"a": 2}'),
        ]
        assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"a": 1}', '{"a": 2}']
    ids = [call["id"] for message in together(chunks).values() for call in message["calls"]]
    assert len(set(ids)) == 4


def test_arguments_arrive_before_the_call_is_complete(tools_tokenizer: Tokenizer) -> None:
    chunks = calling(tools_tokenizer, CALL).chat(tools=[TOOL], stream=True).chunks
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"] if "tool_calls" in choice["delta"]]
    assert len(deltas) > 4
    assert deltas[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{"}


def test_the_schema_tells_texts_from_values_where_the_format_has_no_quotes() -> None:
    tokenizer = tokenizer_with(published.QWEN3_5, ("<tool_call>", "</tool_call>"))
    texts = {"zip": {"type": "string"}, "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}}
    values = {"days": {"type": ["integer", "string"]}, "any": True}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": texts | values}}}
    written = "".join(f"<parameter={name}>\n07\n</parameter>\n" for name in texts)
    written += "".join(f"<parameter={name}>\n7\n</parameter>\n" for name in values)
    service = Service(
        tokenizer,
        say(tokenizer, f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"),
        tool_format=format_of(tokenizer),
        max_model_len=2000,
    )
    [call] = together(service.chat(tools=[tool], stream=True).chunks)[0]["calls"]
    assert json.loads(call["arguments"]) == {"zip": "07", "note": "07", "days": 7, "any": 7}


def test_text_without_calls_is_as_ever(tools_tokenizer: Tokenizer) -> None:
    service = calling(tools_tokenizer, "1 < 2 \n")
    [choice] = service.chat(tools=[TOOL]).json["choices"]
    assert choice["message"] == {"role": "assistant", "content": "1 < 2 \n", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert together(service.chat(tools=[TOOL], stream=True).chunks)[0]["content"] == "1 < 2 \n"


def test_a_call_that_is_cut_short_says_so(tools_tokenizer: Tokenizer) -> None:
    service = calling(tools_tokenizer, CALL[: CALL.index("1")], reason=FinishReason.LENGTH)
    [choice] = service.chat(tools=[TOOL]).json["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": '


def test_one_call_is_the_end_when_more_are_not_wanted(tools_tokenizer: Tokenizer) -> None:
    ids = tools_tokenizer.encode(CALL, add_special_tokens=False)
    service = Service(
        tools_tokenizer,
        lambda request: [*((token,) for token in ids), WAIT],
        tool_format=FORMATS["hermes"],
        max_model_len=2000,
    )
    [choice] = service.chat(tools=[TOOL], parallel_tool_calls=False).json["choices"]
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("tool_calls", 1)
    assert not service.generate.open, "what would follow is not generated"


def test_special_tokens_of_the_format_are_seen_and_others_are_not() -> None:
    tokenizer = tokenizer_with(TEMPLATES["mistral"])
    service = calling(
        tokenizer, '<|python_tag|>Yes[TOOL_CALLS][{"name": "f", "arguments": {}}]', form=FORMATS["mistral"]
    )
    [choice] = service.chat(tools=[TOOL]).json["choices"]
    assert choice["message"]["content"] == "Yes"
    assert len(choice["message"]["tool_calls"][0]["id"]) == 9, "as Mistral's templates want it"
    assert "TOOL" not in service.chat().json["choices"][0]["message"]["content"]


def test_the_model_is_told_of_tools_and_of_earlier_calls(tools_tokenizer: Tokenizer) -> None:
    service = calling(tools_tokenizer, "3")
    messages = [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "4"}]},
    ]
    service.chat(messages=messages, tools=[OTHER], max_tokens=1)
    prompt = tools_tokenizer.decode(service.request.prompt_token_ids, skip_special_tokens=False)
    assert '{"type": "function", "function": {"name": "g"}}' in prompt
    assert f"<|assistant|>{CALL}<|end|><|tool|>4<|end|>" in prompt
    counted = service.call("POST", "/tokenize", {"messages": messages, "tools": [OTHER]}).json
    assert counted["tokens"] == list(service.request.prompt_token_ids)


def test_templates_learn_which_function_a_result_is_of() -> None:
    tokenizer = tokenizer_with("{% for m in messages %}{{ m.name or '-' }} {% endfor %}{# and tool_calls #}")
    service = Service(tokenizer, say(tokenizer, "3"))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
        {"role": "tool", "tool_call_id": "1", "content": "4", "name": "g"},
        {"role": "tool", "tool_call_id": "2", "content": "5"},
    ]
    service.chat(messages=messages, max_tokens=1)
    assert tokenizer.decode(service.request.prompt_token_ids) == "- f g - "


@pytest.mark.parametrize("fields", [{"tools": [TOOL], "tool_choice": "none"}, {"tools": []}, {"tools": None}])
def test_without_tools_on_offer_nothing_is_told_and_nothing_is_taken_out(
    tools_tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    service = calling(tools_tokenizer, CALL)
    [choice] = service.chat(**fields).json["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert "Tools" not in tools_tokenizer.decode(service.request.prompt_token_ids)


def test_tools_for_a_model_of_an_unknown_format_are_refused(tools_tokenizer: Tokenizer) -> None:
    answer = Service(tools_tokenizer).chat(tools=[TOOL])
    assert (answer.status, answer.error["param"]) == (400, "tools")
    assert "tool_parser" in answer.error["message"]


async def test_the_openai_package_reads_calls_whole_and_streamed(tools_tokenizer: Tokenizer) -> None:
    service = calling(tools_tokenizer, CALL)
    async with openai_client(service.app) as client:
        asked: Any = {"model": "demo", "messages": [{"role": "user", "content": "?"}], "tools": [TOOL]}
        whole = await client.chat.completions.create(**asked)
        calls = whole.choices[0].message.tool_calls
        assert calls is not None
        assert json.loads(calls[0].function.arguments) == {"a": 1}
        async with client.chat.completions.stream(**asked) as stream:
            final = await stream.get_final_completion()
        [call] = final.choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == {"a": 1}
