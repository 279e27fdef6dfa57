"""Texts that make compilers of grammars overflow, swell or run for ever, or that nothing matches."""

from __future__ import annotations

import json
from typing import Any

from app.engine.request import GrammarKind

Case = tuple[str, GrammarKind, str]


def cases() -> list[Case]:
    """(name, kind, text): none longer than a request may send."""
    return [
        *((name, GrammarKind.REGEX, text) for name, text in _regexes().items()),
        *((name, GrammarKind.JSON_SCHEMA, json.dumps(schema)) for name, schema in _schemas().items()),
        ("deep schema", GrammarKind.JSON_SCHEMA, '{"items":' * 10_000 + "{}" + "}" * 10_000),
        ("no JSON", GrammarKind.JSON_SCHEMA, '{"type": '),
        ("a list", GrammarKind.JSON_SCHEMA, "[]"),
        *((name, GrammarKind.GRAMMAR, text) for name, text in _grammars().items()),
        *((name, GrammarKind.TAGS, json.dumps(tags)) for name, tags in _tags().items()),
    ]


def _tags() -> dict[str, Any]:
    """Free text with pieces, as `app/grammar/tags.py` describes it."""

    def tag(trigger: str) -> dict[str, Any]:
        return {"trigger": trigger, "is_opening": False, "content": [{"schema": 0}], "is_last": False}

    hostile = {"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"}
    return {
        "a hostile schema in a piece": {"schemas": [{"schema": hostile, "is_lenient": False}], "tags": [tag("<a>")]},
        "triggers within triggers": {
            "schemas": [{"schema": {"type": "null"}, "is_lenient": False}],
            "tags": [tag("e" * length + "!") for length in range(112, 128)],
        },
        "a trigger in every token": {
            "schemas": [{"schema": {}, "is_lenient": False}],
            "tags": [tag(letter) for letter in "etaoinshrdlucmfw"],
        },
    }


def _regexes() -> dict[str, str]:
    return {
        "nested quantifiers": "(a+)+$",
        "nested stars": "((a*)*)*b",
        "repeated repeats": "((a{1,1000}){1,1000}){1,1000}",
        "a huge repeat": "a{1,100000000}",
        "two long gaps": ".{0,100000}x.{0,100000}",
        "an exponential automaton": ".*a.{200}",
        "three exponential automata": "(.*a.{30}|.*b.{31}|.*c.{29})",
        "a reference back": r"(a)\1",
        "looking ahead": "(?=a)b",
        "looking behind": "(?<=a)b",
        "an open group": "(((",
        "deep groups": "(" * 60_000 + "a" + ")" * 60_000,
        "many words": "|".join(f"word{number}" for number in range(10_000)),
        "many words for ever": "(" + "|".join(f"w{number}" for number in range(5000)) + ")*",
        "large classes": r"(\p{L}{1,500}\p{N}{1,500}){1,500}",
        "nothing at all": r"[^\s\S]",
        "a quadratic": ".*(.*){500}",
        "optional ones": "(a?){300}a{300}",
        "a long text": "a" * 131_000,
        "a lone surrogate": "\\uD800",
        "a NUL": "a\x00b",
        "flags": "(?i)(?x)(?s) a b (?-i:c)",
    }


def _schemas() -> dict[str, dict[str, Any]]:
    return {
        "itself": {"$ref": "#"},
        "a loop": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "a chain of references": {
            "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(3000)} | {"d3000": {"type": "integer"}},
            "$ref": "#/$defs/d0",
        },
        "doubling references": {
            "$defs": {
                f"d{n}": {"type": "object", "properties": {name: {"$ref": f"#/$defs/d{n + 1}"} for name in "ab"}}
                for n in range(40)
            }
            | {"d40": {"type": "integer"}},
            "$ref": "#/$defs/d0",
        },
        "another server": {"$ref": "http://127.0.0.1:9/schema.json"},
        "a file": {"$ref": "file:///etc/passwd"},
        "many properties": {"properties": {f"p{n}": {"type": "string"} for n in range(3500)}},
        "many required": {
            "properties": {f"p{n}": {"type": "string"} for n in range(3000)},
            "required": [f"p{n}" for n in range(3000)],
        },
        "a long enum": {"enum": [f"v{n}" for n in range(12_000)]},
        "many items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6, "maxItems": 10**9},
        "a long string": {"type": "string", "minLength": 10**5, "maxLength": 10**9},
        "many branches": {
            "anyOf": [{"type": "object", "properties": {f"k{n}": {"type": "string"}}} for n in range(1500)]
        },
        "crossed branches": {
            "allOf": [
                {"anyOf": [{"type": "object", "properties": {f"{c}{n}": {"type": "string"}}} for c in "km"]}
                for n in range(24)
            ]
        },
        "a bad pattern": {"type": "string", "pattern": "(("},
        "an exponential pattern": {"type": "string", "pattern": "^.*a.{200}$"},
        "overlapping patterns": {"patternProperties": {f"^a.*{n}$": {"type": "string"} for n in range(100)}},
        "no such type": {"type": "nonsense"},
        "a list of types": {"type": ["x", 1]},
        "not": {"not": {}},
        "tiny multiples": {"type": "number", "multipleOf": 1e-300},
        "a wide range": {"type": "number", "minimum": -1e300, "maximum": 1e300},
        "an empty range": {"type": "integer", "minimum": 5, "maximum": 4},
        "an empty enum": {"enum": []},
        "a property of a list": {"properties": []},
        "options from outside": {"x-guidance": {"whitespace_pattern": "(" * 1000}},
    }


def _grammars() -> dict[str, str]:
    def chain(length: int, link: str, end: str) -> str:
        rules = [link.format(name=f"r{n}", next=f"r{n + 1}") for n in range(length)]
        return "\n".join(["start: r0", *rules, f"r{length}: {end}"])

    return {
        "no grammar": "\x00\x01 }}{{",
        "deep parentheses": "start: " + "(" * 60_000 + '"a"' + ")" * 60_000,
        "left recursion": 'start: start "a" | "a"',
        "ambiguity": 'start: start start start | start start | "a" | ',
        "no way out": "start: a\na: b\nb: a",
        "huge repeats": 'start: (("a"{1,1000}){1,1000}){1,1000}',
        "no such rule": "start: foo",
        "a deep chain": chain(6000, '{name}: "(" {next} ")"', '"a"'),
        "a chain of choices": chain(3000, '{name}: {next} | "x" {next} | {next} {next}', '"a"'),
        "a chain of terminals": chain(4000, '{name}: {next} "a"', '"a"').replace("r", "T").replace("staTt", "start"),
        "doubling terminals": chain(40, "{name}: {next} {next}", '"a"').replace("r", "T").replace("staTt", "start"),
        "doubling rules": chain(60, "{name}: {next} {next}", '"a"'),
        "many words": "start: " + "|".join(f'"w{n}"' for n in range(12_000)),
        "nothing, repeated": 'start: (|"")*',
        "options": '%llguidance {"no_forcing": false}\nstart: "a"',
        "a broken GBNF": "root ::= (",
        "an endless GBNF": "root ::= root",
    }
