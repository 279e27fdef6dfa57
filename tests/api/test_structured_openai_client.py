"""The real `openai` package asks the bundled model for structured outputs, over the app and a real engine."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from app.engine.async_engine import AsyncEngine
from app.text import Tokenizer
from tests.api.fakes import Service
from tests.api.openai_clients import with_client as with_openai

USER = {"role": "user", "content": "Tell me of a bird."}


class Bird(BaseModel):
    kind: Literal["owl", "wren", "heron"]
    legs: Literal[2]
    can_fly: bool
    colour: Literal["grey", "white"] | None


@pytest.fixture
def with_client(tokenizer: Tokenizer, engine: AsyncEngine) -> Callable[[Callable[..., Awaitable[None]]], None]:
    return partial(with_openai, Service(tokenizer, generate=engine.generate).app)


def test_a_pydantic_model_is_parsed(with_client: Callable[..., None]) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        for seed in range(5):
            answer = await client.chat.completions.parse(model="demo", messages=[USER], response_format=Bird, seed=seed)
            [choice] = answer.choices
            assert choice.finish_reason == "stop"
            assert isinstance(choice.message.parsed, Bird)

    with_client(use)


def test_a_stream_is_held_to_its_form_too(with_client: Callable[..., None]) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(
            model="demo",
            messages=[USER],
            stream=True,
            seed=3,
            extra_body={"structured_outputs": {"regex": "[a-z]{3,20}( [a-z]{2,9}){1,4}!"}},
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert re.fullmatch("[a-z]{3,20}( [a-z]{2,9}){1,4}!", text), text

    with_client(use)


def test_all_choices_of_a_call_have_the_form(with_client: Callable[..., None]) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        grammar = 'root ::= "{" ("\\"a\\"" | "\\"b\\"") ": " [1-9] [0-9]? "}"'
        answer = await client.completions.create(
            model="demo", prompt="x", n=4, max_tokens=60, extra_body={"structured_outputs": {"grammar": grammar}}
        )
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}
        assert all(json.loads(choice.text).keys() <= {"a", "b"} for choice in answer.choices)

    with_client(use)


def test_what_cannot_be_compiled_is_a_bad_request(with_client: Callable[..., None]) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        for wanted in ({"regex": "(a"}, {"json": {"type": "nonsense"}}, {"grammar": "a ="}):
            with pytest.raises(openai.BadRequestError, match="cannot be used") as refused:
                await client.chat.completions.create(
                    model="demo", messages=[USER], stream=True, extra_body={"structured_outputs": wanted}
                )
            assert refused.value.code == "invalid_grammar"
            assert refused.value.param == f"structured_outputs.{next(iter(wanted))}"

    with_client(use)
