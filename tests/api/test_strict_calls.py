"""Strict tools that the model may call: whatever it writes, what is read as a call keeps to its schema."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from llguidance import LLTokenizer

from app.engine.matcher import Matcher
from app.engine.request import Grammar, GrammarKind, Request, SamplingParams
from app.grammar.grammars import Grammars
from app.grammar.vocabulary import Vocabulary
from app.text import Tokenizer
from app.text.tool_calls import FORMATS, CallPiece, ToolFormat, ToolParser
from tests.grammar.documents import allowed_ids
from tests.kit.service import Service, say
from tests.text.tool_calls.templates import TEMPLATES, tokenizer_with

END, MAX_TOKENS = 267, 300
PLACES = {"p": {"enum": ["Ulm", "Oslo"]}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {"type": "object", "properties": {"place": {"$ref": "#/$defs/p"}, "day": {"enum": [1, 20]}},
                "required": ["place", "day"], "additionalProperties": False, "$defs": PLACES},
    "sun.rise-2": {"type": "object", "properties": {"up": {"type": "boolean"}}, "additionalProperties": False},
    "time": {"type": "object"},
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": name != "time"}}
    for name, schema in SCHEMAS.items()
]
BEGINNINGS = {
    "hermes": ["<tool_call>", "Let me see.\n<tool_call>"],
    "llama3": ["<|python_tag|>", '{"name": "weather"', ' {\n"name" :"time"', '{"name"', '{"parameters": 1'],
    "mistral": ["[TOOL_CALLS]", "Well. [TOOL_CALLS]"],
    "qwen3_coder": ["<tool_call>", "Well.\n\n<tool_call>"],
    "lfm2": ["<|tool_call_start|>", "Well.<|tool_call_start|>"],
    "granite": ["<|tool_call|>"],
    "nemotron": ["<TOOLCALL>", "Well.\n\n<TOOLCALL>"],
    "gemma4": ["<|tool_call>", "Well.<|tool_call>"],
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_with(TEMPLATES["hermes"])


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    made = Grammars(lambda: vocabulary_of(tokenizer))
    yield made
    made.close()


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    known = LLTokenizer(tokenizer._backend.to_str(), n_vocab=END + 1, slices=[])
    return Vocabulary(
        tokens=tuple(known.decode_bytes([token_id]) for token_id in range(END + 1)),
        special_token_ids=tuple(token_id for token_id in range(END + 1) if known.is_special_token(token_id)),
        eos_token_ids=(END,),
    )


def grammar_for(tokenizer: Tokenizer, form: ToolFormat, **fields: Any) -> Grammar | None:
    """What the engine is asked for."""
    service = Service(tokenizer, say(tokenizer, "."), tool_format=form, max_model_len=4000)
    assert service.chat(**{"tools": TOOLS} | fields).status == 200
    return service.request.sampling.grammar


def matcher(grammars: Grammars, grammar: Grammar) -> Matcher:
    request = Request(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1, grammar=grammar))
    found = grammars.matcher_of(request).result()
    assert found is not None
    return found


def written(matcher: Matcher, begun: tuple[int, ...], draw: random.Random) -> list[int]:
    """What a model without sense goes on with, to its end or for MAX_TOKENS."""
    token_ids = list(begun)
    for token_id in begun:
        assert token_id in allowed_ids(matcher)
        matcher.advance(token_id)
    while len(token_ids) < MAX_TOKENS:
        allowed = allowed_ids(matcher)
        may_end = END in allowed
        if allowed == [END] or (may_end and draw.random() < 0.2):
            break
        token_ids.append(draw.choice(allowed[: -1 if may_end else None]))
        matcher.advance(token_ids[-1])
        assert matcher.failure is None
    return token_ids


def calls_in(form: ToolFormat, text: str) -> list[CallPiece]:
    parser = ToolParser(form, SCHEMAS, is_strict=True)
    pieces = [piece for part in (*parser.push(text), *parser.flush()) for piece in part.calls]
    return [piece for piece in pieces if piece.name is not None]


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_every_call_that_is_read_keeps_to_its_schema(
    tokenizer: Tokenizer, grammars: Grammars, form: ToolFormat
) -> None:
    grammar = grammar_for(tokenizer, form)
    assert grammar is not None
    assert grammar.kind is GrammarKind.TAGS
    names = set()
    for seed in range(60):
        draw = random.Random(seed)
        begun = tokenizer.encode(draw.choice(BEGINNINGS[form.name]), add_special_tokens=False)
        token_ids = written(matcher(grammars, grammar), begun, draw)
        calls = calls_in(form, tokenizer.decode(token_ids, skip_special_tokens=False))
        # Cut off by the length, the last one's arguments may have no end.
        for call in calls if len(token_ids) < MAX_TOKENS else calls[:-1]:
            assert call.name is not None
            jsonschema.validate(json.loads(call.arguments, strict=False), SCHEMAS[call.name])
            names.add(call.name)
    assert names == set(SCHEMAS)


def test_what_only_looks_like_a_call_is_text(tokenizer: Tokenizer) -> None:
    llama = FORMATS["llama3"]
    for text in (
        '{"parameters": {"place": 7}, "name": "weather"}',
        '{"n\\u0061me": "weather", "parameters": {}}',
        '{"name": "we\\u0061ther", "parameters": {}}',
        '\u00a0{"name": "weather", "parameters": {}}',
        '{"type": "function", "name": "weather", "parameters": {}}',
        '{"name": "Ulm", "parameters": {}}',
    ):
        parser = ToolParser(llama, SCHEMAS, is_strict=True)
        parts = [*parser.push(text), *parser.flush()]
        assert ("".join(part.text for part in parts), [part for part in parts if part.calls]) == (text, []), text
    [call] = calls_in(llama, ' {"name" :\n"weather", "parameters": {}}')
    assert (call.name, call.arguments) == ("weather", "{}")


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_with_a_response_format_it_is_a_document_or_calls(
    tokenizer: Tokenizer, grammars: Grammars, form: ToolFormat
) -> None:
    wanted = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]}
    schema = {"name": "w", "schema": wanted | {"additionalProperties": False}, "strict": True}
    grammar = grammar_for(tokenizer, form, response_format={"type": "json_schema", "json_schema": schema})
    assert grammar is not None
    kinds = set()
    for seed in range(40):
        token_ids = written(matcher(grammars, grammar), (), random.Random(seed))
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
        calls = calls_in(form, text)
        kinds.add(bool(calls))
        if calls and len(token_ids) < MAX_TOKENS:
            for call in calls:
                jsonschema.validate(json.loads(call.arguments, strict=False), SCHEMAS[call.name or ""])
        elif not calls and len(token_ids) < MAX_TOKENS:
            jsonschema.validate(json.loads(text), schema["schema"])
    assert kinds == {True, False}


def test_without_strict_nothing_is_held(tokenizer: Tokenizer) -> None:
    for form in FORMATS.values():
        loose = [{"type": "function", "function": {"name": "time", "strict": False}}]
        service = Service(tokenizer, say(tokenizer, "."), tool_format=form, max_model_len=4000)
        assert service.chat(tools=loose).status == 200
        assert service.request.sampling.grammar is None


def test_too_long_schemas_are_refused_by_name(tokenizer: Tokenizer) -> None:
    long = {"type": "object", "properties": {"a": {"enum": ["x" * 140_000]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": long, "strict": True}}
    answer = Service(tokenizer, tool_format=FORMATS["hermes"], max_model_len=400_000).chat(tools=[tool])
    assert (answer.status, answer.error["param"]) == (400, "tools")
