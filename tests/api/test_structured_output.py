"""What clients say of the form of an output, as the grammar that the engine is given."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.api.output.structured_output import schema_grammar
from app.engine.request import MAX_GRAMMAR_CHARACTERS, Grammar, GrammarKind
from app.errors import InvalidRequest
from app.text import Tokenizer
from tests.kit.service import Service

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ANY_OBJECT = {"type": "object"}


def asked(service: Service, **fields: Any) -> Grammar | None:
    """The grammar of the one request that a chat with these fields becomes."""
    answer = service.chat(**fields)
    assert answer.status == 200, answer.json
    return service.request.sampling.grammar


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_SCHEMA, ANY_OBJECT),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA, SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, GrammarKind.JSON_SCHEMA, SCHEMA),
        ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_SCHEMA, ANY_OBJECT),
        ({"structured_outputs": {"choice": ["yes", "nein"]}}, GrammarKind.CHOICE, ["yes", "nein"]),
    ],
)
def test_what_is_json_becomes_a_grammar(service: Service, fields: Any, kind: GrammarKind, text: Any) -> None:
    grammar = asked(service, **fields)
    assert grammar is not None
    assert grammar.kind is kind
    assert json.loads(grammar.text) == text
    assert grammar.is_lenient == ("json" in fields.get("structured_outputs", {}))


@pytest.mark.parametrize(("name", "kind"), [("regex", GrammarKind.REGEX), ("grammar", GrammarKind.GRAMMAR)])
def test_what_is_text_stays_as_it_is(service: Service, name: str, kind: GrammarKind) -> None:
    grammar = asked(service, structured_outputs={name: 'start: "é"'})
    assert grammar == Grammar(kind, 'start: "é"', param=f"structured_outputs.{name}")


@pytest.mark.parametrize(("strict", "is_lenient"), [(True, False), (False, True), (None, True)])
def test_a_schema_that_is_not_strict_may_have_what_cannot_be_kept(
    service: Service, strict: bool | None, is_lenient: bool
) -> None:
    named = {"name": "answer", "schema": SCHEMA, "strict": strict}
    grammar = asked(service, response_format={"type": "json_schema", "json_schema": named})
    assert grammar == schema_grammar(SCHEMA, param="response_format", is_lenient=is_lenient)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "structured_outputs": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": None, "json_object": False}},
    ],
)
def test_anything_will_do_where_nothing_is_said(service: Service, fields: Any) -> None:
    assert asked(service, **fields) is None


TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}, {"begin": "<ab>"}],
    "triggers": ["<a", "<ab"],
}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": TAG},
        {"structured_outputs": {"structural_tag": TAG}},
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
    ],
)
def test_a_structural_tag_becomes_pieces_behind_triggers(service: Service, fields: Any) -> None:
    grammar = asked(service, **fields)
    assert grammar is not None
    assert grammar.kind is GrammarKind.TAGS
    told = json.loads(grammar.text)
    assert [(tag["trigger"], tag["content"]) for tag in told["tags"]] == [
        ("<a", [">", {"schema": 0}, "</a>"]),
        ("<a", ["b>", {"schema": 1}, ""]),
        ("<ab", [">", {"schema": 1}, ""]),
    ]
    assert [each["schema"] for each in told["schemas"]] == [SCHEMA, {}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"structural_tag": {"triggers": ["a"]}}},
            "structured_outputs.structural_tag.structures",
        ),
        (
            {"structured_outputs": {"structural_tag": TAG | {"triggers": []}}},
            "structured_outputs.structural_tag.triggers",
        ),
        ({"structured_outputs": {"structural_tag": TAG, "regex": "a"}}, "structured_outputs"),
        (
            {"structured_outputs": {"structural_tag": '{"structures": [{"begin": "a\\ud800"}], "triggers": ["a"]}'}},
            "structured_outputs.structural_tag",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format.structures"),
        ({"response_format": TAG | {"triggers": ["<b"]}}, "response_format.structures"),
        ({"response_format": TAG | {"triggers": ["<a", "<b"]}}, "response_format.triggers"),
        ({"response_format": TAG | {"structures": [{"begin": "", "end": ">"}]}}, "response_format.structures[0].begin"),
        ({"structured_outputs": {"regex": "a" * (MAX_GRAMMAR_CHARACTERS + 1)}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"allowed_token_ids": [763]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words[0]"),
    ],
)
def test_nonsense_is_refused_by_name(service: Service, fields: Any, param: str) -> None:
    answer = service.chat(**fields)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert service.generate.requests == []


def test_the_older_names_are_refused_with_the_newer_ones(service: Service) -> None:
    assert 'structured_outputs: {"regex": ...}' in service.chat(guided_regex="a+").error["message"]


def test_strict_bodies_may_have_all_of_these_fields(service: Service) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
        "structured_outputs": {"json": None},
        "bad_words": ["no"],
    }
    answer = service.call("POST", "/v1/chat/completions", body, headers={"x-strict": "true"})
    assert answer.status == 200, answer.json
    body["response_format"] = {"type": "text", "colour": "red"}
    answer = service.call("POST", "/v1/chat/completions", body, headers={"x-strict": "true"})
    assert answer.error["param"] == "response_format.colour"


def test_bad_words_are_banned_at_the_start_of_a_text_and_behind_a_space(service: Service, tokenizer: Tokenizer) -> None:
    service.chat(bad_words=["Once upon", " the"], allowed_token_ids=[7, 9.0])
    sampling = service.request.sampling
    assert sampling.allowed_token_ids == (7, 9)
    assert {tokenizer.decode(word) for word in sampling.bad_words} == {"Once upon", " Once upon", " the"}


def test_what_the_replica_finds_wrong_is_a_400(tokenizer: Tokenizer) -> None:
    refused = InvalidRequest("structured_outputs.regex: …", param="structured_outputs.regex", code="invalid_grammar")
    service = Service(tokenizer, lambda request: [refused])
    for stream in (False, True):
        answer = service.chat(structured_outputs={"regex": "("}, stream=stream)
        assert answer.status == 400
        assert (answer.error["param"], answer.error["code"]) == ("structured_outputs.regex", "invalid_grammar")


def test_a_schema_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at most 131,072 are accepted"):
        schema_grammar({"description": "x" * MAX_GRAMMAR_CHARACTERS}, param="tools")
