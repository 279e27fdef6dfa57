"""One line of a batch: what goes in, how it is answered, and the line that comes out."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLine:
    """A valid line of an input file."""

    number: int  # from 1
    custom_id: str
    body: Json


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of a line's request: what an HTTP client would have got."""

    status_code: int
    body: Json


# The seam to whoever answers, by owner, endpoint and body. Raises Overloaded, Unavailable or EngineStopped when nobody
# can do so now: the line is tried again later. Cancelling it aborts the request.
Answer = Callable[[str, str, Mapping[str, Any]], Awaitable[Answered]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResult:
    """The end of a line: one line of the output file or of the error file."""

    batch_id: str
    line_number: int
    is_error: bool
    text: str  # JSON without a line end
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


def result_of(batch_id: str, line: InputLine, answered: Answered) -> LineResult:
    """What is kept of an answered line. Anything but a 200 belongs into the error file."""
    response = {"status_code": answered.status_code, "request_id": uuid.uuid4().hex, "body": answered.body}
    usage = answered.body.get("usage") or {}
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return LineResult(
        batch_id=batch_id,
        line_number=line.number,
        is_error=answered.status_code != 200,
        text=_output_line(line.custom_id, response, None),
        # Of replies they have other names than of completions.
        num_input_tokens=usage.get("prompt_tokens", usage.get("input_tokens", 0)),
        num_cached_tokens=details.get("cached_tokens", 0),
        num_output_tokens=usage.get("completion_tokens", usage.get("output_tokens", 0)),
    )


def failed_line(batch_id: str, line: InputLine, code: str, message: str) -> LineResult:
    """What is kept of a line that has ended without an answer."""
    return LineResult(
        batch_id=batch_id, line_number=line.number, is_error=True, text=unfinished_line(line, code, message)
    )


def unfinished_line(line: InputLine, code: str, message: str) -> str:
    """The line of the error file for one that was not answered before its batch ended."""
    return _output_line(line.custom_id, None, {"code": code, "message": message})


def _output_line(custom_id: str, response: Json | None, error: Json | None) -> str:
    return _encode(
        {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    )
