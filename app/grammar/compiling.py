"""Converts a caller's grammar to a grammar for llguidance, and tests the result within limits.

A separate process (`sandbox_worker.py`) runs this code first, so that only tested results reach the engine's process.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from app.engine.request import GrammarKind
from app.grammar.gbnf import is_gbnf, plain_gbnf
from app.grammar.schemas import Drops, ErrorOf, SchemaReducer, exact, shown
from app.grammar.tags import larks_of_tags

# Without this option, llguidance would encode fixed texts with the tokenizer, which is not loaded here.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
# Limits for finding one step's allowed tokens, equal to a few milliseconds. This usually takes microseconds.
_STEP_FUEL, _STEP_ITEMS, _MAX_STATES = 50_000, 20_000, 50_000


class Unusable(Exception):
    """Raised if a grammar cannot be compiled, no text matches it, or matching takes too long. Its message says why."""


CUT_MARK = "..."


@dataclass(frozen=True, slots=True)
class Compiled:
    """A tested grammar in the Lark language. A grammar of tags consists of one Lark grammar per tag."""

    larks: list[str]
    dropped: list[str]  # paths of schema keywords that the grammar ignores; a shortened list ends with CUT_MARK


def compiled(
    tokenizer: LLTokenizer, kind: GrammarKind, text: str, *, is_lenient: bool, special: Mapping[str, int]
) -> Compiled:
    """Compile a grammar and check that some text matches it. `special` maps the texts of special tokens to their ids.

    A schema is first compiled with all keywords that `exact` keeps. If this fails, a lenient schema is compiled without
    the keywords that the compiler does not support. Raises Unusable, which names a strict schema's unsupported keyword.
    """
    if kind not in (GrammarKind.JSON_SCHEMA, GrammarKind.TAGS):
        return Compiled(_tried(tokenizer, larks_of(kind, text, special=special)), [])
    is_one = kind is GrammarKind.JSON_SCHEMA
    forms = {"schemas": [{"schema": _schema(text), "is_lenient": is_lenient}]} if is_one else json.loads(text)
    dropped = _drop(forms, exact)

    def tried(*, with_lenience: bool) -> list[str]:
        schemas = [form | {"is_lenient": with_lenience and form["is_lenient"]} for form in forms["schemas"]]
        if is_one:
            larks = [_lark_of_rule(_schema_rule(schemas[0]))]
        else:
            larks = larks_of(kind, json.dumps(forms | {"schemas": schemas}), special=special)
        try:
            return _tried(tokenizer, larks)
        except Unusable as unusable:
            raise Unusable(_IN_OUR_TEXT.sub("", str(unusable))) from unusable

    try:
        return Compiled(tried(with_lenience=False), _cut(dropped))
    except Unusable:
        if not (more := _drop(forms, SchemaReducer(_error_of(LLTokenizer("byte"))).kept)):
            raise
    return Compiled(tried(with_lenience=True), _cut(dropped + more))


def _cut(places: list[str]) -> list[str]:
    max_named = 20
    return places if len(places) <= max_named else [*places[:max_named], CUT_MARK]


def _drop(forms: dict[str, Any], keep: Callable[[dict[str, Any]], tuple[dict[str, Any], Drops]]) -> list[str]:
    """Apply `keep` to each schema. Returns the dropped keywords' paths. Raises Unusable if a strict schema has any."""
    dropped: list[str] = []
    for form in forms["schemas"]:
        form["schema"], drops = keep(form["schema"])
        name = form.get("name", "")
        if drops and not form["is_lenient"]:
            place, why = next(iter(drops.items()))
            raise Unusable(f"{shown(place, name)}: {why}")
        dropped += [shown(place, name) for place in drops]
    return dropped


# Matches an error's position in the generated Lark text, which is useless to clients.
_IN_OUR_TEXT = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")


def _error_of(tokenizer: LLTokenizer) -> ErrorOf:
    def error_of(schema: dict[str, Any]) -> str | None:
        try:
            new_matcher(tokenizer, _lark_of_rule(_json_rule(schema, False)))
        except Unusable as unusable:
            return _IN_OUR_TEXT.sub("", str(unusable))
        return None

    return error_of


def _tried(tokenizer: LLTokenizer, larks: list[str]) -> list[str]:
    for lark in larks:
        walk(new_matcher(tokenizer, lark))
    return larks


def larks_of(kind: GrammarKind, text: str, *, special: Mapping[str, int]) -> list[str]:
    """Convert a grammar (except for a schema) to Lark. A grammar of tags becomes one Lark grammar per tag.

    `special` maps the texts of the model's special tokens to their ids. Raises Unusable.
    """
    if kind is GrammarKind.TAGS:
        return larks_of_tags(text, special, {"schema": _schema_rule, "lark": _lark_rule}, options=_OPTIONS)
    return [_lark_of(kind, text)]


def _lark_of(kind: GrammarKind, text: str) -> str:
    match kind:
        case GrammarKind.REGEX:
            [grammar] = json.loads(LLMatcher.grammar_from_regex(text))["grammars"]
            return f"{grammar['lark_grammar']}{_OPTIONS}"
        case GrammarKind.CHOICE:
            return _lark_of_rule(" | ".join(map(json.dumps, json.loads(text))))
        case GrammarKind.GRAMMAR:
            return _lark(text) + _OPTIONS
        case GrammarKind.JSON_SCHEMA | GrammarKind.TAGS | GrammarKind.TEXT:
            raise AssertionError("schemas and tags are handled by the callers, and free text has no grammar")


def _lark_of_rule(rule: str) -> str:
    return f"start: {rule}{_OPTIONS}"


def _json_rule(schema: dict[str, Any], is_lenient: bool) -> str:
    # Between the tokens of a JSON document, nothing, one space, or a newline with indentation is allowed. With a less
    # restrictive pattern, a model might generate white space forever.
    white_space = r"( ?|\n[ \t]{0,40})"
    return f"%json {json.dumps(schema | {'x-guidance': {'whitespace_pattern': white_space, 'lenient': is_lenient}})}"


def _schema_rule(form: dict[str, Any]) -> str:
    return _json_rule(form["schema"], form["is_lenient"])


def _lark_rule(form: dict[str, Any]) -> str:
    """Return the rule for a nested Lark grammar. Raises Unusable, with the grammar's name and the error's position."""
    lark = form["lark"]
    try:
        new_matcher(LLTokenizer("byte"), _without_options(lark))
    except Unusable as error:
        raise Unusable(f"the Lark grammar of {form['name']}: {error}") from error
    return f"%lark {{\n{lark}\n}}"


def _without_options(lark: str) -> str:
    if "%llguidance" in lark:
        raise Unusable("%llguidance is not allowed; remove it")
    return lark


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"it is not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise Unusable("it must be a JSON object")
    return schema


def _lark(text: str) -> str:
    try:
        given = _without_options(text)
        is_lark = is_lark_syntax(given) and not is_gbnf(given)
        return given if is_lark else gbnf_to_lark(plain_gbnf(given))
    except Unusable:
        raise
    except Exception as error:  # a third-party converter may raise any exception
        raise Unusable(f"it is neither Lark nor GBNF: {reason_of(str(error))}") from error


def new_matcher(tokenizer: LLTokenizer, lark: str) -> LLMatcher:
    """Compile a grammar and return a matcher. Releases the interpreter lock in the meantime. Raises Unusable."""
    limits = LLParserLimits(
        step_lexer_fuel=_STEP_FUEL, step_max_items=_STEP_ITEMS, max_lexer_states=_MAX_STATES, verbose_errors=False
    )
    matcher = LLMatcher(tokenizer, lark, log_level=0, limits=limits)
    if matcher.is_error():
        raise Unusable(reason_of(matcher.get_error()))
    return matcher


def walk(matcher: LLMatcher) -> None:
    """Generate some random tokens with a grammar. Raises Unusable if no token is allowed or this takes too long."""
    draw, began_at = 1, time.thread_time()
    for _ in range(128):
        allowed = matcher.compute_bitmask()
        if matcher.is_error():
            raise Unusable(reason_of(matcher.get_error()))
        if matcher.is_stopped():
            return
        draw = draw * 6364136223846793005 + 1442695040888963407 & 2**64 - 1  # Knuth's generator for MMIX
        token_id = _one_of(allowed, draw >> 32)
        if token_id is None:
            raise Unusable("no text matches it")
        matcher.consume_token(token_id)
    max_walk_s = 0.25
    if time.thread_time() - began_at > max_walk_s:
        raise Unusable("matching takes too long; simplify it")


def _one_of(allowed: bytes, draw: int) -> int | None:
    """Return the first allowed token after a drawn position (wrapping around at the end), or None if there is none."""
    size = len(allowed)
    start = draw % size
    for index in chain(range(start, size), range(start)):
        if allowed[index]:
            return index * 8 + (allowed[index] & -allowed[index]).bit_length() - 1
    return None


def reason_of(message: str) -> str:
    """Shorten an error message of llguidance for a response, to its first line and the line that names the error."""
    if "NoExtension" in message:
        return "no text matches it"
    first, *others = message.strip().splitlines() or [""]
    named = [line for line in others if line.startswith("error: ")][:1]
    return " ".join([first, *named])[:300]
