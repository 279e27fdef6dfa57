"""Keywords of schemas that the compiler cannot keep: dropped and named where a schema is lenient, refused else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from app.engine.request import GrammarKind
from app.grammar.compiling import Compiled, Unusable, compiled, new_matcher

TOKENIZER = LLTokenizer("byte")
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}


def of_schema(schema: Any, *, is_lenient: bool) -> Compiled:
    return compiled(TOKENIZER, GrammarKind.JSON_SCHEMA, json.dumps(schema), is_lenient=is_lenient, special={})


def accepts(made: Compiled, document: str) -> bool:
    matcher = new_matcher(TOKENIZER, made.larks[0])
    written = list(document.encode())
    return bool(matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting())


def of_property(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": keywords}, "required": ["x"], "additionalProperties": False}


# (schema, what is dropped of it, the reason in strict)
NOT_KEPT: list[tuple[Any, list[str], str]] = [
    # values of `pattern`
    ({"type": "string", "format": "email", "pattern": EMAIL}, ["pattern"], "look-around"),
    ({"type": "string", "pattern": r"^(a|b)\1$"}, ["pattern"], "backreferences"),
    ({"type": "string", "pattern": r"\bfoo\b"}, ["pattern"], "lookarounds"),
    ({"type": "string", "pattern": r"foo\Z"}, ["pattern"], "unrecognized escape"),
    (of_property(type="string", pattern="("), ["properties.x.pattern"], "unclosed group"),
    # bounds
    (
        {"type": "integer", **INT64},
        ["minimum", "maximum"],
        "minimum: the number -9223372036854775808 cannot be represented",
    ),
    ({"type": "number", "minimum": -3.4028235e38, "maximum": 3.4028235e38}, ["minimum", "maximum"], "float range"),
    ({"type": "integer", "minimum": 10**18}, ["minimum"], "integer range"),
    ({"type": "string", "minLength": 2**64}, ["minLength"], "positive integer"),
    ({"type": "string", "minLength": 1.5}, ["minLength"], "positive integer"),
    # numbers that no float has
    ({"const": 2**64 - 1}, ["const"], "the number 18446744073709551615 cannot be represented exactly"),
    ({"enum": [1, {"a": [2**53 + 1]}]}, ["enum"], "the number 9007199254740993 cannot be represented exactly"),
    ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3}, ["minimum", "maximum"], "minimum: .* exactly"),
    # addresses
    ({"$schema": "https://json-schema.org/draft-07/schema#", "type": "object"}, [r"$schema"], "is not present"),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}}, ["properties.a.$ref"], "points to nothing"),
    ({"$ref": "https://example.com/b"}, ["$ref"], "points to nothing"),
    # null, and what is no schema
    (of_property(type="string", pattern=None), ["properties.x.pattern"], "it is null"),
    (
        {"type": "object", "required": None, "items": None, "minLength": None},
        ["required", "items", "minLength"],
        "null",
    ),
    ({"type": "object", "properties": {"a": None, "b": {}}}, ["properties.a"], "must be a schema"),
    ({"anyOf": [None, {}]}, ["anyOf"], "schema must be"),
    # keywords and values that the compiler does not have
    (of_property(type="any"), ["properties.x.type"], "Invalid type"),
    (of_property(type="string", format="uuid4"), ["properties.x.format"], "Unknown format"),
    ({"type": "array", "uniqueItems": True}, ["uniqueItems"], "Unimplemented"),
    ({"type": "object", "propertyNames": {"pattern": "a"}}, ["propertyNames"], "Unimplemented"),
    ({"$defs": {"a": {"not": {}}}, "anyOf": [{"$ref": "#/$defs/a"}]}, ["$defs.a.not"], "Unimplemented"),
    # keywords that cannot be kept together
    ({"type": "object", "patternProperties": {"^a": {}, "b$": {}}}, ["patternProperties.b$"], "not disjoint"),
    ({"type": "object", "patternProperties": {"(?!a)": {}, "b": {}}}, ["patternProperties.(?!a)"], "look-around"),
    ({"type": "object", "properties": {"a": {}}, "minProperties": 2}, ["minProperties"], "min/maxProperties"),
    (
        {"anyOf": [{"type": "null"}, {"oneOf": [{"type": "string"}, {"minLength": 2}]}]},
        ["anyOf.1.oneOf"],
        "oneOf constraints",
    ),
]


@pytest.mark.parametrize(("schema", "dropped", "why"), NOT_KEPT, ids=lambda value: json.dumps(value)[:70])
def test_a_keyword_that_cannot_be_kept_is_dropped_and_named_or_refused_by_its_place(
    schema: Any, dropped: list[str], why: str
) -> None:
    made = of_schema(schema, is_lenient=True)
    assert sorted(made.dropped) == sorted(dropped)
    with pytest.raises(Unusable, match=why) as refused:
        of_schema(schema, is_lenient=False)
    assert str(refused.value).partition(": ")[0] in dropped


# (schema, documents that it takes, documents that it does not take), strict or not
KEPT: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, ['"a"', '"ab"'], ['""', '"abc"']),
    ({"type": "array", "minItems": 1.0, "items": {"const": 1}}, ["[1]"], ["[]"]),
    (of_property(type="INTEGER"), ['{"x": 1}'], ['{"x": "a"}']),
    ({"$defs": {"List[int]": {"const": 1}}, "$ref": "#/$defs/List[int]"}, ["1"], ["2"]),
    ({"$defs": {"类 型": {"const": 1}}, "$ref": "#/$defs/类 型"}, ["1"], ["2"]),
    ({"$defs": {"a%20b": {"const": 1}}, "$ref": "#/$defs/a%20b"}, ["1"], ["2"]),
    ({"$defs": {"a%20b": {"const": 1}, "a b": {"const": 2}}, "$ref": "#/$defs/a%20b"}, ["2"], ["1"]),
    ({"$defs": {"a/b~c%": {"const": 1}}, "$ref": "#/$defs/a~1b~0c%"}, ["1"], ["2"]),
    ({"type": "array", "uniqueItems": False, "items": {"const": 1}}, ["[1, 1]"], ["[2]"]),
    ({"const": 2**53, "default": None, "title": None, "examples": [2**70]}, ["9007199254740992"], ["9007199254740993"]),
    ({"enum": [2**60, -(2**53)]}, ["1152921504606846976"], ["1152921504606846977"]),
    ({"type": "integer", "minimum": 2**53, "maximum": 2**53 + 2}, [str(2**53 + 1)], [str(2**53 - 1), str(2**53 + 3)]),
    ({"const": {"$ref": "#/none", "pattern": None}}, ['{"$ref":"#/none","pattern":null}'], ["{}"]),
    ({"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 9}, ["1"], ["0", "10"]),
    ({"properties": {"pattern": {"const": 1}, "enum": {"type": "null"}}, "type": "object"}, ['{"enum":null}'], []),
]


@pytest.mark.parametrize(("schema", "good", "bad"), KEPT, ids=lambda value: json.dumps(value)[:70])
@pytest.mark.parametrize("is_lenient", [False, True], ids=["strict", "lenient"])
def test_a_schema_that_is_rewritten_takes_the_same_documents(
    schema: Any, good: list[str], bad: list[str], is_lenient: bool
) -> None:
    made = of_schema(schema, is_lenient=is_lenient)
    assert made.dropped == []
    assert [document for document in [*good, *bad] if accepts(made, document)] == good


def test_the_rest_of_a_schema_is_kept() -> None:
    rest = {"a": {"type": "string", "pattern": "^b$"}, "n": {"type": "integer", "maximum": 9}}
    schema = {
        "type": "object", "properties": {**rest, "x": {"type": "string", "pattern": "(?=a)", "maxLength": 1}},
        "required": ["a", "n", "x"], "additionalProperties": False,
    }  # fmt: skip
    made = of_schema(schema, is_lenient=True)
    assert made.dropped == ["properties.x.pattern"]
    good = '{"a": "b", "n": 9, "x": "c"}'
    assert accepts(made, good)
    for other in (
        good.replace("b", "d"),
        good.replace("9", "10"),
        good.replace('"c"', '"cc"'),
        good[:-1] + ', "y": 1}',
    ):
        assert not accepts(made, other)


@pytest.mark.parametrize("schema", [{"enum": []}, {"type": "string", "minLength": 2, "maxLength": 1}, {"anyOf": []}])
@pytest.mark.parametrize("is_lenient", [False, True], ids=["strict", "lenient"])
def test_a_schema_that_nothing_matches_is_refused(schema: Any, is_lenient: bool) -> None:
    with pytest.raises(Unusable, match=r"^Unsatisfiable schema: "):
        of_schema(schema, is_lenient=is_lenient)


def tags_of(*schemas: tuple[str, Any, bool]) -> str:
    tag = {
        "trigger": "",
        "is_opening": False,
        "content": [{"any": [[{"schema": 0}], [{"schema": 1}]]}],
        "is_last": True,
    }
    forms = [{"schema": schema, "is_lenient": is_lenient, "name": name} for name, schema, is_lenient in schemas]
    return json.dumps({"schemas": forms, "tags": [tag]})


def test_of_several_schemas_each_keeps_to_its_own_strictness() -> None:
    bad = of_property(type="string", pattern="(?!a)")
    tags = tags_of(("lookup", bad, True), ("send", {"type": "object"}, False))
    made = compiled(TOKENIZER, GrammarKind.TAGS, tags, is_lenient=False, special={})
    assert made.dropped == ["lookup.properties.x.pattern"]
    tags = tags_of(("lookup", {"type": "object"}, True), ("send", bad, False))
    with pytest.raises(Unusable, match=r"^send\.properties\.x\.pattern: "):
        compiled(TOKENIZER, GrammarKind.TAGS, tags, is_lenient=False, special={})


def test_many_keywords_that_cannot_be_kept_are_named_in_part_and_cost_no_more_than_a_grammar_may() -> None:
    patterns = {f"p{number}": {"type": "string", "pattern": f"(?!a{number})"} for number in range(300)}
    made = of_schema({"type": "object", "properties": patterns, "required": ["p0"]}, is_lenient=True)
    assert made.dropped == [*(f"properties.p{number}.pattern" for number in range(20)), "..."]
    assert not accepts(made, '{"p1": "a"}')


def test_a_long_place_is_cut_in_front() -> None:
    schema: Any = {"type": "string", "format": "uuid4"}
    for number in range(12):
        schema = {"type": "object", "properties": {f"property{number}": schema}}
    [place] = of_schema(schema, is_lenient=True).dropped
    assert len(place) == 75
    assert place.startswith("...")
    assert place.endswith(".properties.property0.format")
