"""Where a JSON value ends in text that comes character by character."""

from __future__ import annotations

from enum import Enum, auto


class Place(Enum):
    """Where a character stands."""

    INSIDE = auto()
    LAST = auto()  # it is the value's last
    BEYOND = auto()  # the value has ended before it


class JsonEnd:
    """Finds the end of one value by its brackets and quotes; whether what is between them is JSON, it does not look.

    Outside strings a `<` is no JSON: it begins the marker that ends a call whose brackets were not closed.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._has_begun = False
        self._is_in_string = False
        self._is_escaped = False

    def advance(self, character: str) -> Place:
        """Take the next character of the value; the first is its first."""
        if self._is_in_string:
            return self._in_string(character)
        if character == "<" or (self._depth == 0 and (character in ",]}" or (self._has_begun and character.isspace()))):
            return Place.BEYOND
        self._has_begun = True
        if character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return Place.INSIDE if self._depth else Place.LAST
        return Place.INSIDE

    def _in_string(self, character: str) -> Place:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_in_string = False
            return Place.INSIDE if self._depth else Place.LAST
        return Place.INSIDE
