"""Matchers ahead of the drawn tokens: copies, what they allow in a row, and what a grammar forces."""

from __future__ import annotations

import json
import random

import pytest

from app.engine.request import Grammar, GrammarKind, Thought
from app.grammar.grammars import Grammars
from app.grammar.vocabulary import Vocabulary
from tests.grammar.documents import advance, allowed_ids, begun

RECORD = {
    "type": "object",
    "properties": {"kind": {"enum": ["stone", "story"]}, "name": {"type": "string", "maxLength": 9}},
    "required": ["kind", "name"],
    "additionalProperties": False,
}
SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "items": RECORD, "minItems": 40}))
TAG = {"trigger": "<c>", "is_opening": True, "content": [{"schema": 0}], "is_last": False}
GRAMMARS = {
    "schema": SCHEMA,
    "regex": Grammar(GrammarKind.REGEX, "(stone|story){90}"),
    "tags": Grammar(
        GrammarKind.TAGS, json.dumps({"schemas": [{"schema": RECORD, "is_lenient": False}], "tags": [TAG]})
    ),
    "thought": Grammar(
        SCHEMA.kind, SCHEMA.text, thought=Thought(begin="<t>", end="</t>", is_open=False, max_tokens=20)
    ),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_matcher_stays_where_it_is_while_others_go_ahead_of_it(grammars: Grammars, name: str) -> None:
    matcher, apart = begun(grammars, GRAMMARS[name]), begun(grammars, GRAMMARS[name])
    draw = random.Random(name)
    for _ in range(90):
        ahead, drafts = matcher, matcher.forced(3) + [draw.randrange(763) for _ in range(3)]
        assert matcher.num_allowed(drafts) >= min(1, len(matcher.forced(1)))
        for draft in drafts:
            ahead = ahead.after(draft)
            ahead.allowed()
        assert matcher.allowed() == apart.allowed()
        assert matcher.failure is None
        token_id = draw.choice(allowed_ids(matcher))
        ahead = matcher.after(token_id)
        matcher.advance(token_id)
        apart.advance(token_id)
        assert ahead.allowed() == matcher.allowed()


@pytest.mark.parametrize(
    ("text", "forced"),
    [('[{"', 'kind"'), ('[{"kind": "', "sto"), ('[{"kind": "sto', ""), ('[{"kind": "stor', 'y"'), ('[{"kind', '"')],
)
def test_the_only_text_that_may_follow_is_forced(
    grammars: Grammars, vocabulary: Vocabulary, text: str, forced: str
) -> None:
    token_ids = [vocabulary.tokens.index(bytes([byte])) for byte in text.encode()]
    matcher = advance(begun(grammars, SCHEMA), token_ids)
    found = matcher.forced(64)
    assert b"".join(vocabulary.tokens[each] for each in found).decode() == forced
    assert matcher.forced(2) == found[:2]
    assert matcher.num_allowed(found) == len(found)
    assert matcher.num_allowed([*found, 0]) == len(found)


def test_a_draft_that_is_not_allowed_fails_the_matcher_behind_it_alone(grammars: Grammars) -> None:
    matcher = begun(grammars, SCHEMA)
    behind = matcher.after(0)
    behind.allowed()
    assert behind.failure is not None
    assert matcher.failure is None
    assert begun(grammars, SCHEMA).allowed() == matcher.allowed()
