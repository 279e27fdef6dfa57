"""Readers of a call that is a JSON object, character by character. `own_readers.py` contains readers for other formats.

A JSON parser is not suitable, because clients receive the arguments exactly as the model writes them and as they
arrive, and models write text that a parser rejects (newlines in strings, lone surrogates). A reader therefore only
finds the ends of values, and only decodes names and arguments that are written as strings. The time per character does
not depend on the length of the call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Protocol

BLANKS = " \t\r\n"  # the white space of JSON
_ARGUMENT_KEYS = ("arguments", "parameters")


class Reading(Enum):
    """The result of reading one character."""

    MORE = auto()  # the call continues after the character
    DONE = auto()  # the character ends the call
    BEYOND = auto()  # the call ended before this character
    NO_CALL = auto()  # the characters read so far are not a call


class CallReader(Protocol):
    """Reads one call. The caller takes the arguments piece by piece."""

    name: str | None  # None until the text is certainly a call
    unread: str  # earlier characters that do not belong to the call either; set only after BEYOND

    def advance(self, character: str) -> Reading:
        """Read the next character. Must not be called again after a result other than MORE."""

    def take_arguments(self) -> str:
        """Return the part of the arguments that was read since the last call."""


class ObjectReader:
    """Reads `{"name": "f", "arguments": {…}}`. The key may also be `parameters`; other members are skipped.

    If the name comes first, an object of arguments is streamed as it arrives. Arguments that are written as a string
    are decoded. If the JSON becomes invalid after the name and the beginning of the arguments, the call remains valid,
    and its arguments end before the invalid part.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        """`names` is required if no marker precedes the object. A call must then have one of them, and arguments."""
        self.name: str | None = None
        self.unread = ""
        self._names = names
        self._written_name: str | None = None
        self._arguments: list[str] | None = None  # arguments that `take_arguments` has not returned yet
        # A plain function, because a bound method would create a reference cycle.
        self._advance: Callable[[ObjectReader, str], Reading] = ObjectReader._open
        self._key = ""
        self._value: list[str] = []
        self._end = JsonEnd()
        self._streams = False  # whether the current value is added to the arguments as it is read

    def advance(self, character: str) -> Reading:
        return self._advance(self, character)

    def take_arguments(self) -> str:
        if not self._arguments:
            return ""
        arguments, self._arguments = "".join(self._arguments), []
        return arguments

    def _open(self, character: str) -> Reading:
        assert character == "{", "a reader is created at an opening brace"
        self._advance = ObjectReader._before_key
        return Reading.MORE

    def _before_key(self, character: str) -> Reading:
        if character.isspace():
            return Reading.MORE
        if character == "}":
            return self._close()
        if character != '"':
            return self._broken()
        self._begin_value(ObjectReader._in_key, character)
        return Reading.MORE

    def _in_key(self, character: str) -> Reading:
        self._value.append(character)
        if self._end.advance(character) is JsonPlace.LAST:
            self._key = decoded_string("".join(self._value)) or ""
            self._advance = ObjectReader._before_colon
        return Reading.MORE

    def _before_colon(self, character: str) -> Reading:
        if character == ":":
            self._advance = ObjectReader._before_value
        elif not character.isspace():
            return self._broken()
        return Reading.MORE

    def _before_value(self, character: str) -> Reading:
        if character.isspace():
            return Reading.MORE
        if character in ",]}<":
            return self._broken()
        is_first = self._key in _ARGUMENT_KEYS and self._arguments is None
        if is_first and character in "{[" and self._is_offered():
            self._streams = True
            self._arguments = []
            self.name = self._written_name
        self._begin_value(ObjectReader._in_value, character)
        return Reading.MORE

    def _begin_value(self, state: Callable[[ObjectReader, str], Reading], character: str) -> None:
        self._advance, self._value, self._end = state, [], JsonEnd()
        state(self, character)

    def _in_value(self, character: str) -> Reading:
        place = self._end.advance(character)
        if place is not JsonPlace.BEYOND:
            self._keep(character)
        if place is JsonPlace.INSIDE:
            return Reading.MORE
        if not self._finish_value():
            return Reading.NO_CALL
        self._advance = ObjectReader._after_value
        return Reading.MORE if place is JsonPlace.LAST else self._after_value(character)

    def _keep(self, character: str) -> None:
        if not self._streams:
            self._value.append(character)
        elif self._arguments is not None:
            self._arguments.append(character)

    def _finish_value(self) -> bool:
        """Store the completed value. Returns False if it shows that the object is not a call."""
        if self._streams:
            self._streams = False
        elif self._key == "name" and self._written_name is None:
            self._written_name = decoded_string("".join(self._value))
            return self._is_offered()
        elif self._key in _ARGUMENT_KEYS and self._arguments is None:
            self._arguments = [_as_arguments("".join(self._value))]
        return True

    def _after_value(self, character: str) -> Reading:
        if character.isspace():
            return Reading.MORE
        if character == ",":
            self._advance = ObjectReader._before_key
            return Reading.MORE
        return self._close() if character == "}" else self._broken()

    def _close(self) -> Reading:
        if not self._is_offered() or (self._names is not None and self._arguments is None):
            return Reading.NO_CALL
        if self.name is None:
            self._arguments = self._arguments or ["{}"]
            self.name = self._written_name
        return Reading.DONE

    def _broken(self) -> Reading:
        """Handle text that is not JSON. A call that already has a name and arguments ended before this text."""
        is_call = self._arguments is not None and self._close() is Reading.DONE
        return Reading.BEYOND if is_call else Reading.NO_CALL

    def _is_offered(self) -> bool:
        return bool(self._written_name) and (self._names is None or self._written_name in self._names)


class NameFirstReader(ObjectReader):
    """Accepts an object as a call only if it starts with exactly `{"name": "f"` (except for white space)."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._beginnings = [f'{{"name":"{name}"' for name in names]
        self._written = ""  # without white space outside quotes
        self._is_spelled = False

    def advance(self, character: str) -> Reading:
        is_quoted = self._written.count('"') % 2 == 1
        if not self._is_spelled and (is_quoted or character not in BLANKS):
            self._written += character
            self._beginnings = [each for each in self._beginnings if each.startswith(self._written)]
            if not self._beginnings:
                return Reading.NO_CALL
            self._is_spelled = self._written in self._beginnings
        return super().advance(character)


class JsonPlace(Enum):
    """The position of a character relative to a JSON value."""

    INSIDE = auto()
    LAST = auto()  # the last character of the value
    BEYOND = auto()  # the value ended before this character


class JsonEnd:
    """Finds the end of a value by its brackets and quotes. Does not check that the value is valid JSON.

    A `<` outside strings also ends the value, because it starts the marker after a call with unclosed brackets.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._has_begun = False
        self._is_in_string = False
        self._is_escaped = False

    def advance(self, character: str) -> JsonPlace:
        """Read the next character. The first call must pass the first character of the value."""
        if self._is_in_string:
            return self._in_string(character)
        if character == "<" or (self._depth == 0 and (character in ",]}" or (self._has_begun and character.isspace()))):
            return JsonPlace.BEYOND
        self._has_begun = True
        if character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return JsonPlace.INSIDE if self._depth else JsonPlace.LAST
        return JsonPlace.INSIDE

    def _in_string(self, character: str) -> JsonPlace:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_in_string = False
            return JsonPlace.INSIDE if self._depth else JsonPlace.LAST
        return JsonPlace.INSIDE


def decoded_string(written: str) -> str | None:
    """Return the value of a JSON string, or None for any other text.

    A lone surrogate such as `\\ud800` is replaced with U+FFFD, because UTF-8 cannot encode it.
    """
    if not written.startswith('"'):
        return None
    try:
        value: str = json.loads(written, strict=False)
    except ValueError:
        return None
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _as_arguments(written: str) -> str:
    """Convert arguments that are not streamed: a string is decoded, null and blanks become `{}`, other text is kept."""
    said = decoded_string(written)
    return "{}" if written == "null" or not (written if said is None else said).strip() else said or written
