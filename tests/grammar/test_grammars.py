"""Grammars from their texts to the tokens that they allow, with the real compiler in its real process."""

from __future__ import annotations

import json
import re

import pytest

from app.engine.request import GrammarKind
from app.grammar.grammars import Grammars
from app.grammar.vocabulary import Vocabulary
from tests.grammar.documents import matcher_for, write


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
