"""Builds the grammar of a request's output from its structured-output fields.

Only types and sizes are checked here. The replica compiles schemas, regular expressions and grammars.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from app.api.json_structure import is_longer
from app.api.schemas.requests import GenerationRequest, ResponseFormat, StructuralTag, StructuredOutputs
from app.engine.request import MAX_GRAMMAR_CHARACTERS, Grammar, GrammarKind
from app.errors import InvalidRequest
from app.json_input import read_json
from app.json_pieces import Json

Content = list[Any]  # the parts of a tag (see app/grammar/tags.py)


class NamedSchema(NamedTuple):
    """A schema that a tag's content must match."""

    schema: Json
    is_lenient: bool  # ignore keywords that cannot be enforced; the response lists their paths
    name: str  # the prefix of these paths


_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def grammar_of(body: GenerationRequest) -> Grammar | None:
    """Return the grammar of a request's output, or None for free text. Raises InvalidRequest."""
    asked: dict[str, Grammar | None] = {}
    if body.response_format is not None:
        asked[body.format_param] = _of_format(body.response_format, body.format_param)
    if body.structured_outputs is not None:
        asked["structured_outputs"] = _from_structured_outputs(body.structured_outputs)
    for name, part in _OTHER_NAMES:
        given = getattr(body, name)
        if given != "":
            asked[name] = _of_part(part, given, name)
    grammars = {name: grammar for name, grammar in asked.items() if grammar is not None}
    if len(grammars) > 1:
        raise InvalidRequest(
            f"{' and '.join(grammars)} each define the form of the output; send only one of them",
            param=list(grammars)[1],
        )
    return next(iter(grammars.values()), None)


# SGLang's and llama.cpp's names for fields of `structured_outputs`, each with the equivalent field.
_OTHER_NAMES = (("regex", "regex"), ("ebnf", "grammar"), ("grammar", "grammar"), ("json_schema", "json"))


# The fields that a response format accepts besides `type`, by its type.
_OF_TYPE = {
    "text": (), "json_object": ("schema",), "json_schema": ("json_schema", "schema"),
    "structural_tag": ("structures", "triggers"),
}  # fmt: skip


def _of_format(given: ResponseFormat, param: str) -> Grammar | None:
    """Convert OpenAI's response format. Without `strict`, schema keywords that cannot be enforced are ignored."""
    foreign = given.uncopied().keys() - {"type", *_OF_TYPE[given.type]}
    if foreign or (given.schema_ is not None and given.json_schema is not None):
        name = min(foreign, default="schema")
        beside = "" if foreign else " and a json_schema"
        raise InvalidRequest(
            f"{param}.{name} is not allowed with the type {given.type}{beside}; leave it out", param=f"{param}.{name}"
        )
    if given.type == "text":
        return None
    if given.type == "structural_tag":
        return structural_tag_grammar(StructuralTag.checked(given.uncopied(), within=param), param)
    if given.schema_ is not None:
        return schema_grammar(given.schema_, param=f"{param}.schema", is_lenient=True)
    if given.type == "json_object":
        return schema_grammar(_ANY_OBJECT, param=param)
    if given.json_schema is None:
        raise InvalidRequest(f"{param}.json_schema is required with the type json_schema", param=f"{param}.json_schema")
    schema = given.json_schema.schema_ or {}
    return schema_grammar(schema, param=param, is_lenient=not given.json_schema.strict)


def _from_structured_outputs(given: StructuredOutputs) -> Grammar | None:
    """Convert vLLM's `structured_outputs`. Raises InvalidRequest if it sets more than one of its fields."""
    named = {field.alias or name: getattr(given, name) for name, field in StructuredOutputs.model_fields.items()}
    named = {name: value for name, value in named.items() if value is not None}
    if len(named) > 1:
        raise InvalidRequest(
            f"structured_outputs contains `{'` and `'.join(named)}`; send only one of them", param="structured_outputs"
        )
    for name, value in named.items():
        return _of_part(name, value, f"structured_outputs.{name}")
    return None


def _of_part(name: str, value: Any, param: str) -> Grammar:
    """Convert one field of `structured_outputs`, sent as `param`. vLLM has no `strict`, so schemas are lenient."""
    match name:
        case "json":
            return schema_grammar(_object(value, param), param=param, is_lenient=True)
        case "regex":
            return checked_grammar(GrammarKind.REGEX, value, param=param)
        case "choice":
            return checked_grammar(GrammarKind.CHOICE, _written(value, param), param=param)
        case "grammar":
            return checked_grammar(GrammarKind.GRAMMAR, value, param=param)
        case "structural_tag":
            return structural_tag_grammar(StructuralTag.checked(_object(value, param), within=param), param)
        case _:
            return schema_grammar(_ANY_OBJECT, param=param)


def _object(given: dict[str, Any] | str, param: str) -> dict[str, Any]:
    """Return an object that is given directly or as JSON in a string. Raises InvalidRequest."""
    if isinstance(given, dict):
        return given
    if len(given) > MAX_GRAMMAR_CHARACTERS:
        raise _too_long(f"{len(given):,}", param)
    try:
        schema = read_json(given.encode())
    except ValueError as error:
        raise InvalidRequest(f"{param} is not valid JSON: {error}", param=param) from None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param} should be a JSON object", param=param)
    return schema


def structural_tag_grammar(given: StructuralTag, param: str) -> Grammar:
    """Return a grammar of free text in which triggers start structures. Raises InvalidRequest if one has no match."""
    structures = given.structures
    for number, structure in enumerate(structures):
        if not any(structure.begin.startswith(trigger) for trigger in given.triggers):
            raise InvalidRequest(
                f"{param}.structures[{number}].begin is {structure.begin[:60]!r}, which does not start with any "
                f"trigger; add a prefix of it to {param}.triggers",
                param=f"{param}.structures",
            )
    tags = [
        tag(trigger, [structure.begin.removeprefix(trigger), {"schema": number}, structure.end])
        for trigger in dict.fromkeys(given.triggers)
        for number, structure in enumerate(structures)
        if structure.begin.startswith(trigger)
    ]
    idle = set(given.triggers) - {each["trigger"] for each in tags}
    if idle:
        raise InvalidRequest(
            f"{param}.triggers contains {min(idle)[:60]!r}, but the `begin` of no structure starts with it; leave it "
            f"out",
            param=f"{param}.triggers",
        )
    schemas = [NamedSchema(each.schema_ or {}, True, f"structures.{number}") for number, each in enumerate(structures)]
    return tags_grammar(tags, schemas, param=param)


def schema_grammar(schema: dict[str, Any], *, param: str, is_lenient: bool = False) -> Grammar:
    """Return the grammar of JSON documents that match a schema from the field `param`.

    With `is_lenient`, keywords that cannot be enforced are ignored, and the response lists them. Raises InvalidRequest
    if the schema is too long.
    """
    return checked_grammar(GrammarKind.JSON_SCHEMA, _written(schema, param), param=param, is_lenient=is_lenient)


def tag(trigger: str, content: Content, *, is_opening: bool = False, is_last: bool = False) -> Json:
    """Return a tag: the content that must follow a trigger in free text (see app/grammar/tags.py)."""
    return {"trigger": trigger, "is_opening": is_opening, "content": content, "is_last": is_last}


def tags_grammar(
    tags: Sequence[Json],
    schemas: Sequence[NamedSchema],
    *,
    param: str,
    larks: Sequence[Json | None] = (),
) -> Grammar:
    """Return a grammar of free text with tags, whose contents refer to `schemas` and `larks` by index.

    Each entry of `larks` has a Lark grammar (`lark`) and a `name`. Raises InvalidRequest if the grammar is too long.
    """
    written = [schema._asdict() for schema in schemas]
    return checked_grammar(
        GrammarKind.TAGS, _written({"schemas": written, "larks": list(larks), "tags": list(tags)}, param), param=param
    )


def checked_grammar(kind: GrammarKind, text: str, *, param: str, is_lenient: bool = False) -> Grammar:
    """Return a grammar from the field `param`. Raises InvalidRequest if its text is too long."""
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise _too_long(f"{len(text):,}", param)
    return Grammar(kind, text, is_lenient=is_lenient, param=param)


def _written(value: Any, param: str) -> str:
    """Return a value as JSON. Raises InvalidRequest before encoding a value that is certainly too long."""
    if is_longer(value, MAX_GRAMMAR_CHARACTERS):
        raise _too_long(f"more than {MAX_GRAMMAR_CHARACTERS:,}", param)
    return json.dumps(value)


def _too_long(num_characters: str, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param} has {num_characters} characters; at most {MAX_GRAMMAR_CHARACTERS:,} are accepted; shorten it",
        param=param,
    )
