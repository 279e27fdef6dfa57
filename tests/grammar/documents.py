"""What a model without sense writes by a grammar: tokens drawn from what is allowed."""

from __future__ import annotations

import random
from collections.abc import Iterable

from app.engine.matcher import Matcher
from app.engine.request import Grammar, GrammarKind, Request, SamplingParams
from app.grammar.grammars import Grammars
from app.grammar.vocabulary import Vocabulary


def request_for(grammar: Grammar, **fields: object) -> Request:
    sampling = SamplingParams(max_tokens=4000, grammar=grammar)
    return Request(request_id="r", prompt_token_ids=(5,), sampling=sampling, **fields)  # type: ignore[arg-type]


def begun(grammars: Grammars, grammar: Grammar, **fields: object) -> Matcher:
    """A matcher of a request with this grammar, and these other fields."""
    matcher = grammars.matcher_of(request_for(grammar, **fields)).result()
    assert matcher is not None
    return matcher


def matcher_for(grammars: Grammars, kind: GrammarKind, text: str) -> Matcher:
    return begun(grammars, Grammar(kind, text))


def allowed_ids(matcher: Matcher) -> list[int]:
    return [8 * index + bit for index, byte in enumerate(matcher.allowed()) for bit in range(8) if byte >> bit & 1]


def advance(matcher: Matcher, token_ids: Iterable[int]) -> Matcher:
    """The same matcher behind these tokens, of which each has to be allowed."""
    for token_id in token_ids:
        assert token_id in allowed_ids(matcher), (token_id, matcher.failure)
        matcher.advance(token_id)
        assert matcher.failure is None
    return matcher


def write(matcher: Matcher, vocabulary: Vocabulary, seed: int, *, max_tokens: int = 4000) -> bytes:
    """A text by random tokens; it ends as soon as it may once it is long, so that every text ends."""
    draw, written = random.Random(seed), bytearray()
    for number in range(max_tokens):
        allowed = allowed_ids(matcher)
        assert matcher.failure is None, matcher.failure
        may_end = set(allowed) & set(vocabulary.eos_token_ids)
        if may_end and (number > 60 or len(allowed) == len(may_end) or draw.random() < 0.1):
            return bytes(written)
        token_id = draw.choice([each for each in allowed if each not in may_end])
        written += vocabulary.tokens[token_id]
        matcher.advance(token_id)
    raise AssertionError(f"no end after {max_tokens} tokens: {bytes(written[:200])!r}")
