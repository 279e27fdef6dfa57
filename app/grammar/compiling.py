"""Turns a grammar as its caller wrote it into one of llguidance, and tries it under limits.

A separate process runs this code first (`sandbox_worker.py`). Only its result reaches the engine's process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from itertools import chain
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from app.engine.request import GrammarKind
from app.grammar.tags import larks_of_tags

# Without it llguidance would encode fixed texts with the tokenizer, which is not available here.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
# Limits of the search for the allowed tokens of one step: a few milliseconds. Nearly all searches take microseconds.
_STEP_FUEL, _STEP_ITEMS, _MAX_STATES = 50_000, 20_000, 50_000


class Unusable(Exception):
    """No text matches this grammar, or matching takes too long; the message says which."""


def larks_of(kind: GrammarKind, text: str, *, is_lenient: bool, special: Mapping[str, int]) -> list[str]:
    """A grammar in the language of matchers (Lark); a grammar of tags becomes one for each of them.

    `special`: the model's special tokens by their texts. Raises Unusable.
    """
    if kind is GrammarKind.TAGS:
        return larks_of_tags(text, special, {"schema": _schema_rule, "lark": _lark_rule}, options=_OPTIONS)
    return [lark_of(kind, text, is_lenient=is_lenient)]


def lark_of(kind: GrammarKind, text: str, *, is_lenient: bool) -> str:
    """A grammar without tags, in Lark. Raises Unusable."""
    match kind:
        case GrammarKind.JSON_SCHEMA:
            return f"start: {_json_rule(_schema(text), is_lenient)}{_OPTIONS}"
        case GrammarKind.REGEX:
            [grammar] = json.loads(LLMatcher.grammar_from_regex(text))["grammars"]
            return f"{grammar['lark_grammar']}{_OPTIONS}"
        case GrammarKind.CHOICE:
            return f"start: {' | '.join(map(json.dumps, json.loads(text)))}{_OPTIONS}"
        case GrammarKind.GRAMMAR:
            return _lark(text) + _OPTIONS
        case GrammarKind.TAGS | GrammarKind.TEXT:
            raise AssertionError("each tag has its own grammar, and any text has none")


def _json_rule(schema: dict[str, Any], is_lenient: bool) -> str:
    """The rule for documents of a schema."""
    # Between the tokens of a JSON document: nothing, a space, or a new line and its indentation. With more a model
    # could write white space without end.
    white_space = r"( ?|\n[ \t]{0,40})"
    return f"%json {json.dumps(schema | {'x-guidance': {'whitespace_pattern': white_space, 'lenient': is_lenient}})}"


def _schema_rule(form: dict[str, Any]) -> str:
    return _json_rule(form["schema"], form["is_lenient"])


def _lark_rule(form: dict[str, Any]) -> str:
    """The rule for texts of a Lark grammar. Raises Unusable with the grammar's name and the place in it."""
    lark = form["lark"]
    try:
        new_matcher(LLTokenizer("byte"), _without_options(lark))
    except Unusable as error:
        raise Unusable(f"the Lark grammar of {form['name']}: {error}") from error
    return f"%lark {{\n{lark}\n}}"


def _without_options(lark: str) -> str:
    if "%llguidance" in lark:
        raise Unusable("%llguidance is not accepted; leave it out")
    return lark


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"it is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise Unusable("it should be a JSON object")
    return schema


def _lark(text: str) -> str:
    try:
        return any_to_lark(_without_options(text))
    except Unusable:
        raise
    except Exception as error:  # a third-party converter, and any text
        raise Unusable(f"it is neither Lark nor GBNF: {reason_of(str(error))}") from error


def new_matcher(tokenizer: LLTokenizer, lark: str) -> LLMatcher:
    """A matcher at the beginning of a grammar. Other threads of Python run meanwhile. Raises Unusable."""
    limits = LLParserLimits(
        step_lexer_fuel=_STEP_FUEL, step_max_items=_STEP_ITEMS, max_lexer_states=_MAX_STATES, verbose_errors=False
    )
    matcher = LLMatcher(tokenizer, lark, log_level=0, limits=limits)
    if matcher.is_error():
        raise Unusable(reason_of(matcher.get_error()))
    return matcher


def walk(matcher: LLMatcher) -> None:
    """Draw some tokens by a grammar. Raises Unusable where no token is allowed, or where it takes too long."""
    draw, began_at = 1, time.thread_time()
    for _ in range(128):
        allowed = matcher.compute_bitmask()
        if matcher.is_error():
            raise Unusable(reason_of(matcher.get_error()))
        if matcher.is_stopped():
            return
        draw = draw * 6364136223846793005 + 1442695040888963407 & 2**64 - 1  # Knuth's, as in MMIX
        token_id = _one_of(allowed, draw >> 32)
        if token_id is None:
            raise Unusable("nothing matches it")
        matcher.consume_token(token_id)
    max_walk_s = 0.25
    if time.thread_time() - began_at > max_walk_s:
        raise Unusable("to match it takes too long; make it simpler")


def _one_of(allowed: bytes, draw: int) -> int | None:
    """The first allowed token at or after a drawn position; the vocabulary is a ring."""
    size = len(allowed)
    start = draw % size
    for index in chain(range(start, size), range(start)):
        if allowed[index]:
            return index * 8 + (allowed[index] & -allowed[index]).bit_length() - 1
    return None


def reason_of(message: str) -> str:
    """An error of llguidance, short enough for a response: its first line, and the line that names the error."""
    if "NoExtension" in message:
        return "nothing matches it"
    first, *others = message.strip().splitlines() or [""]
    named = [line for line in others if line.startswith("error: ")][:1]
    return " ".join([first, *named])[:300]
