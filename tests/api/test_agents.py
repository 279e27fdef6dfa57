"""Coding agents as they are: bodies that Claude Code 2.1 and Codex 0.171 sent, and other shapes of their two APIs.

`recorded/` has the bodies, with shortened texts and without most of their tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent

from app.text import Tokenizer
from app.text.tool_calls import FORMATS
from tests.api.published_types import event_of, strictly
from tests.kit.service import Answer, Service, calling, say
from tests.text.tool_calls.templates import HERMES, tokenizer_with

RECORDED = {
    name: json.loads((Path(__file__).parent / "recorded" / f"{name}.json").read_text(encoding="utf-8"))
    for name in ("claude_code", "codex")
}
IGNORED = {
    "claude_code": ["output_config.effort", "output_config.effort", "thinking.budget_tokens"],
    "codex": [
        "client_metadata, tools.web_search, include.reasoning.encrypted_content, reasoning.summary, reasoning.effort",
        "client_metadata, tools.web_search, include.reasoning.encrypted_content, reasoning.summary, reasoning.effort",
        "client_metadata, tools.web_search, include.reasoning.encrypted_content",
    ],
}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
NAMESPACE = {"type": "namespace", "name": "files", "description": "Reads files.", "tools": [FUNCTION]}
QUESTION = {"role": "user", "content": "Hi"}


def sent(service: Service, entry: Mapping[str, Any], **fields: Any) -> Answer:
    body = {**entry["body"], "model": "demo", "max_tokens": 100, **fields}
    if entry["path"] == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    path, _, query = entry["path"].partition("?")
    return service.call("POST", path, body, entry.get("headers"), query)


def answering(text: str, template: str = HERMES) -> Service:
    tokenizer = tokenizer_with(template)
    return Service(
        tokenizer, say(tokenizer, text), names=("demo",), tool_format=FORMATS["hermes"], max_model_len=40_000
    )


def prompt_of(service: Service) -> str:
    return service.tokenizer.decode(service.generate.requests[-1].prompt_token_ids, skip_special_tokens=False)


def texts_of(body: Mapping[str, Any]) -> list[str]:
    """The texts of a recorded conversation, in its order."""
    items: Sequence[Any] = body.get("messages") or body["input"]
    parts = [part for item in items for part in _parts(item.get("content") or item.get("output") or "")]
    return [part.get("text") or part.get("content") for part in parts if part["type"] != "tool_use"]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("agent", RECORDED)
def test_what_an_agent_sends_is_answered(agent: str, number: int) -> None:
    entry = RECORDED[agent][number]
    service = answering("3 4 5.")
    answer = sent(service, entry)
    assert (answer.status, answer.headers["x-carousel-ignored"]) == (200, IGNORED[agent][number])
    last = answer.events[-1]
    assert last["type"] in ("message_stop", "response.completed")
    prompt, at = prompt_of(service), 0
    for text in filter(None, texts_of(entry["body"])):
        assert text in prompt[at:], "each text stands in the prompt, in its order"
        at = prompt.index(text, at)


@pytest.mark.parametrize("agent", RECORDED)
def test_strict_agents_learn_what_has_no_effect(agent: str) -> None:
    entry = RECORDED[agent][2]
    answer = sent(answering("3"), entry | {"headers": {"x-strict": "true"}})
    assert answer.status == 400
    assert any(words in answer.body.decode() for words in ("has no effect here", "there is no field")), answer.body


def test_claude_code_gets_its_call() -> None:
    call = '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call>'
    events = sent(answering(call), RECORDED["claude_code"][0]).events
    [started] = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert (started["type"], started["name"]) == ("tool_use", "Bash")


def test_codex_gets_calls_of_functions_in_namespaces_by_their_own_names() -> None:
    call = '<tool_call>\n{"name": "multi_agent_v1.close_agent", "arguments": {"target": "a"}}\n</tool_call>'
    service = answering(call)
    events = sent(service, RECORDED["codex"][1]).events
    for event in events:
        event_of(ResponseStreamEvent, event)
    response = strictly(Response, events[-1]["response"])
    [item] = response.output
    assert (item.type, item.namespace, item.name) == ("function_call", "multi_agent_v1", "close_agent")
    assert [tool.type for tool in response.tools] == ["function", "namespace"], "what the model was offered"
    told = prompt_of(service)
    assert '"name": "multi_agent_v1.close_agent", "description": "Tools for spawning and managing sub-agents.' in told


def test_a_call_in_a_namespace_is_told_as_the_model_has_written_it(tools_tokenizer: Tokenizer) -> None:
    call = '<tool_call>\n{"name": "files.f", "arguments": {}}\n</tool_call>'
    service = calling(tools_tokenizer, call)
    body = {"input": [QUESTION], "tools": [NAMESPACE]}
    [item] = service.call("POST", "/v1/responses", body).json["output"]
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "5"}
    again = {**body, "input": [QUESTION, item, result]}
    assert service.call("POST", "/v1/responses", again).status == 200
    assert f"<|assistant|>{call}<|end|><|tool|>5" in prompt_of(service)


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"context_management": {"edits": []}}, None),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, None),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919", "trigger": {"value": 9}}]}},
            "context_management.edits.clear_tool_uses_20250919",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]},
            "tools.web_search_20250305",
        ),
        ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "x"}]}, "tools.mcp_toolset"),
        ({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}, "mcp_servers"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        (
            {"tools": [{"name": "f", "input_schema": {}, "defer_loading": True, "cache_control": {}}]},
            "tools.defer_loading",
        ),
        (
            {"messages": [QUESTION, {"role": "assistant", "content": [
                {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
                {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
                {"type": "text", "text": "So."},
            ]}, QUESTION]},
            "messages.server_tool_use, messages.web_search_tool_result",
        ),
    ],
)  # fmt: skip
def test_shapes_of_messages_that_have_no_effect(fields: dict[str, Any], ignored: str | None) -> None:
    service = answering("3")
    body = {"messages": [QUESTION], "max_tokens": 9} | fields
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = service.call("POST", path, body, query="beta=true")
        assert (answer.status, answer.headers.get("x-carousel-ignored")) == (200, ignored)


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"tools": [{"type": "web_search"}, {"type": "local_shell"}]}, "tools.web_search, tools.local_shell"),
        (
            {"tools": [{"type": "mcp", "server_label": "x", "server_url": "https://x"}, FUNCTION]},
            "tools.mcp",
        ),
        ({"include": ["web_search_call.action.sources", "later.value"]},
         "include.web_search_call.action.sources, include.later.value"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"verbosity": "medium"}}, None),
        ({"context_management": [{"type": "compaction", "compact_threshold": 9}]}, "context_management"),
        ({"client_metadata": {"a": "b"}, "stream_options": {"include_obfuscation": False}, "stream": True},
         "client_metadata, stream_options.include_obfuscation"),
        ({"input": [QUESTION, {"type": "web_search_call", "id": "w", "status": "completed"}, QUESTION]},
         "input.web_search_call"),
    ],
)  # fmt: skip
def test_shapes_of_responses_that_have_no_effect(fields: dict[str, Any], ignored: str | None) -> None:
    answer = answering("3").call("POST", "/v1/responses", {"input": "Hi"} | fields)
    assert (answer.status, answer.headers.get("x-carousel-ignored")) == (200, ignored)


def test_a_choice_of_a_tool_that_nothing_here_runs_is_refused() -> None:
    service = answering("3")
    body: dict[str, Any] = {"input": "Hi", "tools": [{"type": "web_search"}]}
    for choice, words in (("required", "tool_choice requires `tools`"), ({"type": "web_search"}, "'function'")):
        answer = service.call("POST", "/v1/responses", body | {"tool_choice": choice})
        assert (answer.status, words in answer.error["message"]) == (400, True)


def test_an_image_in_the_result_of_a_call_is_told_and_not_seen() -> None:
    service = answering("3")
    use = {"type": "tool_use", "id": "a", "name": "Read", "input": {}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    turns = [
        QUESTION,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [image]}]},
    ]
    answer = service.call("POST", "/v1/messages", {"messages": turns, "max_tokens": 9})
    assert (answer.status, answer.headers["x-carousel-ignored"]) == (200, "messages.image")
    assert "[An image, which this model cannot see.]" in prompt_of(service)
    items = [
        QUESTION,
        {"type": "function_call", "call_id": "a", "name": "view_image", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image", "image_url": "data:"}]},
    ]
    answer = service.call("POST", "/v1/responses", {"input": items})
    assert (answer.status, answer.headers["x-carousel-ignored"]) == (200, "input.input_image")
    assert "[An image, which this model cannot see.]" in prompt_of(service)


def test_a_system_message_between_turns_keeps_its_place() -> None:
    service = answering("3")
    turns = [QUESTION, {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}]
    assert service.call("POST", "/v1/messages", {"messages": turns, "max_tokens": 9}).status == 200
    assert "<|user|>Hi<|end|><|system|>Be brief.<|end|>" in prompt_of(service)
    call = [{"role": "system", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]
    answer = service.call("POST", "/v1/messages", {"messages": [QUESTION, *call], "max_tokens": 9})
    assert answer.status == 400
    assert "has the role 'system', which may not have blocks of type 'tool_use'" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    "message",
    [
        {"content": [{"type": "refusal", "refusal": "I will not."}]},
        {"content": None, "refusal": "I will not."},
        {"refusal": "I will not.", "content": ""},
    ],
)
def test_a_refusal_in_the_history_is_what_the_assistant_said(message: dict[str, Any]) -> None:
    service = answering("3")
    assert service.chat(messages=[QUESTION, {"role": "assistant", **message}, QUESTION], max_tokens=1).status == 200
    assert "<|assistant|>I will not.<|end|>" in prompt_of(service)
    items = [QUESTION, {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}, QUESTION]
    assert service.call("POST", "/v1/responses", {"input": items}).status == 200
    assert "<|assistant|>I will not.<|end|>" in prompt_of(service)
