"""Custom tools, which take a text, and choices of some of the tools, in chats and responses."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from transformers import PreTrainedTokenizerFast

from app.engine.async_engine import AsyncEngine
from app.engine.request import FinishReason
from app.grammar.grammars import Grammars
from app.text import Tokenizer
from app.text.tool_calls import FORMATS, ToolParser
from tests.api.published_types import strictly
from tests.api.test_forced_calls import WEATHER
from tests.api.test_openai_types import checked_response
from tests.api.test_strict_calls import grammar_for, grammars, matcher, tokenizer, written  # noqa: F401 (fixtures)
from tests.kit.service import Service, calling
from tests.text.tool_calls.templates import TEMPLATES

LARK = """
start: "SELECT " NAME ("," NAME){0,3} "\\n" // of a table
NAME: /[a-c]{1,3}|"[a-c]"/
"""
ROWS = re.compile(r'SELECT ([a-c]{1,3}|"[a-c]")(,([a-c]{1,3}|"[a-c]")){0,3}\n')
INPUT = 'SELECT "é"\n\t\\ {}'
CALL = f'<tool_call>\n{{"name": "sql", "arguments": {{"input": {json.dumps(INPUT)}}}}}\n</tool_call>'
OTHER = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def custom(**form: Any) -> dict[str, Any]:
    """A tool as chats have it."""
    wanted = {"format": {"type": "grammar", "grammar": form}} if form else {}
    return {"type": "custom", "custom": {"name": "sql", "description": "Asks.", **wanted}}


def flat(**form: Any) -> dict[str, Any]:
    """A tool as responses have it."""
    return {"type": "custom", "name": "sql"} | ({"format": {"type": "grammar", **form}} if form else {})


def allowed(mode: str, *names: tuple[str, str]) -> dict[str, Any]:
    tools = [{"type": kind, kind: {"name": name}} for kind, name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_a_call_has_a_text_for_its_input(tools_tokenizer: Tokenizer) -> None:
    service = calling(tools_tokenizer, f"Well.\n{CALL}")
    [choice] = strictly(ChatCompletion, service.chat(tools=[custom(), OTHER]).body).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Well.")
    [call] = choice.message.tool_calls or []
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input) == ("sql", INPUT)
    assert call.id.startswith("call_")


def test_streams_bring_it_in_pieces(tools_tokenizer: Tokenizer) -> None:
    chunks = calling(tools_tokenizer, CALL).chat(tools=[custom()], stream=True).chunks
    deltas = [delta for chunk in chunks for delta in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert deltas[0].keys() == {"index", "id", "type", "custom"}
    assert (deltas[0]["type"], deltas[0]["custom"]) == ("custom", {"name": "sql", "input": ""})
    assert len(deltas) > 4
    assert "".join(delta["custom"]["input"] for delta in deltas) == INPUT
    del deltas[0]["type"]  # the published model knows of functions only
    for chunk in chunks:
        strictly(ChatCompletionChunk, chunk)


def test_responses_have_items_and_events_of_its_own(tools_tokenizer: Tokenizer) -> None:
    whole, events = checked_response(calling(tools_tokenizer, CALL), tools=[flat(), {"type": "function", "name": "f"}])
    [call] = whole.output
    assert (call.type, getattr(call, "input", None), whole.tools[0].type) == ("custom_tool_call", INPUT, "custom")
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == INPUT
    assert [kind for kind in kinds if kind != "custom_tool_call_input.delta"] == [
        "created", "in_progress", "output_item.added", "custom_tool_call_input.done", "output_item.done", "completed",
    ]  # fmt: skip
    cut = calling(tools_tokenizer, CALL[:60], FinishReason.LENGTH)
    whole, _ = checked_response(
        cut, tools=[flat()], tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [flat()]}
    )
    assert (whole.status, getattr(whole.output[0], "status", None)) == ("incomplete", "incomplete")


def test_a_tool_that_is_named_gets_the_whole_text(tools_tokenizer: Tokenizer) -> None:
    service = calling(tools_tokenizer, INPUT)
    choice = {"type": "custom", "custom": {"name": "sql"}}
    [call] = service.chat(tools=[custom()], tool_choice=choice).json["choices"][0]["message"]["tool_calls"]
    assert call["custom"] == {"name": "sql", "input": INPUT}
    whole, _ = checked_response(service, tools=[flat()], tool_choice={"type": "custom", "name": "sql"})
    assert getattr(whole.output[0], "input", None) == INPUT


def test_a_conversation_goes_on_with_a_call_and_its_output(tools_tokenizer: Tokenizer) -> None:
    service = calling(tools_tokenizer, "3")
    call = {"id": "c1", "type": "custom", "custom": {"name": "sql", "input": INPUT}}
    chat = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]
    assert service.chat(messages=chat, tools=[custom(syntax="lark", definition=LARK)]).status == 200
    items = [
        {"role": "user", "content": "?"},
        {
            "type": "custom_tool_call",
            "call_id": "c1",
            "name": "sql",
            "input": INPUT,
            "id": "ctc_1",
            "status": "completed",
        },
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "4"},
    ]
    tool = flat(syntax="lark", definition=LARK) | {"description": "Asks."}
    assert service.call("POST", "/v1/responses", {"input": items, "tools": [tool]}).status == 200
    first, second = (tools_tokenizer.decode(each.prompt_token_ids) for each in service.generate.requests)
    assert first == second
    assert f'"arguments": {json.dumps({"input": INPUT}, ensure_ascii=False)}' in first
    assert "4" in first
    assert json.dumps("A text by this Lark grammar:\n" + LARK)[1:-1] in first, "the model knows the grammar"


@pytest.fixture
def service(engine: AsyncEngine, demo_path: Path) -> Service:
    """The bundled model with a template that has tools: it never saw any, but it must call them."""
    pretrained = PreTrainedTokenizerFast.from_pretrained(demo_path)
    pretrained.chat_template = TEMPLATES["hermes"]
    return Service(Tokenizer(pretrained), generate=engine.generate, tool_format=FORMATS["hermes"], max_model_len=2000)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"syntax": "lark", "definition": LARK}, ROWS),
        ({"syntax": "regex", "definition": '[ab"\\n]{2,4}|c'}, re.compile('[ab"\\n]{2,4}|c')),
    ],
)
def test_inputs_keep_to_their_grammars(service: Service, form: dict[str, Any], expected: re.Pattern[str]) -> None:
    named = {"type": "custom", "custom": {"name": "sql"}}
    for choice in (named, "required", allowed("required", ("custom", "sql"))):
        tools = [custom(**form), *([WEATHER] if isinstance(choice, dict) else [])]
        for seed in range(3):
            answer = service.chat(tools=tools, tool_choice=choice, seed=seed, max_tokens=300, parallel_tool_calls=False)
            [call] = answer.json["choices"][0]["message"]["tool_calls"]
            assert expected.fullmatch(call["custom"]["input"]), call
            assert answer.json["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_free_calls_are_those_of_allowed_tools_and_keep_to_grammars(
    tokenizer: Tokenizer,  # noqa: F811
    grammars: Grammars,  # noqa: F811
    form: Any,
) -> None:
    tools = [custom(syntax="lark", definition=LARK), WEATHER, OTHER]
    both = allowed("auto", ("custom", "sql"), ("function", "weather"))
    grammar = grammar_for(tokenizer, form, tools=tools, tool_choice=both)
    assert grammar is not None
    names = set()
    for seed in range(40):
        draw = random.Random(seed)
        begin = form.begin + ("[" if form.lead else "")
        token_ids = written(matcher(grammars, grammar), tokenizer.encode(begin, add_special_tokens=False), draw)
        parser = ToolParser(form, {"sql", "weather"}, is_strict=True, raw_names={"sql"})
        parts = [*parser.push(tokenizer.decode(token_ids, skip_special_tokens=False)), *parser.flush()]
        [call] = [call for part in parts for call in part.calls] or [None]
        if call is None:
            continue  # cut off within the name
        assert call.name in ("sql", "weather")
        names.add(call.name)
        if call.name == "sql" and len(token_ids) < 300:
            assert ROWS.fullmatch(call.arguments)
    assert names == {"sql", "weather"}


def test_a_grammar_that_is_wrong_is_refused_with_its_tool_and_place(service: Service) -> None:
    for choice in ("auto", "required"):
        answer = service.chat(tools=[custom(syntax="lark", definition='start: a\nb: "x"')], tool_choice=choice)
        assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "tools", "invalid_grammar")
        assert 'the Lark grammar of sql: at 1(8): unknown name: "a"' in answer.error["message"]
        answer = service.chat(tools=[custom(syntax="regex", definition="[a")], tool_choice=choice)
        assert (answer.status, answer.error["param"]) == (400, "tools")
        assert "unclosed character class" in answer.error["message"]


NO_GRAMMAR = {"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}}
NO_DEFINITION = {"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "lark"}}
NO_INPUT = {"type": "custom_tool_call", "call_id": "c", "name": "sql"}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "custom"}]}, "tools[0].custom", "is required"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function' or 'custom'"),
    ({"tools": [custom(syntax="ebnf", definition="a")]}, "tools[0].custom.format.grammar.syntax", "'lark' or 'regex'"),
    ({"tools": [NO_GRAMMAR]}, "tools[0].custom.format.grammar", "is required with the type grammar"),
    ({"tools": [custom(syntax="lark", definition="x" * 140_000)]}, "tools", "at most 131,072"),
    (
        {"tools": [OTHER], "tool_choice": allowed("auto", ("custom", "f"))},
        "tool_choice",
        "tools of that type: none",
    ),
    ({"tools": [custom(), {"type": "function", "function": {"name": "sql"}}]}, "tools", "with the same name"),
    ({"input": "Hi", "tools": [NO_DEFINITION]}, "tools[0].format.definition", "is required with the type grammar"),
    (
        {"input": "Hi", "tools": [flat()], "tool_choice": {"type": "function", "name": "sql"}},
        "tool_choice",
        "tools of that type: none",
    ),
    ({"input": [NO_INPUT]}, "input[0].input", "is required"),
]


@pytest.mark.parametrize(("fields", "param", "message"), WRONG)
def test_what_is_missing_or_unknown_is_named(
    tools_tokenizer: Tokenizer, fields: dict[str, Any], param: str, message: str
) -> None:
    path = "/v1/responses" if "input" in fields else "/v1/chat/completions"
    prompt = {} if "input" in fields else {"messages": [{"role": "user", "content": "Hi"}]}
    answer = calling(tools_tokenizer, "3").call("POST", path, prompt | fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert message in answer.error["message"]
