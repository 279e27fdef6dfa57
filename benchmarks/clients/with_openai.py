"""The openai package: chat, streams, completions, log-probabilities, tools, errors, batches, responses, vectors."""

from __future__ import annotations

import io
import json
import time
from functools import partial
from typing import Any

import openai

from benchmarks.clients.checks import BASE_URL, MODEL, expect, raised, run

_PATIENCE_S = 60.0
client = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key="none", max_retries=0)
HELLO: list[Any] = [{"role": "user", "content": "What is 2 plus 3?"}]


def models() -> None:
    name = client.models.list().data[0].id
    expect(name == MODEL and client.models.retrieve(name).id == name, name)


def chat_and_its_stream_agree() -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_completion_tokens": 8, "seed": 1}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    expect(text == whole.choices[0].message.content, (text, whole))
    expect(not chunks[-1].choices and chunks[-1].usage == whole.usage, chunks[-1])


def chat_logprobs() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=6, logprobs=True, top_logprobs=3, temperature=0
    )
    entries = answer.choices[0].logprobs
    expect(entries is not None and entries.content is not None and answer.usage is not None, answer)
    for entry in entries.content:  # type: ignore[union-attr]
        expect(entry.logprob == entry.top_logprobs[0].logprob, entry)
    expect(len(entries.content) == answer.usage.completion_tokens, answer)  # type: ignore


def completions_echo_token_ids_with_logprobs() -> None:
    answer = client.completions.create(
        model=MODEL, prompt=[[300, 301, 302, 303]], max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    scored = answer.choices[0].logprobs
    expect(scored is not None and scored.token_logprobs is not None and scored.tokens is not None, answer)
    expect(scored.token_logprobs[0] is None and len(scored.tokens) == 5, scored)  # type: ignore


def several_choices_and_prompts() -> None:
    answer = client.completions.create(model=MODEL, prompt=["one", "two"], n=2, max_tokens=4)
    expect([choice.index for choice in answer.choices] == [0, 1, 2, 3], answer)


def a_forced_tool_call() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    asked: dict[str, Any] = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "add"}}}
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=100, **asked)
    [call] = answer.choices[0].message.tool_calls
    expect(call.type == "function" and call.function.name == "add", answer)


def an_output_that_keeps_to_a_schema() -> None:
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"],
              "additionalProperties": False}  # fmt: skip
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
    )  # fmt: skip
    expect(isinstance(json.loads(answer.choices[0].message.content or "")["yes"], bool), answer)


def a_reply_and_its_stream() -> None:
    reply = client.responses.create(model=MODEL, input="Hi", max_output_tokens=16, store=False)
    events = list(client.responses.create(model=MODEL, input="Hi", max_output_tokens=16, store=False, stream=True))
    expect(reply.status in ("completed", "incomplete") and reply.usage is not None, reply)
    expect(events[0].type == "response.created" and events[-1].type in ("response.completed", "response.incomplete"),
           [event.type for event in events])  # fmt: skip


def a_response_that_is_kept_and_read_on() -> None:
    begun = client.responses.create(
        model=MODEL, input="Hi", max_output_tokens=16, store=True, background=True, stream=True
    )
    first = next(iter(begun))
    begun.close()
    expect(first.type == "response.created", first)
    response_id = first.response.id  # type: ignore[union-attr]
    with client.responses.stream(response_id=response_id, starting_after=0) as stream:
        events = list(stream)
    expect([event.sequence_number for event in events] == list(range(1, len(events) + 1)), events)
    last = events[-1].response  # type: ignore[union-attr]
    expect(client.responses.retrieve(response_id).output_text == last.output_text, last)
    next_one = client.responses.create(model=MODEL, input="And?", max_output_tokens=4, previous_response_id=response_id)
    expect(next_one.previous_response_id == response_id, next_one)
    client.responses.delete(response_id)
    raised(openai.NotFoundError, partial(client.responses.retrieve, response_id))


def embeddings() -> None:
    answer = client.embeddings.create(model=MODEL, input=["one", "two"])  # base64, the package's default
    length = sum(number * number for number in answer.data[0].embedding)
    expect(len(answer.data) == 2 and abs(length - 1) < 1e-3, length)


def errors_are_typed() -> None:
    for kind, wrong in ((openai.NotFoundError, {"model": "nope"}), (openai.BadRequestError, {"n": -1})):
        asked: dict[str, Any] = {"model": MODEL, "messages": HELLO} | wrong
        error = raised(kind, partial(client.chat.completions.create, **asked))
        expect(isinstance(error, openai.APIStatusError) and bool(error.type), error)


def a_batch_from_upload_to_results() -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 4}
    names = {f"line-{number}" for number in range(20)}
    lines = [{"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body} for name in names]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("batch.jsonl", io.BytesIO(content)), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"from": "a check"}
    )
    deadline = time.monotonic() + _PATIENCE_S
    while batch.status not in ("completed", "failed", "expired", "cancelled") and time.monotonic() < deadline:
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    expect(batch.status == "completed" and batch.output_file_id is not None, batch)
    results = [json.loads(line) for line in client.files.content(batch.output_file_id or "").text.splitlines()]
    expect({result["custom_id"] for result in results} == names, results)
    expect(client.files.delete(file.id).deleted, file)


if __name__ == "__main__":
    run(
        models, chat_and_its_stream_agree, chat_logprobs, completions_echo_token_ids_with_logprobs,
        several_choices_and_prompts, a_forced_tool_call, an_output_that_keeps_to_a_schema, a_reply_and_its_stream,
        a_response_that_is_kept_and_read_on, embeddings, errors_are_typed, a_batch_from_upload_to_results,
    )  # fmt: skip
