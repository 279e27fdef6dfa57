"""Calls that must be made, by the bundled model under a grammar, and schemas inside schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from transformers import PreTrainedTokenizerFast

from app.api.output.tool_grammars import moved
from app.engine.async_engine import AsyncEngine
from app.text import Tokenizer
from app.text.tool_calls import FORMATS
from tests.kit.service import Service, openai_client
from tests.text.tool_calls.templates import TEMPLATES

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"place": {"$ref": "#/$defs/place"}, "unit": {"enum": ["C", "F"]}},
            "required": ["place", "unit"],
            "additionalProperties": False,
            "$defs": {"place": {"enum": ["Ulm", "Oslo"]}},
        },
        "strict": True,
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
PLACE_AND_UNIT = [{"place": place, "unit": unit} for place in ("Ulm", "Oslo") for unit in "CF"]


@pytest.fixture
def app(engine: AsyncEngine, demo_path: Path) -> Any:
    """The bundled model with a template that has tools: it never saw any, but it must call them."""
    pretrained = PreTrainedTokenizerFast.from_pretrained(demo_path)
    pretrained.chat_template = TEMPLATES["hermes"]
    service = Service(
        Tokenizer(pretrained), generate=engine.generate, tool_format=FORMATS["hermes"], max_model_len=2000
    )
    return service.app


def asked(**fields: Any) -> Any:
    chat = {"model": "demo", "messages": [{"role": "user", "content": "How warm is it?"}], "max_tokens": 300}
    return chat | {"tools": [WEATHER, TIME]} | fields


async def test_some_tool_must_be_called(app: Any) -> None:
    async with openai_client(app) as client:
        for seed in range(4):
            one = asked(tool_choice="required", tools=[WEATHER], parallel_tool_calls=False, seed=seed)
            [choice] = (await client.chat.completions.create(**one)).choices
            [call] = choice.message.tool_calls or []
            assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "weather")
            assert json.loads(call.function.arguments) in PLACE_AND_UNIT


async def test_several_may_be_called_in_a_stream(app: Any) -> None:
    async with openai_client(app) as client:
        calls: dict[int, str] = {}
        text = ""
        stream = await client.chat.completions.create(
            **asked(tool_choice="required", tools=[WEATHER], seed=5), stream=True
        )
        async for chunk in stream:
            [choice] = chunk.choices
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                calls[call.index] = calls.get(call.index, "") + (call.function.arguments or "")
        assert list(calls) == list(range(len(calls)))
        # It may call until it is cut off, within a call or between two.
        was_cut = choice.finish_reason == "length"
        assert choice.finish_reason == "tool_calls" or was_cut
        assert not text or was_cut
        complete = list(calls.values())[: -1 if was_cut else None]
        assert all(json.loads(arguments) in PLACE_AND_UNIT for arguments in complete)
        assert calls


async def test_a_named_function_must_be_called(app: Any) -> None:
    async with openai_client(app) as client:
        named: Any = {"type": "function", "function": {"name": "weather"}}
        [choice] = (await client.chat.completions.create(**asked(tool_choice=named))).choices
        [call] = choice.message.tool_calls or []
        assert (choice.finish_reason, call.function.name) == ("tool_calls", "weather")
        assert json.loads(call.function.arguments) in PLACE_AND_UNIT


async def test_responses_have_forced_calls_and_formats_too(app: Any) -> None:
    async with openai_client(app) as client:
        tool: Any = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
        forced = await client.responses.create(
            model="demo", input="?", tools=[tool], tool_choice={"type": "function", "name": "weather"}
        )
        [call] = forced.output
        assert call.type == "function_call"
        assert json.loads(call.arguments) in PLACE_AND_UNIT
        schema = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"],
                  "additionalProperties": False}  # fmt: skip
        form: Any = {"format": {"type": "json_schema", "name": "unit", "schema": schema, "strict": True}}
        response = await client.responses.create(model="demo", input="?", text=form)
        assert json.loads(response.output_text)["unit"] in ("C", "F")
        assert response.text is not None
        assert response.text.format is not None
        assert response.text.format.type == "json_schema"
        form["format"]["schema"] = {"type": "nonsense"}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="demo", input="?", text=form)
        assert refused.value.param == "text.format"


class Warmth(BaseModel):
    is_warm: bool


async def test_with_tools_and_a_model_to_parse_it_is_a_document_or_a_call(app: Any) -> None:
    async with openai_client(app) as client:
        kinds = set()
        for seed in range(6):
            answer = await client.chat.completions.parse(
                **asked(tools=[WEATHER], seed=seed, parallel_tool_calls=False), response_format=Warmth
            )
            message = answer.choices[0].message
            kinds.add(message.parsed is None)
            if message.parsed is None:
                [call] = message.tool_calls or []
                assert call.function.parsed_arguments in PLACE_AND_UNIT
            else:
                assert isinstance(message.parsed, Warmth)
                assert not message.tool_calls
        assert kinds == {True, False}
        broken: Any = {"type": "json_schema", "json_schema": {"name": "b", "schema": {"enum": []}}}
        for tool, param in ((WEATHER, "tools"), (TIME, "response_format")):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**asked(tools=[tool], response_format=broken))
            assert refused.value.param == param


async def test_strict_tools_leave_what_is_no_call_as_it_is(app: Any) -> None:
    async with openai_client(app) as client:
        loose: Any = {"type": "function", "function": {**WEATHER["function"], "strict": False}}  # type: ignore[dict-item]
        for seed in range(3):
            texts = []
            for tool in (WEATHER, loose):
                one = asked(tools=[tool], seed=seed, max_tokens=40)
                texts.append((await client.chat.completions.create(**one)).choices[0].message.content)
            assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("choice", "name"), [("required", "f."), ({"type": "function", "function": {"name": "f"}}, "")], ids=str
)
async def test_a_keyword_that_cannot_be_kept_is_passed_over_and_named_or_a_bad_request(
    app: Any, choice: Any, name: str
) -> None:
    mail = {"type": "string", "pattern": r"^(?!\.)[^@]{1,9}@[^@]{1,9}$", "maxLength": 9}
    parameters = {"properties": {"to": mail}, "required": ["to"], "additionalProperties": False}
    place = f"{name}properties.to.pattern"

    async with openai_client(app) as client:
        for strict in (False, None, True):
            function = {"name": "f", "parameters": parameters, "strict": strict}
            tool = {"type": "function", "function": function}
            one: Any = asked(tools=[tool], tool_choice=choice, parallel_tool_calls=False)
            if strict:
                with pytest.raises(openai.BadRequestError, match=f"{place}: .*look-around") as refused:
                    await client.chat.completions.create(**one)
                assert refused.value.param == "tools"
            else:
                answer = await client.chat.completions.with_raw_response.create(**one)
                assert answer.headers["x-carousel-ignored"] == f"tools.{place}"
                [call] = answer.parse().choices[0].message.tool_calls
                assert len(json.loads(call.function.arguments)["to"]) <= 9


def test_references_of_a_moved_schema_lead_into_it() -> None:
    schema = {
        "$ref": "#/$defs/a",
        "anyOf": [{"$ref": "#"}, {"$ref": "https://elsewhere"}],
        "$defs": {"a": {"type": "null"}},
        "properties": {"enum": {"$ref": "#/components/b"}, "x": {"const": {"$ref": "#"}, "default": {"$ref": "#"}}},
        "components": {"b": {"items": {"$ref": "#"}, "enum": [{"$ref": "#"}]}},
    }
    assert moved(schema, "#/$defs/7") == {
        "$ref": "#/$defs/7/$defs/a",
        "anyOf": [{"$ref": "#/$defs/7"}, {"$ref": "https://elsewhere"}],
        "$defs": {"a": {"type": "null"}},
        "properties": {
            "enum": {"$ref": "#/$defs/7/components/b"},
            "x": {"const": {"$ref": "#"}, "default": {"$ref": "#"}},  # data
        },
        "components": {"b": {"items": {"$ref": "#/$defs/7"}, "enum": [{"$ref": "#"}]}},
    }
