"""The real `openai` package asks the bundled model for structured outputs, over the app and a real engine."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from app.engine.async_engine import AsyncEngine
from app.text import Tokenizer
from tests.kit.service import Service, openai_client

USER = {"role": "user", "content": "Tell me of a bird."}


class Bird(BaseModel):
    kind: Literal["owl", "wren", "heron"]
    legs: Literal[2]
    can_fly: bool
    colour: Literal["grey", "white"] | None


@pytest.fixture
def app(tokenizer: Tokenizer, engine: AsyncEngine) -> Any:
    return Service(tokenizer, generate=engine.generate).app


async def test_a_pydantic_model_is_parsed(app: Any) -> None:
    async with openai_client(app) as client:
        for seed in range(5):
            answer = await client.chat.completions.parse(model="demo", messages=[USER], response_format=Bird, seed=seed)
            [choice] = answer.choices
            assert choice.finish_reason == "stop"
            assert isinstance(choice.message.parsed, Bird)


async def test_a_stream_is_held_to_its_form_too(app: Any) -> None:
    async with openai_client(app) as client:
        stream = await client.chat.completions.create(
            model="demo",
            messages=[USER],
            stream=True,
            seed=3,
            extra_body={"structured_outputs": {"regex": "[a-z]{3,20}( [a-z]{2,9}){1,4}!"}},
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert re.fullmatch("[a-z]{3,20}( [a-z]{2,9}){1,4}!", text), text


async def test_all_choices_of_a_call_have_the_form(app: Any) -> None:
    async with openai_client(app) as client:
        grammar = 'root ::= "{" ("\\"a\\"" | "\\"b\\"") ": " [1-9] [0-9]? "}"'
        answer = await client.completions.create(
            model="demo", prompt="x", n=4, max_tokens=60, extra_body={"structured_outputs": {"grammar": grammar}}
        )
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}
        assert all(json.loads(choice.text).keys() <= {"a", "b"} for choice in answer.choices)


async def test_what_cannot_be_compiled_is_a_bad_request(app: Any) -> None:
    async with openai_client(app) as client:
        for wanted in ({"regex": "(a"}, {"json": {"enum": []}}, {"grammar": "a ="}):
            with pytest.raises(openai.BadRequestError, match="cannot be used") as refused:
                await client.chat.completions.create(
                    model="demo", messages=[USER], stream=True, extra_body={"structured_outputs": wanted}
                )
            assert refused.value.code == "invalid_grammar"
            assert refused.value.param == f"structured_outputs.{next(iter(wanted))}"


TAG: Any = {
    "type": "structural_tag",
    "structures": [{"begin": "e=", "schema": {"enum": ["owl", 7]}, "end": ";"}],
    "triggers": ["e"],
}


async def test_a_structural_tag_holds_what_follows_its_triggers(app: Any) -> None:
    async with openai_client(app) as client:
        asked: Any = {"model": "demo", "messages": [USER], "temperature": 0, "max_tokens": 60}
        answer = (await client.chat.completions.create(**asked, response_format=TAG)).choices[0].message.content or ""
        found = re.findall("e.{0,6}", answer)
        assert found
        assert all(re.match('e=("owl"|7);', each) for each in found[:-1]), answer
        free = (await client.chat.completions.create(**asked)).choices[0].message.content or ""
        assert answer.startswith(free[: free.index("e") + 1]), "free until there"


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "(owl|wren)"},
        {"ebnf": 'root ::= bird\nbird ::= "owl" | "wren"\n'},
        {"grammar": 'root ::= "owl" | "wren"'},
        {"json_schema": '{"enum": ["owl", "wren"]}'},
        {"response_format": {"type": "json_object", "schema": {"enum": ["owl", "wren"]}}},
    ],
    ids=str,
)
async def test_other_servers_names_for_a_form_hold_the_model_to_it(app: Any, fields: dict[str, Any]) -> None:
    async with openai_client(app) as client:
        for seed in range(3):
            answer = await client.chat.completions.create(model="demo", messages=[USER], seed=seed, extra_body=fields)
            assert (answer.choices[0].message.content or "").strip('"') in ("owl", "wren")
