"""Walks the schemas in a JSON schema. Values of `const`, `enum`, `default` and examples are data, not schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Json = dict[str, Any]
Place = tuple[str, ...]  # path from the outermost schema: names of keywords and properties, and list indexes
Change = Callable[[Json, Place], Any]

# The values of SCHEMA_KEYWORDS are schemas or lists of schemas. The values of NAMED_SCHEMAS map names to schemas.
SCHEMA_KEYWORDS = frozenset(
    "additionalItems additionalProperties allOf anyOf contains contentSchema else if items not oneOf prefixItems "
    "propertyNames then unevaluatedItems unevaluatedProperties".split()
)
NAMED_SCHEMAS = frozenset(
    ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
)
_DATA = frozenset(("const", "default", "enum", "example", "examples"))


def changed(schema: Any, change: Change) -> Any:
    """Return a copy in which each schema is replaced by `change(schema, place)`, inner schemas first.

    The value of an unknown keyword, such as `components`, is only searched for schemas if a reference points into it.
    """
    return _changed(schema, change, (), {ref.split("/")[1] for ref in references(schema) if ref.startswith("#/")})


def references(schema: Any) -> Iterator[str]:
    """Yield all references (`$ref`) in a schema."""
    if isinstance(schema, list):
        for item in schema:
            yield from references(item)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            if name == "$ref" and isinstance(value, str):
                yield value
            elif name in NAMED_SCHEMAS and isinstance(value, dict):
                yield from references(list(value.values()))
            elif name not in _DATA:
                yield from references(value)


def _changed(schema: Any, change: Change, place: Place, referenced: set[str]) -> Any:
    if not isinstance(schema, dict):
        return schema

    def within(name: str, value: Any) -> Any:
        if name in SCHEMA_KEYWORDS and isinstance(value, list):
            return [_changed(item, change, (*place, name, str(at)), referenced) for at, item in enumerate(value)]
        if name in SCHEMA_KEYWORDS:
            return _changed(value, change, (*place, name), referenced)
        if name in NAMED_SCHEMAS and isinstance(value, dict):
            return {key: _changed(item, change, (*place, name, key), referenced) for key, item in value.items()}
        if name in referenced and name not in _DATA and isinstance(value, dict):
            return _changed(value, change, (*place, name), {*referenced, *value})
        return value

    return change({name: within(name, value) for name, value in schema.items()}, place)
