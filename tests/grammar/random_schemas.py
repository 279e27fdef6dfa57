"""JSON schemas by chance, of the keywords that people use."""

from __future__ import annotations

import random
from typing import Any

_WORDS = ("name", "age", "kind", "née", "x", "list of", 'a"b')


def random_schema(seed: int) -> dict[str, Any]:
    """An object schema without endless documents: strings and lists are bounded, and numbers have no decimals."""
    return _object(random.Random(seed), depth=0)


def _schema(draw: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _integer, _enum, _const, _boolean, _null, _pattern, _format]
    if depth < 3:
        kinds += [_object, _array, _any_of]
    return draw.choice(kinds)(draw, depth)


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(_WORDS, draw.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _schema(draw, depth + 1) for name in names},
        "required": [name for name in names if draw.random() < 0.6],
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    least = draw.randint(0, 2)
    return {
        "type": "array",
        "items": _schema(draw, depth + 1),
        "minItems": least,
        "maxItems": least + draw.randint(0, 2),
    }


def _any_of(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(draw, depth + 1) for _ in range(draw.randint(1, 3))]}


def _string(draw: random.Random, _depth: int) -> dict[str, Any]:
    least = draw.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 9)}


def _integer(draw: random.Random, _depth: int) -> dict[str, Any]:
    least = draw.randint(-200, 200)
    return {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 5000)}


def _enum(draw: random.Random, _depth: int) -> dict[str, Any]:
    return {"enum": draw.sample([1, -2.5, "one", "zwölf", None, True, "\n", ""], draw.randint(1, 4))}


def _const(draw: random.Random, _depth: int) -> dict[str, Any]:
    return {"const": draw.choice([7, "fixed", None, False, [1, "a"], {"a": 1}])}


def _boolean(_draw: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _null(_draw: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": "null"}


def _pattern(draw: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": draw.choice(["^[a-z]{1,5}$", "^(ab|c)d{0,3}$", "^[0-9]{3}-[0-9]{4}$"])}


def _format(draw: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": "string", "format": draw.choice(["date", "ipv4", "uuid"])}
