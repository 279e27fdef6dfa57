"""Grammars from their texts to the tokens that they allow, with the real compiler in its real process."""

from __future__ import annotations

import json
import re

import pytest

from app.engine.request import Grammar, GrammarKind
from app.grammar.grammars import Grammars
from app.grammar.vocabulary import Vocabulary
from tests.grammar.documents import begun, matcher_for, write


@pytest.mark.parametrize("pattern", [r"\d{3}-\d{4}", "(a+)+", "[a-zé€😀]{1,9}!?", "^x/y$", r"(yes|no)( [a-z]+){0,3}\."])
def test_a_regular_expression_is_matched_in_full(grammars: Grammars, vocabulary: Vocabulary, pattern: str) -> None:
    for seed in range(5):
        text = write(matcher_for(grammars, GrammarKind.REGEX, pattern), vocabulary, seed).decode()
        assert re.fullmatch(pattern, text), text


def test_keywords_that_are_not_kept_are_named_in_the_field_of_each_request(grammars: Grammars) -> None:
    many = {f"p{number}": {"type": "string", "format": f"f{number}"} for number in range(22)}
    text = json.dumps({"type": "object", "properties": many, "required": ["p0"]})
    for param in ("response_format", "structured_outputs.json"):
        matcher = begun(grammars, Grammar(GrammarKind.JSON_SCHEMA, text, is_lenient=True, param=param))
        assert matcher.ignored_keywords == (*(f"{param}.properties.p{number}.format" for number in range(20)), "...")
    assert matcher_for(grammars, GrammarKind.JSON_SCHEMA, "{}").ignored_keywords == ()


def test_one_of_the_choices_is_written(grammars: Grammars, vocabulary: Vocabulary) -> None:
    choices = ["yes", "no", 'c"d', "e\\f", "g\nh", "é€😀", "(x)*", "/a/", "{", "<|end|>"]
    texts = {
        write(matcher_for(grammars, GrammarKind.CHOICE, json.dumps(choices)), vocabulary, seed).decode()
        for seed in range(60)
    }
    assert texts <= set(choices)
    assert len(texts) > 5
