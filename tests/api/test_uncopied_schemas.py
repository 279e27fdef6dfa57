"""Large schemas go from a body to templates, grammars and answers without a copy of them."""

from __future__ import annotations

from typing import Any

import pytest

from app.api.output import structured_output
from app.api.output.structured_output import grammar_of
from app.api.schemas.conversation import Tool
from app.api.schemas.requests import ChatRequest
from app.api.schemas.responses import ResponsesTool, TextFormat

SCHEMA = {"type": "object", "properties": {"a": {"enum": [[[1]]]}}}


def test_of_tools_and_formats() -> None:
    parameters = Tool.model_validate(
        {"type": "function", "function": {"name": "f", "strict": True, "parameters": SCHEMA}}
    )
    written = parameters.function.for_template()
    assert written == {"name": "f", "parameters": SCHEMA}
    assert written["parameters"] is parameters.function.parameters
    tool = ResponsesTool.model_validate({"type": "function", "name": "f", "parameters": SCHEMA})
    assert tool.for_chat() == {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    assert tool.for_chat()["function"]["parameters"] is tool.parameters
    text = TextFormat.model_validate({"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True})
    assert text.for_chat() == {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    assert text.for_chat()["json_schema"]["schema"] is text.schema_


def test_of_structures(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    tags_grammar = structured_output.tags_grammar

    def noted(tags: Any, schemas: Any, **more: Any) -> Any:
        given.extend(schema for schema, *_ in schemas)
        return tags_grammar(tags, schemas, **more)

    monkeypatch.setattr(structured_output, "tags_grammar", noted)
    form = {"type": "structural_tag", "triggers": ["<f"], "structures": [{"begin": "<f>", "schema": SCHEMA}]}
    message = {"role": "user", "content": "Hi"}
    body = ChatRequest.model_validate({"messages": [message], "response_format": form})
    assert grammar_of(body) is not None
    assert body.response_format is not None
    assert body.response_format.structures is not None
    assert given[0] is body.response_format.structures[0].schema_
