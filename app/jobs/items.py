"""Reads an input file line by line, in bounded memory: what is wrong with it, or the lines to work off.

Streaming for files of hundreds of megabytes. Blocks: call it in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, BinaryIO

from pydantic_core import from_json

from app.jobs.job import LineError
from app.jobs.line import InputLine

OpenFile = Callable[[], BinaryIO]

MAX_LISTED_ERRORS = 100
MAX_CUSTOM_ID_LENGTH = 512
_PIECE_BYTES = 1024 * 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRules:
    """What the lines of a batch must have in common, and how much of it there may be."""

    endpoint: str
    max_lines: int
    max_line_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What is known of a file that was read to its end, or to its hundredth error."""

    num_lines: int
    model: str | None
    errors: tuple[LineError, ...]


def check(open_file: OpenFile, rules: InputRules) -> Checked:
    """Read the whole file and say what is wrong with it. Any error means that nothing of it may run."""
    custom_ids: dict[str, int] = {}
    models: set[object] = set()
    errors: list[LineError] = []
    num_lines = 0
    with closing(read_lines(open_file, rules)) as lines:
        for line in lines:
            num_lines += 1
            if num_lines > rules.max_lines:
                errors.append(
                    LineError(code="too_many_lines", message=f"the file has more than {rules.max_lines:,} lines")
                )
            elif isinstance(line, LineError):
                errors.append(line)
            else:
                models.add(line.body.get("model") if isinstance(line.body.get("model"), str) else None)
                first = custom_ids.setdefault(line.custom_id, line.number)
                if first != line.number:
                    errors.append(_duplicate(line, first))
            if num_lines > rules.max_lines or len(errors) == MAX_LISTED_ERRORS:
                break
    if not num_lines:
        errors.append(LineError(code="empty_file", message="the file has no lines; give at least one request"))
    model = models.pop() if len(models) == 1 else None
    return Checked(num_lines=num_lines, model=model if isinstance(model, str) else None, errors=tuple(errors))


def read_lines(open_file: OpenFile, rules: InputRules) -> Generator[InputLine | LineError, None, None]:
    """The lines that are not blank, in their order, each valid or with the first thing wrong with it.

    Close it when you stop before its end: it has the file open.
    """
    with open_file() as file:
        number = 0
        while raw := file.readline(rules.max_line_bytes + 1):
            number += 1
            if len(raw) > rules.max_line_bytes and not raw.endswith(b"\n"):
                _skip_rest(file)
                yield LineError(
                    code="line_too_long",
                    line=number,
                    message=f"the line has more than {rules.max_line_bytes:,} bytes, which is what one may have",
                )
                continue
            text = raw.removeprefix(BYTE_ORDER_MARK) if number == 1 else raw
            if text.strip():
                yield _parse(text, number, rules.endpoint)


def _skip_rest(file: BinaryIO) -> None:
    while (piece := file.readline(_PIECE_BYTES)) and not piece.endswith(b"\n"):
        pass


def _parse(raw: bytes, number: int, endpoint: str) -> InputLine | LineError:
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        return LineError(code="invalid_json_line", line=number, message=f"the line is not valid JSON: {error}")
    if not isinstance(value, dict):
        return LineError(code="invalid_json_line", line=number, message="the line should be a JSON object")
    return _first_error(value, number, endpoint) or InputLine(
        number=number, custom_id=value["custom_id"], body=value["body"]
    )


def _first_error(value: dict[str, Any], number: int, endpoint: str) -> LineError | None:
    for param in ("custom_id", "method", "url", "body"):
        if value.get(param) is None:
            return LineError(
                code="missing_required_parameter", line=number, param=param, message=f"{param} is required"
            )
    custom_id, method, url, body = (value[param] for param in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_LENGTH:
        return LineError(
            code="invalid_custom_id",
            line=number,
            param="custom_id",
            message=f"custom_id should be a string of 1 to {MAX_CUSTOM_ID_LENGTH} characters",
        )
    if method != "POST":
        return LineError(
            code="invalid_method", line=number, param="method", message=f"method should be 'POST'; got {_short(method)}"
        )
    if url != endpoint:
        return LineError(
            code="invalid_url",
            line=number,
            param="url",
            message=f"url should be the batch's endpoint, {endpoint!r}; got {_short(url)}",
        )
    if not isinstance(body, dict):
        return LineError(
            code="invalid_body", line=number, param="body", message="body should be an object, the request to send"
        )
    if body.get("stream") not in (None, False):
        return LineError(
            code="stream_not_supported",
            line=number,
            param="body.stream",
            message="a batch has nobody to stream to; leave stream out",
        )
    return None


def _duplicate(line: InputLine, first: int) -> LineError:
    return LineError(
        code="duplicate_custom_id",
        line=line.number,
        param="custom_id",
        message=f"custom_id {_short(line.custom_id)} is that of line {first:,} too; every line needs its own",
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
