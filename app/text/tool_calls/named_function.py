"""A text that is nothing but the arguments of one function, because it was made to be."""

from __future__ import annotations

from app.text.tool_calls.parser import CallPiece, Parsed


class NamedFunction:
    """Everything is arguments of that function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.has_calls = False
        self.is_done = False

    def push(self, text: str) -> Parsed:
        if not text:
            return Parsed("", ())
        name = None if self.has_calls else self._name
        self.has_calls = True
        return Parsed("", (CallPiece(0, name, text),))

    def flush(self) -> Parsed:
        return Parsed("", ())
