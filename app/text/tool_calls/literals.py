"""Converts values in Python, JSON and Gemma notation to JSON as they arrive."""

from __future__ import annotations

import json
import re
import sys
from string import hexdigits

from app.text.begun import partial_match_length
from app.text.tool_calls.readers import JsonPlace

_MARK = '<|"|>'  # Gemma's quote mark; there are no escapes between two marks
_OPENED = {"{": "{", "[": "[", "(": "["}
_CLOSED = {"}": "}", "]": "]", ")": "]"}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_ESCAPES = {"'": "'", '"': '\\"', "\\": "\\\\", **{letter: f"\\{letter}" for letter in "nrtbf"}}
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}  # hexadecimal digits after each kind of escape


class JsonWriter:
    """Converts one value to JSON, character by character. Does not check that the result is valid JSON.

    A word that is neither a number nor a constant, such as an unquoted member name, becomes a string.
    """

    def __init__(self) -> None:
        self.unread = ""  # characters that looked like the start of a quote mark; set only after BEYOND
        self._written: list[str] = []
        self._depth = 0
        self._has_ended = False  # whether a value outside brackets is complete
        self._needs_comma = False  # whether a comma was read, but not the following value
        self._word: list[str] = []
        self._quote = ""  # opening quote of the current string
        self._held = ""  # a possible prefix of a quote mark
        self._escape = ""  # the part of the current escape that has been read

    def take(self) -> str:
        """Return the JSON that was written since the last call."""
        written, self._written = "".join(self._written), []
        return written

    def advance(self, character: str) -> JsonPlace:
        """Convert the next character. Returns BEYOND if the value ended before this character."""
        if self._quote:
            return self._in_text(character)
        if self._held or character == "<":
            return self._in_mark(character)
        if character.isspace():
            self._end_word()
            return JsonPlace.INSIDE
        if character in _CLOSED:
            return self._close(character)
        if self._has_ended or (not self._depth and character in ",:"):
            return self._beyond()
        if character in ",:":
            self._end_word()
            self._needs_comma = character == ","
            self._written += () if self._needs_comma else (": ",)
        elif character in _OPENED:
            self._end_word()
            self._write(_OPENED[character])
            self._depth += 1
        elif character in "'\"" and not self._word:
            self._begin_text(character)
        else:
            self._word.append(character)
        return JsonPlace.INSIDE

    def _in_mark(self, character: str) -> JsonPlace:
        self._held += character
        if self._has_ended or self._word or not _MARK.startswith(self._held):
            self.unread, self._held = self._held[:-1], ""
            return self._beyond()
        if self._held == _MARK:
            self._begin_text(_MARK)
        return JsonPlace.INSIDE

    def _begin_text(self, quote: str) -> None:
        self._quote, self._held = quote, ""
        self._write('"')

    def _in_text(self, character: str) -> JsonPlace:
        if self._escape:
            self._in_escape(character)
        elif character == "\\" and self._quote != _MARK:
            self._escape = character
        else:
            self._held += character
            if self._held == self._quote:
                self._written.append('"')
                self._quote, self._held, self._has_ended = "", "", not self._depth
            else:
                num_held = partial_match_length(self._held, self._quote)
                said, self._held = self._held[: len(self._held) - num_held], self._held[len(self._held) - num_held :]
                self._written.append(json.dumps(said, ensure_ascii=False)[1:-1])
        return JsonPlace.INSIDE

    def _in_escape(self, character: str) -> None:
        """Read an escape by Python's rules: a backslash that does not start a valid escape is a plain backslash."""
        self._escape += character
        kind, digits = self._escape[1], self._escape[2:]
        num_digits = _NUM_DIGITS.get(kind, 0)
        if digits.strip(hexdigits):
            broken, self._escape = self._escape[:-1], ""
            self._written.append(json.dumps(broken)[1:-1])
            self._in_text(character)
        elif len(digits) == num_digits:
            self._written.append(_in_json(self._escape, int(digits or "0", 16)))
            self._escape = ""

    def _close(self, character: str) -> JsonPlace:
        if not self._depth:
            return self._beyond()
        self._end_word()
        self._needs_comma = False
        self._written.append(_CLOSED[character])
        self._depth -= 1
        return JsonPlace.INSIDE if self._depth else JsonPlace.LAST

    def _beyond(self) -> JsonPlace:
        self._end_word()
        return JsonPlace.BEYOND

    def _end_word(self) -> None:
        if self._word:
            word, self._word = "".join(self._word), []
            is_number = _NUMBER.fullmatch(word) is not None
            self._write(_WORDS.get(word) or (word if is_number else json.dumps(word, ensure_ascii=False)))
            self._has_ended = not self._depth

    def _write(self, text: str) -> None:
        self._written.append(f", {text}" if self._needs_comma else text)
        self._needs_comma = False


def _in_json(escape: str, code: int) -> str:
    """Return a complete Python escape as part of a JSON string. `code` is the value of its digits."""
    if escape[1] not in _NUM_DIGITS:
        return _ESCAPES.get(escape[1]) or json.dumps(escape, ensure_ascii=False)[1:-1]
    if code < 0x10000:
        return f"\\u{code:04x}"
    return json.dumps(chr(code) if code <= sys.maxunicode else escape)[1:-1]


def as_json(written: str) -> str:
    """Return a value as JSON: valid JSON is unchanged, Python values are converted, and other text becomes a string."""
    if _is_json(written):
        return written.strip()
    if written.lstrip()[:1] in ("{", "[", "(") or written.strip() in _WORDS:
        writer = JsonWriter()
        places = [writer.advance(character) for character in written.strip() + " "]
        turned = writer.take()
        if JsonPlace.BEYOND not in places and _is_json(turned):
            return turned
    return json.dumps(written, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return False
    return True


def _refused(constant: str) -> None:
    """Reject NaN and Infinity, which JSON does not allow."""
    raise ValueError(constant)
