"""Grammars of outputs with tool calls: forced calls, and optional calls that must match their schemas."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from app.api.output.structured_output import (
    Content,
    NamedSchema,
    checked_grammar,
    schema_grammar,
    tag,
    tags_grammar,
)
from app.api.schemas.conversation import Definition, FunctionDefinition
from app.engine.request import Grammar, GrammarKind
from app.errors import InvalidRequest
from app.json_pieces import Json
from app.json_schema import Place, changed
from app.text.tool_calls import LIST, PlainReader, ToolFormat

_SPACE = r"( ?|\n[ \t]{0,40})"  # white space between the tokens of a document
_MAYBE_SPACE: Json = {"any": [[], [{"pattern": r"[ \n]{1,2}"}]]}
_CALL_ID: Json = {"any": [[], ["[CALL_ID]", {"pattern": "[A-Za-z0-9]{9}"}]]}
ANY_ARGUMENTS: Json = {"type": "object"}


def arguments_grammar(function: Definition) -> Grammar | None:
    """Return the grammar of a function's arguments or of a custom tool's input, or None if the input may be any text.

    Raises InvalidRequest if the schema or grammar is too long.
    """
    if isinstance(function, FunctionDefinition):
        return schema_grammar(parameters_of(function), param="tools", is_lenient=not function.strict)
    given = function.format.grammar
    if given is None:
        return None
    kind = GrammarKind.REGEX if given.syntax == "regex" else GrammarKind.GRAMMAR
    return checked_grammar(kind, given.definition, param="tools")


def calls_grammar(functions: Sequence[Definition], *, only_one: bool) -> Grammar:
    """Return the grammar of a list of one or more calls: `[{"name": "f", "arguments": {…}}]`. Raises InvalidRequest."""
    tags = [tag("", content, is_last=True) for content in _marked(LIST, functions, only_one=only_one)]
    schemas = [NamedSchema(parameters_of(each), not each.strict, each.name) for each in functions]
    return tags_grammar(tags, schemas, param="tools", larks=_larks(functions))


def call_schema(function: Definition, number: int) -> Json:
    """Return the schema of a call as an object. Definition `number` of the enclosing schema defines the arguments."""
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "parameters": {"$ref": f"#/$defs/{number}"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def parameters_of(function: Definition) -> Json:
    """Return the schema of a function's arguments. The arguments are an object, regardless of the schema's type."""
    return {**(function.parameters or {}), **ANY_ARGUMENTS}


def moved(schema: Any, place: str) -> Any:
    """Return a schema for the JSON pointer `place` inside another schema, with its references adjusted."""

    def pointed(one: Json, _: Place) -> Json:
        ref = one.get("$ref")
        return one | {"$ref": place + ref[1:]} if isinstance(ref, str) and ref.startswith("#") else one

    return changed(schema, pointed)


def strict_calls_grammar(functions: Sequence[Definition], form: ToolFormat) -> Grammar:
    """Return a grammar of free text in which every call in this format calls one of `functions`.

    The arguments of a strict function match its schema; other arguments are any object. Raises InvalidRequest if the
    schemas are too long.
    """
    is_last = not form.end or any(_larks(functions))
    tags = [tag(form.begin, content, is_last=is_last) for content in _marked(form, functions)]
    if form.may_begin_bare:  # allow one call only: allowing all functions after each call compiles too slowly
        tags += [
            tag(f'{{"name":"{each.name}"', _arguments(form, number, each), is_opening=True, is_last=True)
            for number, each in enumerate(functions)
        ]
    return tags_grammar(tags, _schemas(functions), param="tools", larks=_larks(functions))


def document_or_calls_grammar(
    schema: Json, functions: Sequence[Definition], form: ToolFormat, *, param: str, is_lenient: bool
) -> Grammar:
    """Return a grammar that allows either one document of `schema`, from the field `param`, or only calls.

    A format that does not mark calls allows only one call. The call and the document are then both objects, and only
    their schemas distinguish them. Raises InvalidRequest if the schemas are too long or cannot be distinguished.
    """
    contents: list[Content] = [[{"schema": len(functions)}]]
    larks = _larks(functions)
    for content in _marked(form, functions):
        again = [{"repeat": [_MAYBE_SPACE, form.begin, *content]}] if form.end and not any(larks) else []
        contents.append([form.begin, *content, *again])
    schemas = _schemas(functions)
    if form.may_begin_bare:
        if named := [each["name"] for each in larks if each]:
            raise InvalidRequest(
                f"the Lark grammar of the tool {named[0]!r} cannot be used with {param}: this model does not mark "
                f"calls, so only schemas distinguish calls from documents; leave out one of the two",
                param="tools",
            )
        schema = _document_or_call(schema, schemas, functions)
        is_lenient = is_lenient or any(each.is_lenient for each in schemas)
    tags = [tag("", content, is_last=True) for content in contents]
    # Name `tools` in errors only if a function is strict: the schemas of other functions are always valid.
    param = "tools" if any(each.strict for each in functions) else param
    return tags_grammar(tags, [*schemas, NamedSchema(schema, is_lenient, "")], param=param, larks=larks)


def _document_or_call(schema: Json, arguments: Sequence[NamedSchema], functions: Sequence[Definition]) -> Json:
    places = {str(number): moved(each.schema, f"#/$defs/{number}") for number, each in enumerate(arguments)}
    calls = [call_schema(each, number) for number, each in enumerate(functions)]
    document = moved(schema, "#/$defs/document")
    return {"anyOf": [{"$ref": "#/$defs/document"}, *calls], "$defs": {"document": document, **places}}


def _schemas(functions: Sequence[Definition]) -> list[NamedSchema]:
    return [
        NamedSchema(parameters_of(each) if each.strict else ANY_ARGUMENTS, not each.strict, each.name)
        for each in functions
    ]


def _larks(functions: Sequence[Definition]) -> list[Json | None]:
    """Return the Lark grammar of each function's input, or None for a function without one."""
    return [None if each.lark is None else {"lark": each.lark, "name": each.name} for each in functions]


def _marked(form: ToolFormat, functions: Sequence[Definition], *, only_one: bool = False) -> list[Content]:
    """Return the contents that may follow the format's marker: calls as objects, in the format's brackets.

    An input with a Lark grammar may be any text, so it extends to the end of the output. Functions with such an input
    therefore allow only one call. The input is not a JSON string, because two terminals could then start with a
    backslash, and llguidance looks only one byte ahead.
    """
    numbered = [(number, each) for number, each in enumerate(functions) if each.lark is None]
    first = [_MAYBE_SPACE, "[", _MAYBE_SPACE] if form.lead else [_MAYBE_SPACE]
    raw: list[Content] = [
        [*first, *_call(form, number, each)] for number, each in enumerate(functions) if each.lark is not None
    ]
    if not numbered:
        return raw
    calls: Json = {"any": [_call(form, number, each) for number, each in numbered]}
    more = [] if only_one or raw else _more(form, calls)
    if not form.lead:
        return [[*first, calls, *([_MAYBE_SPACE, form.end] if form.end else more)], *raw]
    end: Content = [_MAYBE_SPACE, form.end] if form.end else []
    contents: list[Content] = [[*first, calls, *more, _MAYBE_SPACE, "]", *end], *raw]
    if form.own is PlainReader:
        plain: Json = {"any": [[each.name, _CALL_ID, "[ARGS]", {"schema": number}] for number, each in numbered]}
        contents.append([plain, *([] if raw else [{"repeat": [form.begin, plain]}])])
    return contents


def _call(form: ToolFormat, number: int, function: Definition) -> Content:
    """Return the content of one call, written as an object."""
    name = re.escape(function.name)
    return [{"pattern": rf'\{{{_SPACE}"name"{_SPACE}:{_SPACE}"{name}"'}, *_arguments(form, number, function)]


def _arguments(form: ToolFormat, number: int, function: Definition) -> Content:
    """Return the content of a call after its name. A Lark input follows after the object, whose arguments are empty."""
    key = rf'{_SPACE},{_SPACE}"{form.arguments_key}"{_SPACE}:{_SPACE}'
    if function.lark is not None:
        return [{"pattern": key}, "{}}\n", {"lark": number}]
    return [{"pattern": key}, {"schema": number}, {"pattern": rf"{_SPACE}\}}"}]


def _more(form: ToolFormat, calls: Json) -> Content:
    """Return the calls after the first one, or [] if the format does not separate calls."""
    if not form.separators:
        return []
    return [{"repeat": [{"pattern": rf"{_SPACE}{re.escape(form.separators[0])}{_SPACE}"}, calls]}]
