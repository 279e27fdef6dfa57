"""openai-agents: a tool call, its result and an answer, over chats and over responses, whole and streamed."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import openai
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel

from benchmarks.clients.checks import BASE_URL, MODEL, expect, run

set_tracing_disabled(True)
_HELLO = "What is 2 plus 3?"


class Answer(BaseModel):
    is_even: bool


@function_tool  # type: ignore[untyped-decorator]
def look(far: bool) -> str:
    """Looks."""
    return "five"


def _model(kind: type[Any]) -> Model:
    client = openai.AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key="none", max_retries=0)
    return kind(model=MODEL, openai_client=client)


def an_answer(kind: type[Any]) -> None:
    agent = Agent(name="a", instructions="Be short.", model=_model(kind), model_settings=ModelSettings(max_tokens=40))
    found = Runner.run_sync(agent, _HELLO)
    usage = found.context_wrapper.usage
    expect(isinstance(found.final_output, str) and usage.output_tokens > 0, (found, usage))
    again = Runner.run_sync(agent, [*found.to_input_list(), {"role": "user", "content": _HELLO}])
    expect(again.context_wrapper.usage.input_tokens > usage.input_tokens, again)


def a_tool_and_its_result(kind: type[Any]) -> None:
    """Check a forced call and the answer after it, which is not forced."""
    found = Runner.run_sync(_with_tool(kind), _HELLO)
    kinds = [item.type for item in found.new_items]
    expect(kinds[:2] == ["tool_call_item", "tool_call_output_item"] and kinds[-1] == "message_output_item", kinds)
    expect(found.context_wrapper.usage.requests == 2, found.context_wrapper.usage)


def a_stream(kind: type[Any]) -> None:
    async def names() -> list[str]:
        found = Runner.run_streamed(_with_tool(kind), _HELLO)
        return [event.name async for event in found.stream_events() if event.type == "run_item_stream_event"]

    found = asyncio.run(names())
    expect(found[:2] == ["tool_called", "tool_output"] and found[-1] == "message_output_created", found)


def an_object(kind: type[Any]) -> None:
    agent = Agent(name="a", model=_model(kind), output_type=Answer, model_settings=ModelSettings(max_tokens=100))
    expect(isinstance(Runner.run_sync(agent, _HELLO).final_output, Answer), "no object")


def _with_tool(kind: type[Any]) -> Agent[Any]:
    settings = ModelSettings(tool_choice="look", max_tokens=100)
    return Agent(name="a", model=_model(kind), tools=[look], model_settings=settings)


if __name__ == "__main__":
    checks = (an_answer, a_tool_and_its_result, a_stream, an_object)
    kinds = {"chats": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
    run(**{f"{check.__name__}, {name}": partial(check, kind) for name, kind in kinds.items() for check in checks})
