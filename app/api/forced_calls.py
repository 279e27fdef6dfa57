"""Calls that the model must make: the grammar of an output that is nothing but calls of the tools on offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.api.schemas import FunctionDefinition
from app.api.structured_output import schema_grammar
from app.engine.request import Grammar

Json = dict[str, Any]
_ANY_ARGUMENTS: Json = {"type": "object"}


def arguments_grammar(function: FunctionDefinition) -> Grammar:
    """The arguments of this function. Raises InvalidRequest when its schema is too long."""
    return schema_grammar(_parameters(function), param="tools", is_lenient=not function.strict)


def calls_grammar(functions: Sequence[FunctionDefinition], *, only_one: bool) -> Grammar:
    """A list of at least one call: `[{"name": "f", "parameters": {…}}]`. Raises InvalidRequest when it is too long."""
    schema = {
        "type": "array",
        "minItems": 1,
        **({"maxItems": 1} if only_one else {}),
        "items": {"anyOf": [_call(each, number) for number, each in enumerate(functions)]},
        "$defs": {str(number): moved(_parameters(each), f"#/$defs/{number}") for number, each in enumerate(functions)},
    }
    return schema_grammar(schema, param="tools", is_lenient=not all(each.strict for each in functions))


def _call(function: FunctionDefinition, number: int) -> Json:
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "parameters": {"$ref": f"#/$defs/{number}"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _parameters(function: FunctionDefinition) -> Json:
    return _ANY_ARGUMENTS if function.parameters is None else {**_ANY_ARGUMENTS, **function.parameters}


def moved(schema: Any, place: str) -> Any:
    """A schema as it must be written where it is part of another, at `place`: its references lead into itself."""
    if isinstance(schema, list):
        return [moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: place + value[1:]
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else moved(value, place)
        for name, value in schema.items()
    }
