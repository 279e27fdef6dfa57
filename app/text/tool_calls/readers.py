"""One call, read character by character: as a JSON object, or as a plain name with JSON behind it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Protocol

from app.text.tool_calls.json_end import JsonEnd, Place

BLANKS = " \t\r\n"  # the white space of JSON
_ARGUMENT_KEYS = ("arguments", "parameters")


class Reading(Enum):
    """What a character meant."""

    MORE = auto()  # it belongs to the call, which goes on
    DONE = auto()  # it ends the call
    BEYOND = auto()  # it does not belong to the call, which is over
    NO_CALL = auto()  # it shows that what was read is no call


class Reader(Protocol):
    """Reads one call. What it has made sure of stands in `name`, and the arguments are taken piece by piece."""

    name: str | None  # None until it is certain that this is a call

    def advance(self, character: str) -> Reading:
        """Take the next character. Not to be asked any more once the answer is not MORE."""

    def take_arguments(self) -> str:
        """The arguments that are new since the last time."""


class ObjectReader:
    """`{"name": "f", "arguments": {…}}`; `parameters` is another word for arguments, other members are passed over.

    Arguments that are an object stream as they come, once the name is known. Those written as a string are what the
    string says. What is broken behind the name and the beginning of the arguments does not undo the call: its
    arguments are what there is.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        """`names`: where nothing but its looks tells a call from other JSON, a call has arguments and one of these."""
        self.name: str | None = None
        self._names = names
        self._written_name: str | None = None
        self._arguments: str | None = None  # read, not yet taken
        self._advance: Callable[[str], Reading] = self._open
        self._key = self._value = ""
        self._end = JsonEnd()
        self._streams = False  # the value that is being read goes to the arguments as it comes

    def advance(self, character: str) -> Reading:
        return self._advance(character)

    def take_arguments(self) -> str:
        arguments, self._arguments = self._arguments or "", "" if self._arguments is not None else None
        return arguments

    def _open(self, character: str) -> Reading:
        assert character == "{", "a reader is made where one stands"
        self._advance = self._before_key
        return Reading.MORE

    def _before_key(self, character: str) -> Reading:
        if character.isspace():
            return Reading.MORE
        if character == "}":
            return self._close()
        if character != '"':
            return self._broken()
        self._begin_value(self._in_key, character)
        return Reading.MORE

    def _in_key(self, character: str) -> Reading:
        self._value += character
        if self._end.advance(character) is Place.LAST:
            self._key = _string(self._value) or ""
            self._advance = self._before_colon
        return Reading.MORE

    def _before_colon(self, character: str) -> Reading:
        if character == ":":
            self._advance = self._before_value
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
            self._arguments = ""
            self.name = self._written_name
        self._begin_value(self._in_value, character)
        return Reading.MORE

    def _begin_value(self, state: Callable[[str], Reading], character: str) -> None:
        self._advance, self._value, self._end = state, "", JsonEnd()
        state(character)

    def _in_value(self, character: str) -> Reading:
        place = self._end.advance(character)
        if place is not Place.BEYOND:
            self._keep(character)
        if place is Place.INSIDE:
            return Reading.MORE
        if not self._finish_value():
            return Reading.NO_CALL
        self._advance = self._after_value
        return Reading.MORE if place is Place.LAST else self._after_value(character)

    def _keep(self, character: str) -> None:
        if self._streams:
            self._arguments = (self._arguments or "") + character
        else:
            self._value += character

    def _finish_value(self) -> bool:
        """Book the value that has ended; false when that makes the whole no call."""
        if self._streams:
            self._streams = False
        elif self._key == "name" and self._written_name is None:
            self._written_name = _string(self._value)
            return self._is_offered()
        elif self._key in _ARGUMENT_KEYS and self._arguments is None:
            self._arguments = _as_arguments(self._value)
        return True

    def _after_value(self, character: str) -> Reading:
        if character.isspace():
            return Reading.MORE
        if character == ",":
            self._advance = self._before_key
            return Reading.MORE
        return self._close() if character == "}" else self._broken()

    def _close(self) -> Reading:
        if not self._is_offered() or (self._names is not None and self._arguments is None):
            return Reading.NO_CALL
        if self.name is None:
            self._arguments = self._arguments or "{}"
            self.name = self._written_name
        return Reading.DONE

    def _broken(self) -> Reading:
        """It goes on as no JSON does. With a name and arguments it is a call all the same, which ended before this."""
        is_call = self._arguments is not None and self._close() is Reading.DONE
        return Reading.BEYOND if is_call else Reading.NO_CALL

    def _is_offered(self) -> bool:
        return bool(self._written_name) and (self._names is None or self._written_name in self._names)


class NameFirstReader(ObjectReader):
    """An object that begins with `{"name": "f"`, spelled so, whatever blanks are in between; nothing else is a call."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._spelled = {f'{{"name":"{name}"': 0 for name in names}  # how much of each was read
        self._is_spelled = False

    def advance(self, character: str) -> Reading:
        if not self._is_spelled:
            reached = {text: _one_further(text, at, character) for text, at in self._spelled.items()}
            self._spelled = {text: at for text, at in reached.items() if at is not None}
            if not self._spelled:
                return Reading.NO_CALL
            self._is_spelled = any(at == len(text) for text, at in self._spelled.items())
        return super().advance(character)


def _one_further(text: str, at: int, character: str) -> int | None:
    """How much of a text was read behind a character; there may be blanks where it is not in quotes."""
    if character == text[at]:
        return at + 1
    return at if character in BLANKS and text.count('"', 0, at) % 2 == 0 else None


class PlainReader:
    """`f{…}` or `f[ARGS]{…}`, with `[CALL_ID]…` in between: how newer Mistral models write it."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._written_name = ""
        self._tag: str | None = None  # what was read of `[ARGS]` or `[CALL_ID]…`
        self._arguments = ""
        self._end = JsonEnd()

    @staticmethod
    def begins_with(character: str) -> bool:
        """Whether a name may begin so."""
        return character.isascii() and (character.isalnum() or character in "_.-")

    def advance(self, character: str) -> Reading:
        if self.name is not None:
            return self._in_arguments(character)
        if character == "{":
            return self._begin_arguments(character)
        if self._tag is not None:
            return self._in_tag(character)
        if character == "[":
            self._tag = character
        elif self.begins_with(character):
            self._written_name += character
        else:
            return Reading.NO_CALL
        return Reading.MORE

    def take_arguments(self) -> str:
        arguments, self._arguments = self._arguments, ""
        return arguments

    def _in_tag(self, character: str) -> Reading:
        self._tag = (self._tag or "") + character
        is_known = any(tag.startswith(self._tag) or self._tag.startswith(tag) for tag in ("[ARGS]", "[CALL_ID]"))
        return Reading.MORE if is_known else Reading.NO_CALL

    def _begin_arguments(self, character: str) -> Reading:
        if self._tag is not None and not self._tag.rstrip().endswith("[ARGS]"):
            return Reading.NO_CALL
        self.name = self._written_name
        return self._in_arguments(character)

    def _in_arguments(self, character: str) -> Reading:
        place = self._end.advance(character)
        if place is Place.BEYOND:
            return Reading.BEYOND
        self._arguments += character
        return Reading.DONE if place is Place.LAST else Reading.MORE


def _string(written: str) -> str | None:
    """What a JSON string says; None for anything else."""
    try:
        value = json.loads(written, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _as_arguments(written: str) -> str:
    """Arguments that are no object: what a string says, nothing for null, all else as it stands."""
    said = _string(written)
    return "{}" if written == "null" or not (written if said is None else said).strip() else said or written
