"""instructor: typed objects, in each mode that instructor has for servers like this one."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict

from benchmarks.clients.checks import BASE_URL, MODEL, expect, run

_WHERE: dict[str, Any] = {"base_url": f"{BASE_URL}/v1", "api_key": "none", "max_retries": 0}
_HELLO: list[Any] = [{"role": "user", "content": "What is 2 plus 3?"}]
_ASKED: dict[str, Any] = {"model": MODEL, "messages": _HELLO, "max_tokens": 200, "max_retries": 0}


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")  # otherwise the bundled model adds keys without end

    is_even: bool
    size: Literal["small", "large"]


def _client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(**_WHERE), mode=mode)


def an_object(mode: instructor.Mode, **options: Any) -> None:
    found, answer = _client(mode).create_with_completion(response_model=Answer, **_ASKED, **options)
    expect(isinstance(found, Answer), found)
    expect(answer.usage is not None, answer)


def pieces_of_an_object() -> None:
    pieces = list(_client(instructor.Mode.TOOLS).create_partial(response_model=Answer, **_ASKED))
    expect(len(pieces) > 1 and isinstance(pieces[-1].is_even, bool), pieces)


def several_objects() -> None:
    pieces = list(_client(instructor.Mode.TOOLS).create_iterable(response_model=Answer, **_ASKED, strict=True))
    expect(all(isinstance(piece, Answer) for piece in pieces), pieces)


def asynchronous() -> None:
    async def ask() -> Answer:
        client: Any = instructor.from_openai(openai.AsyncOpenAI(**_WHERE), mode=instructor.Mode.JSON_SCHEMA)
        return await client.create(response_model=Answer, **_ASKED)  # type: ignore[no-any-return]

    expect(isinstance(asyncio.run(ask()), Answer), "no object")


if __name__ == "__main__":
    # Mode "JSON" asks for any object and expects the right one, so it needs a model that reads schemas in prompts.
    run(
        pieces_of_an_object, several_objects, asynchronous,
        tool=partial(an_object, instructor.Mode.TOOLS),
        strict_tool=partial(an_object, instructor.Mode.TOOLS, strict=True),
        json_schema=partial(an_object, instructor.Mode.JSON_SCHEMA),
        tool_of_responses=partial(an_object, instructor.Mode.RESPONSES_TOOLS),
    )  # fmt: skip
