"""From the fields that say what an output must look like to the grammar that the engine is given.

Here is looked at shape and size only. What a schema, a regular expression or a grammar comes to is found out where it
is compiled, beside the engine.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from app.api.output.grammars import checked_grammar, schema_grammar
from app.api.output.structural_tags import structural_tag_grammar
from app.api.schemas.requests import (
    GenerationRequest,
    ResponseFormat,
    StructuralTag,
    StructuredOutputs,
    from_validation_error,
)
from app.engine.request import Grammar, GrammarKind
from app.errors import InvalidRequest

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def grammar_of(body: GenerationRequest) -> Grammar | None:
    """What the output of a request must look like; None where anything will do. Raises InvalidRequest."""
    from_format = None if body.response_format is None else _of_format(body.response_format, body.format_param)
    from_vendor = None if body.structured_outputs is None else _of_vendor(body.structured_outputs)
    if from_format is not None and from_vendor is not None:
        raise InvalidRequest(
            f"{body.format_param} and structured_outputs both say what the output must look like; send one of them",
            param="structured_outputs",
        )
    return from_format or from_vendor


def _of_format(given: ResponseFormat, param: str) -> Grammar | None:
    """OpenAI's. Without `strict` they promise to try, and so keywords that are not known do no harm."""
    if given.type == "text":
        return None
    if given.type == "json_object":
        return schema_grammar(_ANY_OBJECT, param=param)
    if given.type == "structural_tag":
        return structural_tag_grammar(_structural_tag(given.model_dump(by_alias=True, exclude_none=True), param), param)
    if given.json_schema is None:
        raise InvalidRequest(f"{param}.json_schema is required with the type json_schema", param=f"{param}.json_schema")
    schema = given.json_schema.schema_ or {}
    return schema_grammar(schema, param=param, is_lenient=not given.json_schema.strict)


def _of_vendor(given: StructuredOutputs) -> Grammar | None:
    """vLLM's: exactly one of its fields."""
    wishes = {
        "json": given.json_,
        "regex": given.regex,
        "choice": given.choice,
        "grammar": given.grammar,
        "json_object": given.json_object or None,
        "structural_tag": given.structural_tag,
    }
    named = [name for name, value in wishes.items() if value is not None]
    if not named:
        return None
    if len(named) > 1:
        raise InvalidRequest(
            f"structured_outputs has {' and '.join(named)}; send one of them", param="structured_outputs"
        )
    [name] = named
    return _of_wish(given, f"structured_outputs.{name}")


def _of_wish(given: StructuredOutputs, param: str) -> Grammar:
    if given.json_ is not None:
        return schema_grammar(_object(given.json_, param), param=param)
    if given.regex is not None:
        return checked_grammar(GrammarKind.REGEX, given.regex, param=param)
    if given.choice is not None:
        return checked_grammar(GrammarKind.CHOICE, json.dumps(given.choice), param=param)
    if given.grammar is not None:
        return checked_grammar(GrammarKind.GRAMMAR, given.grammar, param=param)
    if given.structural_tag is not None:
        return structural_tag_grammar(_structural_tag(_object(given.structural_tag, param), param), param)
    return schema_grammar(_ANY_OBJECT, param=param)


def _structural_tag(given: dict[str, Any], param: str) -> StructuralTag:
    try:
        return StructuralTag.model_validate(given)
    except ValidationError as error:
        raise from_validation_error(error, within=param) from None


def _object(given: dict[str, Any] | str, param: str) -> dict[str, Any]:
    """An object as it is, or as JSON in a string."""
    if isinstance(given, dict):
        return given
    try:
        schema = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param=param) from None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param} should be a JSON object", param=param)
    return schema
