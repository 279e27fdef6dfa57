"""Detects a model's call format: its chat template writes a call, and each format tries to read the call."""

from __future__ import annotations

import json
from typing import Any

from app.errors import InvalidRequest
from app.text.tokenizer import Tokenizer
from app.text.tool_calls.format import FORMATS, ToolFormat
from app.text.tool_calls.parser import ToolParser

_NAME, _ARGUMENTS = "look_up", {"word": "carousel"}
_QUESTION: dict[str, Any] = {"role": "user", "content": "What is a carousel?"}
_CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abcdefgh1", "type": "function", "function": {"name": _NAME, "arguments": json.dumps(_ARGUMENTS)}}
    ],
}


def format_of(tokenizer: Tokenizer) -> ToolFormat | None:
    """Return the format that can read a call written by the model's template, or None if no format can."""
    try:
        before = tokenizer.render_chat([_QUESTION])
        written = tokenizer.render_chat([_QUESTION, _CALL], add_generation_prompt=False)
    except InvalidRequest:
        return None
    if not written.startswith(before):  # some templates start complete turns differently from generated turns
        before = tokenizer.render_chat([_QUESTION], add_generation_prompt=False)
    answer = written.removeprefix(before)
    return next((form for form in FORMATS.values() if _reads(form, answer)), None)


def _reads(form: ToolFormat, answer: str) -> bool:
    parser = ToolParser(form, {_NAME})
    calls = [call for parsed in (*parser.push(answer), *parser.flush()) for call in parsed.calls]
    return len(calls) == 1 and calls[0].name == _NAME and _arguments(calls[0].arguments) == _ARGUMENTS


def _arguments(written: str) -> Any:
    try:
        return json.loads(written)
    except ValueError:
        return None
