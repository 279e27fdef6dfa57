"""litellm, under both provider names that it has for servers like this one."""

from __future__ import annotations

from functools import partial

import litellm

from benchmarks.clients.checks import BASE_URL, MODEL, expect, raised, run

_WHERE = {"api_base": f"{BASE_URL}/v1", "api_key": "none", "num_retries": 0}
HELLO = [{"role": "user", "content": "What is 2 plus 3?"}]
NAMES = (f"hosted_vllm/{MODEL}", f"openai/{MODEL}")


def chat() -> None:
    for name in NAMES:
        answer = litellm.completion(model=name, messages=HELLO, max_tokens=8, **_WHERE)
        expect(answer.usage.completion_tokens > 0, answer)


def stream() -> None:
    for name in NAMES:
        asked = {"model": name, "messages": HELLO, "max_tokens": 8, "seed": 1, **_WHERE}
        pieces = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **asked))
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        expect(text == litellm.completion(**asked).choices[0].message.content, text)


def text_completion() -> None:
    answer = litellm.text_completion(model=f"openai/{MODEL}", prompt="one two", max_tokens=4, **_WHERE)
    expect(isinstance(answer.choices[0].text, str), answer)


def forced_tool_call() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    answer = litellm.completion(
        model=NAMES[0], messages=HELLO, tools=[tool], tool_choice="required", max_tokens=60, **_WHERE
    )
    expect(answer.choices[0].message.tool_calls[0].function.name == "look", answer)


def vectors() -> None:
    answer = litellm.embedding(model=f"openai/{MODEL}", input=["one", "two"], encoding_format="float", **_WHERE)
    expect(len(answer.data) == 2, answer)


def typed_error() -> None:
    raised(litellm.NotFoundError, partial(litellm.completion, model="openai/nope", messages=HELLO, **_WHERE))


if __name__ == "__main__":
    run(chat, stream, text_completion, forced_tool_call, vectors, typed_error)
