"""One call, read character by character: as a JSON object, or as a plain name with JSON behind it.

The ways in which single families write calls are in `own_readers.py`.

A JSON parser is no help here: a client gets the arguments as the model wrote them, while they come, and models write
what a parser refuses (line breaks in strings, lone surrogates). So a value is only delimited; only names and arguments
that are written as strings are decoded. Each character costs the same, however long the call is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Protocol

BLANKS = " \t\r\n"  # the white space of JSON
_ARGUMENT_KEYS = ("arguments", "parameters")


class Reading(Enum):
    """What a character meant."""

    MORE = auto()  # it belongs to the call, which goes on
    DONE = auto()  # it ends the call
    BEYOND = auto()  # it does not belong to the call, which is over
    NO_CALL = auto()  # it shows that what was read is no call


class CallReader(Protocol):
    """Reads one call. `name` is set once it is certain; the arguments are taken piece by piece."""

    name: str | None  # None until it is certain that this is a call
    unread: str  # characters before the last one that do not belong to the call either; only after BEYOND

    def advance(self, character: str) -> Reading:
        """Take the next character. Not to be called again after an answer other than MORE."""

    def take_arguments(self) -> str:
        """The arguments that are new since the last time."""


class ObjectReader:
    """`{"name": "f", "arguments": {…}}`; `parameters` is another word for arguments, other members are passed over.

    Arguments that are an object stream as they come, once the name is known. Arguments that are written as a string are
    decoded. What is broken behind the name and the beginning of the arguments does not undo the call: the arguments
    are then what was read of them.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        """`names`: where only its form tells a call from other JSON, a call has arguments and one of these names."""
        self.name: str | None = None
        self.unread = ""
        self._names = names
        self._written_name: str | None = None
        self._arguments: list[str] | None = None  # read, not yet taken
        # A function of the class: a bound method would be a reference cycle.
        self._advance: Callable[[ObjectReader, str], Reading] = ObjectReader._open
        self._key = ""
        self._value: list[str] = []
        self._end = JsonEnd()
        self._streams = False  # the value that is being read goes to the arguments as it comes

    def advance(self, character: str) -> Reading:
        return self._advance(self, character)

    def take_arguments(self) -> str:
        if not self._arguments:
            return ""
        arguments, self._arguments = "".join(self._arguments), []
        return arguments

    def _open(self, character: str) -> Reading:
        assert character == "{", "a reader is made where one stands"
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
        """Book the value that has ended; false when that makes the whole no call."""
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
        """It goes on as no JSON does. With a name and arguments it is still a call, which ended before this."""
        is_call = self._arguments is not None and self._close() is Reading.DONE
        return Reading.BEYOND if is_call else Reading.NO_CALL

    def _is_offered(self) -> bool:
        return bool(self._written_name) and (self._names is None or self._written_name in self._names)


class NameFirstReader(ObjectReader):
    """An object that begins with `{"name": "f"`, spelled so, whatever blanks are in between; nothing else is a call."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._beginnings = [f'{{"name":"{name}"' for name in names]
        self._written = ""  # without the blanks outside quotes
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
    """Where a character stands, seen from a JSON value."""

    INSIDE = auto()
    LAST = auto()  # it is the value's last
    BEYOND = auto()  # the value has ended before it


class JsonEnd:
    """Finds the end of one value by its brackets and quotes; it does not check that what is between them is JSON.

    Outside strings a `<` is no JSON: it begins the marker that ends a call with open brackets.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._has_begun = False
        self._is_in_string = False
        self._is_escaped = False

    def advance(self, character: str) -> JsonPlace:
        """Take the next character of the value; the first is its first."""
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
    """What a JSON string says; None for anything else.

    `\\ud800` alone is no character: it becomes U+FFFD here, because text with it could not be encoded for any client.
    """
    if not written.startswith('"'):
        return None
    try:
        value: str = json.loads(written, strict=False)
    except ValueError:
        return None
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _as_arguments(written: str) -> str:
    """Arguments that are no object: what a string says, nothing for null, all else as it stands."""
    said = decoded_string(written)
    return "{}" if written == "null" or not (written if said is None else said).strip() else said or written
