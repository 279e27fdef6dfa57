"""pydantic-ai: answers, typed objects, tools and streams, over chats and over responses."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from benchmarks.clients.checks import BASE_URL, MODEL, expect, run

_PROVIDER = OpenAIProvider(base_url=f"{BASE_URL}/v1", api_key="none")
_HELLO = "What is 2 plus 3?"


class Answer(BaseModel):
    is_even: bool


def _agent(kind: type[Any], max_tokens: int = 100, **options: Any) -> Any:
    return Agent(kind(MODEL, provider=_PROVIDER), model_settings={"max_tokens": max_tokens}, **options)


def an_answer_and_its_stream(kind: type[Any]) -> None:
    agent = _agent(kind, instructions="Be short.")
    settings = {"max_tokens": 20, "temperature": 0}
    found = agent.run_sync(_HELLO, model_settings=settings)
    expect(isinstance(found.output, str) and found.usage.output_tokens > 0, found)

    async def stream() -> str:
        async with agent.run_stream(_HELLO, model_settings=settings) as answer:
            return "".join([piece async for piece in answer.stream_text(delta=True, debounce_by=None)])

    text = asyncio.run(stream())
    expect(text == found.output, (text, found))
    again = agent.run_sync(_HELLO, message_history=found.all_messages(), model_settings=settings)
    expect(again.usage.input_tokens > found.usage.input_tokens, again)


def objects(kind: type[Any]) -> None:
    """Check objects that come as a tool's arguments and objects that follow a schema."""
    for form in (ToolOutput, NativeOutput):
        found = _agent(kind, output_type=form(Answer), retries=0).run_sync(_HELLO).output
        expect(isinstance(found, Answer), (form, found))


def an_object_beside_a_tool(kind: type[Any]) -> None:
    """Check an object beside a tool. Every step is a forced call; the model chooses between the two."""
    agent = _agent(kind, 400, output_type=ToolOutput(Answer), retries=0)  # the bundled model writes characters

    @agent.tool_plain  # type: ignore[untyped-decorator]
    def look(far: bool) -> str:
        """Looks."""
        return "five"

    expect(isinstance(agent.run_sync(_HELLO).output, Answer), "no object")


if __name__ == "__main__":
    checks = (an_answer_and_its_stream, objects, an_object_beside_a_tool)
    kinds = {"chats": OpenAIChatModel, "responses": OpenAIResponsesModel}
    run(**{f"{check.__name__}, {name}": partial(check, kind) for name, kind in kinds.items() for check in checks})
