"""Grammars from their texts to the tokens that they allow, with the real compiler in its real process."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from app.engine.request import GrammarKind
from app.grammar.grammars import Grammars
from app.grammar.vocabulary import Vocabulary
from tests.grammar.documents import matcher_for, write

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "é"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(20))
def test_a_schema_gives_documents_of_that_schema(grammars: Grammars, vocabulary: Vocabulary, seed: int) -> None:
    matcher = matcher_for(grammars, GrammarKind.JSON_SCHEMA, json.dumps(PERSON))
    jsonschema.validate(json.loads(write(matcher, vocabulary, seed)), PERSON)


@pytest.mark.parametrize("pattern", [r"\d{3}-\d{4}", "(a+)+", "[a-zé€😀]{1,9}!?", "^x/y$", r"(yes|no)( [a-z]+){0,3}\."])
def test_a_regular_expression_is_matched_in_full(grammars: Grammars, vocabulary: Vocabulary, pattern: str) -> None:
    for seed in range(5):
        text = write(matcher_for(grammars, GrammarKind.REGEX, pattern), vocabulary, seed).decode()
        assert re.fullmatch(pattern, text), text


def test_one_of_the_choices_is_written(grammars: Grammars, vocabulary: Vocabulary) -> None:
    choices = ["yes", "no", 'c"d', "e\\f", "g\nh", "é€😀", "(x)*", "/a/", "{", "<|end|>"]
    texts = {
        write(matcher_for(grammars, GrammarKind.CHOICE, json.dumps(choices)), vocabulary, seed).decode()
        for seed in range(60)
    }
    assert texts <= set(choices)
    assert len(texts) > 5
