"""Calls to custom tools, which accept plain text. A model calls a custom tool as a function with `{"input": "…"}`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from app.text.tool_calls.parser import CallParser, CallPiece, Parsed
from app.text.tool_calls.readers import decoded_string

INPUT_KEY = "input"  # key of the function's only argument
_BEGIN = f'{{"{INPUT_KEY}":"'  # without white space, which a model may add
_MAX_BEGIN = 1024  # characters, including white space
# Matches complete characters and escapes. An escaped high surrogate is incomplete without the characters after it.
_COMPLETE = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u])))*",
    re.DOTALL,
)


class InputParser:
    """Replaces the arguments of custom tool calls with their input text, which is decoded as it arrives."""

    def __init__(self, parser: CallParser, names: Collection[str]) -> None:
        self._parser = parser
        self._names = names
        self._readers: dict[int, InputReader] = {}

    @property
    def has_calls(self) -> bool:
        return self._parser.has_calls

    @property
    def is_done(self) -> bool:
        return self._parser.is_done

    def push(self, text: str) -> list[Parsed]:
        return self._with_inputs(self._parser.push(text))

    def flush(self) -> list[Parsed]:
        parsed = self._with_inputs(self._parser.flush())
        held = ((number, reader.flush()) for number, reader in self._readers.items())
        return [
            *parsed,
            *(Parsed("", (CallPiece(number, None, text, is_custom=True),)) for number, text in held if text),
        ]

    def _with_inputs(self, parsed: Iterable[Parsed]) -> list[Parsed]:
        read = ((part.text, map(self._with_input, part.calls)) for part in parsed)
        said = [Parsed(text, tuple(call for call in calls if call.name or call.arguments)) for text, calls in read]
        return [part for part in said if part.text or part.calls]

    def _with_input(self, piece: CallPiece) -> CallPiece:
        if piece.name in self._names:
            self._readers[piece.number] = InputReader()
        reader = self._readers.get(piece.number)
        return piece if reader is None else piece._replace(arguments=reader.push(piece.arguments), is_custom=True)


class InputReader:
    """Extracts the text from arguments `{"input": "…"}`. Arguments in any other form are passed through as the text."""

    def __init__(self) -> None:
        self._held = ""  # an incomplete prefix of the object or of an escape
        self._is_inside: bool | None = None  # whether the arguments have the expected form; None while undecided
        self._has_ended = False

    def push(self, written: str) -> str:
        """Read the next characters of the arguments. Returns the text that they add."""
        self._held += written
        if self._is_inside is None:
            self._begin()
        if not self._is_inside:
            return "" if self._is_inside is None else self.flush()
        if self._has_ended:
            return ""
        complete = _COMPLETE.match(self._held)
        assert complete is not None, "it also matches an empty text"
        self._held = self._held[complete.end() :]
        self._has_ended = self._held.startswith('"')
        return decoded_string(f'"{complete[0]}"') or ""

    def flush(self) -> str:
        """Return the text that is still held back, without an incomplete escape. Call this after the last piece."""
        held, self._held = self._held, ""
        return "" if self._is_inside else held

    def _begin(self) -> None:
        begun = ""
        for at, character in enumerate(self._held):
            begun += character.strip()
            if begun == _BEGIN:
                self._is_inside, self._held = True, self._held[at + 1 :]
                return
        if len(self._held) > _MAX_BEGIN or not _BEGIN.startswith(begun):
            self._is_inside = False
