"""Calls that the model must make: the grammar of an output that is nothing but calls of the tools on offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.api.output.grammars import schema_grammar
from app.api.schemas.requests import FunctionDefinition
from app.engine.request import Grammar

Json = dict[str, Any]
ANY_ARGUMENTS: Json = {"type": "object"}


def arguments_grammar(function: FunctionDefinition) -> Grammar:
    """The arguments of this function. Raises InvalidRequest when its schema is too long."""
    return schema_grammar(parameters_of(function), param="tools", is_lenient=not function.strict)


def calls_grammar(functions: Sequence[FunctionDefinition], *, only_one: bool) -> Grammar:
    """A list of at least one call: `[{"name": "f", "parameters": {…}}]`. Raises InvalidRequest when it is too long."""
    schema = {
        "type": "array",
        "minItems": 1,
        **({"maxItems": 1} if only_one else {}),
        "items": {"anyOf": [call_schema(each, number) for number, each in enumerate(functions)]},
        "$defs": {
            str(number): moved(parameters_of(each), f"#/$defs/{number}") for number, each in enumerate(functions)
        },
    }
    return schema_grammar(schema, param="tools", is_lenient=not all(each.strict for each in functions))


def call_schema(function: FunctionDefinition, number: int) -> Json:
    """A call as an object, in a schema that defines its arguments by this number."""
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "parameters": {"$ref": f"#/$defs/{number}"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def parameters_of(function: FunctionDefinition) -> Json:
    """The schema of its arguments."""
    return ANY_ARGUMENTS if function.parameters is None else {**ANY_ARGUMENTS, **function.parameters}


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
