"""langchain-openai: chat models, completion models and vectors as chains use them."""

from __future__ import annotations

import asyncio

from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

from benchmarks.clients.checks import BASE_URL, MODEL, expect, run

_WHERE = {"model": MODEL, "base_url": f"{BASE_URL}/v1", "api_key": "none", "max_retries": 0}
chat = ChatOpenAI(**_WHERE, stream_usage=True, max_tokens=8, seed=1)


def invoke_tells_usage() -> None:
    usage = chat.invoke("Hi").usage_metadata
    expect(usage is not None and usage["output_tokens"] > 0, usage)


def stream_says_the_same() -> None:
    pieces = list(chat.stream("Hi"))
    expect("".join(piece.content for piece in pieces) == chat.invoke("Hi").content, pieces)
    expect(any(piece.usage_metadata for piece in pieces), pieces)


def batch_of_three() -> None:
    expect(len(chat.batch(["a", "b", "c"])) == 3, "three answers")


def asynchronous() -> None:
    expect(bool(asyncio.run(chat.ainvoke("Hi")).content), "an empty answer")


def structured_output() -> None:
    schema = {"title": "answer", "type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"],
              "additionalProperties": False}  # fmt: skip
    for method in ("json_schema", "function_calling"):
        model = ChatOpenAI(**_WHERE, max_tokens=100).with_structured_output(schema, method=method)
        found = model.invoke("Is 2 more than 1?")
        expect(isinstance(found["yes"], bool), (method, found))


def logprobs() -> None:
    found = chat.bind(logprobs=True, top_logprobs=2).invoke("Hi").response_metadata["logprobs"]["content"]
    expect(len(found) > 0, found)


def completion_model() -> None:
    expect(isinstance(OpenAI(**_WHERE, max_tokens=4).invoke("one two"), str), "no text")


def vectors() -> None:
    found = OpenAIEmbeddings(**_WHERE, check_embedding_ctx_length=False).embed_documents(["one", "two"])
    expect(len(found) == 2 and len(found[0]) == len(found[1]) > 0, found)


if __name__ == "__main__":
    run(invoke_tells_usage, stream_says_the_same, batch_of_three, asynchronous, structured_output, logprobs,
        completion_model, vectors)  # fmt: skip
