"""The anthropic package: messages, streams, tools, token counts, errors."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import anthropic

from benchmarks.clients.checks import BASE_URL, MODEL, expect, raised, run

os.environ.pop("ANTHROPIC_AUTH_TOKEN", None)
CLIENT = anthropic.Anthropic(base_url=BASE_URL, api_key="none", max_retries=0)
HELLO: list[Any] = [{"role": "user", "content": "What is 2 plus 3?"}]
GREEDY: Any = {"temperature": 0}  # the package has no name for this parameter
TOOL: Any = {
    "name": "look",
    "description": "Looks.",
    "strict": True,
    "input_schema": {"type": "object", "properties": {}, "additionalProperties": False},
}


def message() -> None:
    answer = CLIENT.messages.create(model=MODEL, max_tokens=8, system="Be short.", messages=HELLO, extra_body=GREEDY)
    expect(answer.content[0].type == "text" and answer.usage.output_tokens > 0, answer)
    expect(answer._request_id is not None, "no request id")


def stream_of_texts() -> None:
    asked: Any = {"model": MODEL, "max_tokens": 8, "messages": HELLO, "extra_body": GREEDY}
    with CLIENT.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = CLIENT.messages.create(**asked)
    expect(text == whole.content[0].text == final.content[0].text, (text, whole))
    expect(final.usage.output_tokens == whole.usage.output_tokens, (final.usage, whole.usage))
    expect(final.stop_reason == whole.stop_reason, (final, whole))


def stream_of_events() -> None:
    kinds = [event.type for event in CLIENT.messages.create(model=MODEL, max_tokens=4, messages=HELLO, stream=True)]
    expect(kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds)


def stop_sequence() -> None:
    whole = CLIENT.messages.create(model=MODEL, max_tokens=8, messages=HELLO, extra_body=GREEDY).content[0].text
    stop = whole[2:4]
    answer = CLIENT.messages.create(model=MODEL, max_tokens=8, messages=HELLO, extra_body=GREEDY, stop_sequences=[stop])
    expect((answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop), answer)


def forced_tool_call_and_its_result() -> None:
    asked: Any = {"model": MODEL, "max_tokens": 60, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "look"}}
    answer = CLIENT.messages.create(messages=HELLO, **asked)
    use = answer.content[-1]
    expect(use.type == "tool_use" and use.name == "look" and use.input == {}, answer)
    expect(answer.stop_reason == "tool_use", answer)
    with CLIENT.messages.stream(messages=HELLO, **asked) as stream:
        streamed = stream.get_final_message().content[-1]
    expect(streamed.type == "tool_use" and streamed.input == {}, streamed)
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "five"}]}
    turns = [*HELLO, {"role": "assistant", "content": answer.content}, result]
    # The bundled model's format of calls is unknown, so only a forced call can be offered.
    none: Any = {"type": "none"}
    after = CLIENT.messages.create(model=MODEL, max_tokens=8, messages=turns, tools=[TOOL], tool_choice=none)
    expect(after.usage.output_tokens > 0, after)


def token_count() -> None:
    counted = CLIENT.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens
    usage = CLIENT.messages.create(model=MODEL, max_tokens=1, messages=HELLO).usage
    expect(counted == usage.input_tokens + (usage.cache_read_input_tokens or 0), (counted, usage))


def models() -> None:
    page = CLIENT.models.list()
    expect(MODEL in [each.id for each in page] and not page.has_more, page)
    found = CLIENT.models.retrieve(MODEL)
    expect((found.type, found.display_name) == ("model", MODEL) and found.created_at.year > 2000, found)


def typed_errors() -> None:
    create = CLIENT.messages.create
    unknown = raised(anthropic.NotFoundError, partial(create, model="nope", max_tokens=1, messages=HELLO))
    expect(unknown.body["error"]["type"] == "not_found_error", unknown.body)
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://localhost/x.png"}}
    messages: Any = [{"role": "user", "content": [image]}]
    refused = raised(anthropic.BadRequestError, partial(create, model=MODEL, max_tokens=1, messages=messages))
    expect("image" in str(refused), refused)


if __name__ == "__main__":
    run(
        message, stream_of_texts, stream_of_events, stop_sequence, forced_tool_call_and_its_result, token_count,
        models, typed_errors,
    )  # fmt: skip
