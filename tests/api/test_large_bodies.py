"""Bodies that are large or odd: what they cost the event loop, and what is refused before it costs anything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from app.api.generation import MAX_LONGER_TEXT, USUAL_CHARACTERS_PER_TOKEN
from app.api.prepared_request import RequestLimits
from app.engine.request import Pooling
from app.text import Tokenizer
from app.text.tool_calls import FORMATS
from tests.kit.service import MAX_MODEL_LEN, Connection, Service, say
from tests.stalls import slowness, stalls_of_loop
from tests.text.tool_calls.templates import TEMPLATES, tokenizer_with

USER = {"role": "user", "content": "Hi"}
LONG = "ab cd " * 300_000
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


class CountingTokenizer(Tokenizer):
    """Counts what it is asked to encode."""

    def __init__(self, pretrained: PreTrainedTokenizerFast) -> None:
        super().__init__(pretrained)
        self.num_texts = self.num_characters = 0

    def encode(self, text: str, **options: Any) -> tuple[int, ...]:
        self.num_texts += 1
        self.num_characters += len(text)
        return super().encode(text, **options)

    def encode_all(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        self.num_texts += len(texts)
        return super().encode_all(texts)


@pytest.fixture
def counting(tokenizer: Tokenizer) -> CountingTokenizer:
    return CountingTokenizer(tokenizer._pretrained)


def of_words() -> Tokenizer:
    """A tokenizer that passes over white space."""
    backend = Backend(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def nested(depth: int, times: int) -> list[Any]:
    one: list[Any] = []
    for _ in range(depth):
        one = [one]
    return [one] * times


HOSTILE: dict[str, tuple[str, dict[str, Any]]] = {
    "one text": ("/v1/completions", {"prompt": LONG * 2}),
    "white space": ("/v1/completions", {"prompt": " " * 4_000_000}),
    "one letter": ("/v1/completions", {"prompt": "a" * 4_000_000}),
    "token ids": ("/v1/completions", {"prompt": [3] * 1_000_000}),
    "lists of ids": ("/v1/completions", {"prompt": [[3] * 90] * 10_000}),
    "texts": ("/v1/completions", {"prompt": ["a" * 350] * 10_000}),
    "lists": ("/v1/completions", {"prompt": "Hi", "x": [[]] * 1_300_000}),
    "nested lists": ("/v1/completions", {"prompt": "Hi", "x": nested(150, 350)}),
    "unknown fields": ("/v1/completions", {"prompt": "Hi", **{f"k{n}": 1 for n in range(50_000)}}),
    "logit_bias": ("/v1/completions", {"prompt": "Hi", "logit_bias": {str(n): 1 for n in range(50_000)}}),
    "bad_words": ("/v1/completions", {"prompt": "Hi", "bad_words": ["a"] * 1_000_000}),
    "a schema": (
        "/v1/completions",
        {"prompt": "Hi", "structured_outputs": {"json": {f"k{n}": 1 for n in range(50_000)}}},
    ),
    "a schema as text": ("/v1/completions", {"prompt": "Hi", "structured_outputs": {"json": "[" + "[]," * 1_250_000}}),
    "messages": ("/v1/chat/completions", {"messages": [USER] * 4096}),
    "parts": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 30}] * 500},
    ),
    "calls": ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [CALL] * 100}] * 70}),
    "arguments": (
        "/v1/chat/completions",
        {"messages": [USER, {"role": "assistant", "tool_calls": [
            {**CALL, "function": {"name": "f", "arguments": '{"a": [' + "[]," * 1_250_000 + "[]]}"}}]}]},
    ),
    "tools": (
        "/v1/chat/completions",
        {"messages": [USER], "tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {f"k{n}": 1 for n in range(50_000)}}}]},
    ),
    "a prediction": (
        "/v1/chat/completions",
        {"messages": [USER], "prediction": {"type": "content", "content": LONG * 2}},
    ),
    "template variables": ("/v1/chat/completions", {"messages": [USER], "chat_template_kwargs": {"a": [[]] * 50_000}}),
    "items": ("/v1/responses", {"input": [{"role": "user", "content": "x"}] * 4096}),
    "metadata": ("/v1/responses", {"input": "Hi", "metadata": {"a": [1] * 1_000_000}}),
    "echoed tools": (
        "/v1/responses",
        {"input": "Hi", "stream": True, "tool_choice": "none", "tools": [
            {"type": "function", "name": "f", "description": "é" * 15_000}] * 128},
    ),
    "inputs": ("/v1/embeddings", {"input": ["a" * 1900] * 2048}),
    "a text to count": ("/tokenize", {"prompt": "ab cd " * 160_000, "return_token_strs": True}),
    "ids to decode": ("/detokenize", {"tokens": [300] * 1_000_000}),
}  # fmt: skip


@pytest.mark.usefixtures("collected_as_served")
@pytest.mark.parametrize("name", HOSTILE)
async def test_no_body_within_the_limits_stops_the_loop(name: str) -> None:
    path, body = HOSTILE[name]
    content = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    assert len(content) <= RequestLimits().max_body_bytes
    tokenizer = tokenizer_with(TEMPLATES["hermes"])
    service = Service(tokenizer, say(tokenizer, "3 4 5."), tool_format=FORMATS["hermes"], pooling=Pooling.LAST)
    chunks = [content[start : start + 65_536] for start in range(0, len(content), 65_536)]

    headers = {"content-type": "application/json"}
    async with stalls_of_loop() as stalls, Connection(service.app, "POST", path, chunks, headers) as connection:
        await connection.finished()
    status, longest_s, longest_process_s = connection.answer().status, stalls.longest_s, stalls.longest_process_s
    assert status in (200, 400)
    assert longest_s < 0.05 * slowness(), "what the loop itself computes"
    assert longest_process_s < 0.3, "what other threads compute with the interpreter lock"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": ["Hi", LONG]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/embeddings", {"input": LONG}),
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": 5}),
    ],
    ids=["text", "texts", "chat", "responses", "embeddings", "counted", "counted chat", "cut"],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    counting: CountingTokenizer, path: str, body: dict[str, Any]
) -> None:
    answer = Service(counting, pooling=Pooling.LAST).call("POST", path, body)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded"), answer.body
    assert counting.num_characters < 100_000


def test_a_text_is_refused_by_its_tokens_and_not_by_its_length() -> None:
    tokenizer = of_words()
    service = Service(tokenizer, say(tokenizer, "a"))
    prompt = "a" + " " * (100 * USUAL_CHARACTERS_PER_TOKEN * MAX_MODEL_LEN) + "a"
    assert service.complete(prompt=prompt).status == 200
    assert service.request.prompt_token_ids == (0, 0)
    assert service.complete(prompt="a " * (100 * MAX_MODEL_LEN)).error["code"] == "context_length_exceeded"


def test_texts_that_are_counted_or_cut_may_be_longer_than_the_context(service: Service) -> None:
    text = "ab cd " * (MAX_LONGER_TEXT // 12)
    assert service.call("POST", "/tokenize", {"prompt": text}).json["count"] > 100 * MAX_MODEL_LEN
    assert service.complete(prompt=text, truncate_prompt_tokens=7).status == 200
    assert len(service.request.prompt_token_ids) == 7


def test_long_sequences_of_ids_become_the_same_text_as_short_ones(service: Service) -> None:
    ids = list(service.tokenizer.encode("Ein Karussell dreht sich, é und 😀. " * 200, add_special_tokens=False))
    assert len(ids) > 2000
    assert service.call("POST", "/detokenize", {"tokens": ids}).json["prompt"] == service.tokenizer._backend.decode(ids)


def test_earlier_calls_of_one_turn_have_the_limit_of_a_message(service: Service) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    answer = service.call("POST", "/v1/responses", {"input": [{"role": "user", "content": "Hi"}, *[call] * 200]})
    assert answer.status == 400
    assert "128" in answer.error["message"]


@pytest.mark.parametrize("escape", ["\\ud800", "\\udfff", "x\\ud83dx"])
def test_half_of_a_surrogate_pair_in_the_arguments_of_a_call_is_a_bad_request(escape: str) -> None:
    tokenizer = tokenizer_with(TEMPLATES["hermes"])
    service = Service(tokenizer, say(tokenizer, "3"), tool_format=FORMATS["hermes"])
    call = {**CALL, "function": {"name": "f", "arguments": f'{{"a": "{escape}"}}'}}
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "b"},
    ]
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = service.call("POST", path, {"messages": messages})
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert "surrogate" in answer.error["message"]
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": call["function"]["arguments"]},  # type: ignore[index]
        {"type": "function_call_output", "call_id": "a", "output": "b"},
    ]
    assert service.call("POST", "/v1/responses", {"input": items}).status == 400
