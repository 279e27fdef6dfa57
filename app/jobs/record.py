"""What a row comes to: one record of the output."""

from __future__ import annotations

import json
from dataclasses import dataclass

# A file's columns in their order; `row` is the row's number in the input, from 0, blank lines not counted.
COLUMNS = ("row", "id", "text", "finish_reason", "prompt_tokens", "completion_tokens", "error")
COUNTING_COLUMNS = ("row", "prompt_tokens", "completion_tokens")  # whole numbers; the others are texts or null


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One row's answer, or in `error` why it has none; then `text` and `finish_reason` are None."""

    row: int
    id: str
    text: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None

    def to_line(self) -> bytes:
        """The record as one line of JSON, with its line end."""
        columns = {name: getattr(self, name) for name in COLUMNS}
        return json.dumps(columns, ensure_ascii=False).encode("utf-8", errors="replace") + b"\n"
