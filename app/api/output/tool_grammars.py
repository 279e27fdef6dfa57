"""Grammars of outputs with tool calls: calls that are forced, and free calls that keep to their schemas."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from app.api.output.structured_output import Content, schema_grammar, tag, tags_grammar
from app.api.schemas.conversation import FunctionDefinition
from app.engine.request import Grammar
from app.json_pieces import Json
from app.text.tool_calls import ToolFormat

_SPACE = r"( ?|\n[ \t]{0,40})"  # white space between the tokens of a document
_MAYBE_SPACE: Json = {"any": [[], [{"pattern": r"[ \n]{1,2}"}]]}
_CALL_ID: Json = {"any": [[], ["[CALL_ID]", {"pattern": "[A-Za-z0-9]{9}"}]]}
ANY_ARGUMENTS: Json = {"type": "object"}


def arguments_grammar(function: FunctionDefinition) -> Grammar:
    """A document of this function's arguments. Raises InvalidRequest when the schema is too long."""
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
    """The schema rewritten for `place` inside another schema: its references point into itself."""
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


def strict_calls_grammar(functions: Sequence[FunctionDefinition], form: ToolFormat) -> Grammar:
    """Free text in which every call, as this format writes them, is one of these functions'.

    Its arguments are a document of the function's schema where that is strict, else any object. Raises InvalidRequest
    when the schemas are too long.
    """
    calls = _calls(form, functions)
    is_last = not form.end
    tags = [tag(form.begin, content, is_last=is_last) for content in _marked(form, functions, calls)]
    if form.may_begin_bare:  # one call: a grammar with all of them after each would take too long to compile
        tags += [
            tag(f'{{"name":"{each.name}"', _arguments(form, number), is_opening=True, is_last=True)
            for number, each in enumerate(functions)
        ]
    return tags_grammar(tags, _schemas(functions), param="tools")


def document_or_calls_grammar(
    schema: Json, functions: Sequence[FunctionDefinition], form: ToolFormat, *, param: str, is_lenient: bool
) -> Grammar:
    """A document of the schema, which came in the field `param`, or calls and nothing else, as above.

    Where nothing marks a call there may be one: it and the document are objects, distinguished by their schemas. Raises
    InvalidRequest as above.
    """
    contents: list[Content] = [[{"schema": len(functions)}]]
    for content in _marked(form, functions, _calls(form, functions)):
        again = [{"repeat": [_MAYBE_SPACE, form.begin, *content]}] if form.end else []
        contents.append([form.begin, *content, *again])
    schemas = _schemas(functions)
    if form.may_begin_bare:
        schema = _document_or_call(schema, schemas, functions)
        is_lenient = is_lenient or any(each for _, each in schemas)
    tags = [tag("", content, is_last=True) for content in contents]
    # Only strict functions have schemas of their own that may be wrong.
    param = "tools" if any(each.strict for each in functions) else param
    return tags_grammar(tags, [*schemas, (schema, is_lenient)], param=param)


def _document_or_call(
    schema: Json, arguments: Sequence[tuple[Json, bool]], functions: Sequence[FunctionDefinition]
) -> Json:
    places = {str(number): moved(each, f"#/$defs/{number}") for number, (each, _) in enumerate(arguments)}
    calls = [call_schema(each, number) for number, each in enumerate(functions)]
    document = moved(schema, "#/$defs/document")
    return {"anyOf": [{"$ref": "#/$defs/document"}, *calls], "$defs": {"document": document, **places}}


def _schemas(functions: Sequence[FunctionDefinition]) -> list[tuple[Json, bool]]:
    return [(parameters_of(each) if each.strict else ANY_ARGUMENTS, not each.strict) for each in functions]


def _calls(form: ToolFormat, functions: Sequence[FunctionDefinition]) -> Json:
    """One of the calls, as an object."""
    return {"any": [_call(form, each.name, number) for number, each in enumerate(functions)]}


def _marked(form: ToolFormat, functions: Sequence[FunctionDefinition], calls: Json) -> list[Content]:
    """The contents that may follow the marker before calls."""
    if form.end:
        return [[_MAYBE_SPACE, calls, _MAYBE_SPACE, form.end]]
    if not form.lead:
        return [[_MAYBE_SPACE, calls, *_more(form, calls)]]
    contents: list[Content] = [[_MAYBE_SPACE, "[", _MAYBE_SPACE, calls, *_more(form, calls), _MAYBE_SPACE, "]"]]
    if form.has_plain_names:
        plain: Json = {
            "any": [[each.name, _CALL_ID, "[ARGS]", {"schema": number}] for number, each in enumerate(functions)]
        }
        contents.append([plain, {"repeat": [form.begin, plain]}])
    return contents


def _call(form: ToolFormat, name: str, number: int) -> Content:
    """A call as an object."""
    return [{"pattern": rf'\{{{_SPACE}"name"{_SPACE}:{_SPACE}"{re.escape(name)}"'}, *_arguments(form, number)]


def _arguments(form: ToolFormat, number: int) -> Content:
    """The rest of such an object after the name."""
    key = rf'{_SPACE},{_SPACE}"{form.arguments_key}"{_SPACE}:{_SPACE}'
    return [{"pattern": key}, {"schema": number}, {"pattern": rf"{_SPACE}\}}"}]


def _more(form: ToolFormat, calls: Json) -> Content:
    """More calls after the first."""
    return [{"repeat": [{"pattern": rf"{_SPACE}{re.escape(form.separators[0])}{_SPACE}"}, calls]}]
