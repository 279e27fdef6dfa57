"""Every body and event of OpenAI's endpoints is one of the `openai` package's own models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from openai.pagination import SyncCursorPage, SyncPage
from openai.types import Batch, Completion, CreateEmbeddingResponse, FileDeleted, FileObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.shared import ErrorObject

from app.engine.request import FinishReason, Pooling
from app.errors import Overloaded, StepFailed
from app.text import Tokenizer
from app.text.reasoning import MARKS
from app.text.tool_calls import FORMATS
from tests.api.published_types import event_of, strictly
from tests.api.test_token_details import telling
from tests.kit.service import CALL, ENDED, Service, calling, http_client, line_of, sent_batch, vector
from tests.waiting import until

FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FLAT = {"type": "function", **FUNCTION["function"]}  # type: ignore[dict-item]
NAMED = {"type": "function", "function": {"name": "f"}}
LENGTH = FinishReason.LENGTH
THOUGHT = "<think>\nHm.\n</think>\n\n3 4."


def spoken(tokenizer: Tokenizer, text: str, **how: Any) -> Service:
    return calling(tokenizer, text, **how)


def scored(tokenizer: Tokenizer, text: str) -> Service:
    return Service(tokenizer, telling(tokenizer, text), tool_format=FORMATS["hermes"], max_model_len=2000)


CHATS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "text": ("3 4 5.", {}, {}),
    "length": ("3 4", {"reason": LENGTH}, {}),
    "several": ("3 4", {}, {"n": 2}),
    "stop": ("3 4 5.", {}, {"stop": [" 5"]}),
    "reasoning": (THOUGHT, {"marks": MARKS[0]}, {}),
    "reasoning cut": (THOUGHT[:10], {"marks": MARKS[0], "reason": LENGTH}, {}),
    "calls": (f"Well.\n{CALL}\n{CALL}", {}, {"tools": [FUNCTION]}),
    "call cut": (CALL[:40], {"reason": LENGTH}, {"tools": [FUNCTION]}),
    "call forced": ('{"a": 1}', {}, {"tools": [FUNCTION], "tool_choice": NAMED}),
    "calls required": ('[{"name": "f", "parameters": {}}]', {}, {"tools": [FUNCTION], "tool_choice": "required"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CHATS)
def test_chats(tools_tokenizer: Tokenizer, case: str) -> None:
    text, how, fields = CHATS[case]
    service = spoken(tools_tokenizer, text, **how)
    whole = strictly(ChatCompletion, service.chat(**fields).body)
    assert whole.usage is not None
    chunks = service.chat(**fields, stream=True, stream_options={"include_usage": True}).data[:-1]
    read = [strictly(ChatCompletionChunk, chunk) for chunk in chunks]
    assert read[-1].usage == whole.usage
    assert {choice.finish_reason for chunk in read for choice in chunk.choices} - {None} == {
        choice.finish_reason for choice in whole.choices
    }


def test_log_probabilities_of_chats(tools_tokenizer: Tokenizer) -> None:
    service = scored(tools_tokenizer, "3 4 é.")
    fields = {"logprobs": True, "top_logprobs": 2}
    found = strictly(ChatCompletion, service.chat(**fields).body).choices[0].logprobs
    assert found is not None
    assert found.content
    for chunk in service.chat(**fields, stream=True).data[:-1]:
        strictly(ChatCompletionChunk, chunk)


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"max_tokens": 2}, {"logprobs": 2}])
def test_completions(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    service = Service(tokenizer, telling(tokenizer, "3 4 5."))
    assert strictly(Completion, service.complete(**fields).body).usage is not None
    for chunk in service.complete(**fields, stream=True, stream_options={"include_usage": True}).chunks:
        for choice in chunk["choices"]:
            # Before the last one it is null, as at OpenAI. The model has only whole completions.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        strictly(Completion, chunk)


RESPONSES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "text": ("3 4 5.", {}, {"instructions": "Count.", "metadata": {"a": "b"}, "user": "me", "max_output_tokens": 90}),
    "nothing": ("", {}, {}),
    "length": ("3 4", {"reason": LENGTH}, {}),
    "reasoning": (THOUGHT, {"marks": MARKS[0]}, {"reasoning": {"effort": "low", "summary": "auto"}}),
    "reasoning cut": (THOUGHT[:10], {"marks": MARKS[0], "reason": LENGTH}, {}),
    "calls": (f"Well.\n{CALL}\n{CALL}", {}, {"tools": [FLAT]}),
    "call cut": (CALL[:40], {"reason": LENGTH}, {"tools": [FLAT]}),
    "call forced": ('{"a": 1}', {}, {"tools": [FLAT], "tool_choice": {"type": "function", "name": "f"}}),
    "calls required": ('[{"name": "f", "parameters": {}}]', {}, {"tools": [FLAT], "tool_choice": "required"}),
    "schema": ("{}", {}, {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}}),
    "object": ("{}", {}, {"text": {"format": {"type": "json_object"}}}),
    "no schema": ("3", {}, {"tools": [{"type": "function", "name": "f"}], "service_tier": "flex"}),
}  # fmt: skip


@pytest.mark.parametrize("case", RESPONSES)
def test_responses(tools_tokenizer: Tokenizer, case: str) -> None:
    text, how, fields = RESPONSES[case]
    checked_response(spoken(tools_tokenizer, text, **how), **fields)


def checked_response(service: Service, **fields: Any) -> tuple[Response, list[Any]]:
    """The response and its events."""
    answer = service.call("POST", "/v1/responses", {"input": "Hi"} | fields)
    whole = strictly(Response, answer.body)
    events = service.call("POST", "/v1/responses", {"input": "Hi", "stream": True} | fields).events
    read = [event_of(ResponseStreamEvent, event) for event in events]
    assert read[-1].type == f"response.{whole.status}"
    assert read[-1].response.incomplete_details == whole.incomplete_details
    assert [item.type for item in read[-1].response.output] == [item.type for item in whole.output]
    return whole, read


def test_log_probabilities_of_responses(tools_tokenizer: Tokenizer) -> None:
    checked_response(scored(tools_tokenizer, "3 4 é."), include=["message.output_text.logprobs"], top_logprobs=2)


def test_a_response_that_fails(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, lambda request: [(20,), StepFailed("no")])
    events = service.call("POST", "/v1/responses", {"input": "Hi", "stream": True}).events
    assert [event_of(ResponseStreamEvent, event) for event in events][-1].response.error.code == "server_error"


def test_errors(tokenizer: Tokenizer) -> None:
    full = Service(tokenizer, lambda request: [Overloaded("full")])
    for answer in (full.chat(), full.chat(n="a"), full.complete(model="b"), full.call("GET", "/v1/nothing")):
        strictly(ErrorObject, answer.error)
    begun = Service(tokenizer, lambda request: [(20,), Overloaded("full")])
    strictly(ErrorObject, begun.chat(stream=True).chunks[-1]["error"])


def test_embeddings(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, lambda request: vector(request, [3.0, 4.0, 0.0, 1.0]), pooling=Pooling.LAST)
    for given in ("a", ["a", "b"]):
        answer = service.call("POST", "/v1/embeddings", {"input": given, "encoding_format": "float"})
        assert strictly(CreateEmbeddingResponse, answer.body).data


def test_models(service: Service) -> None:
    [model] = strictly(SyncPage[Model], service.call("GET", "/v1/models").body).data
    strictly(Model, service.call("GET", f"/v1/models/{model.id}").body)


async def test_files_and_batches(service: Service, tmp_path: Path) -> None:
    async with http_client(service, tmp_path) as client:
        content = line_of("a") + line_of("b", n="c")
        begun = await client.post("/v1/batches", json=await sent_batch(client, content))
        first = strictly(Batch, begun.content)
        last = strictly(
            Batch,
            (await until(lambda: client.get(f"/v1/batches/{first.id}"), lambda a: a.json()["status"] in ENDED)).content,
        )
        assert (last.status, last.usage is not None) == ("completed", True)
        for file_id in (last.output_file_id, last.error_file_id):
            for line in (await client.get(f"/v1/files/{file_id}/content")).text.splitlines():
                checked_line(json.loads(line))
            strictly(FileObject, (await client.get(f"/v1/files/{file_id}")).content)
        assert strictly(SyncCursorPage[Batch], (await client.get("/v1/batches")).content).data
        assert len(strictly(SyncCursorPage[FileObject], (await client.get("/v1/files")).content).data) == 3
        strictly(FileDeleted, (await client.delete(f"/v1/files/{last.output_file_id}")).content)
        wrong = await client.post("/v1/batches", json=await sent_batch(client, b"no line"))
        failed = await until(
            lambda: client.get(f"/v1/batches/{wrong.json()['id']}"), lambda a: a.json()["status"] in ENDED
        )
        assert cast(Batch, strictly(Batch, failed.content)).errors is not None


def checked_line(line: dict[str, Any]) -> None:
    body = line["response"]["body"]
    strictly(ErrorObject, body["error"]) if "error" in body else strictly(Completion, body)
