"""Measures JSON texts before they are parsed, and JSON values before they are validated.

Python's JSON parsers hold the interpreter lock while they create values, and millions of values take a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from app.errors import InvalidRequest

# Parsing a text at one of these limits takes about 20 ms on an idle Zen 3, and twice as long on a busy one.
MAX_STRUCTURE = 60_000  # lists, objects and the fields of objects: enough for 5,000 conversations of three messages
MAX_STRINGS = 125_000  # strings and field names; parsing a string takes three times as long as parsing a number
MAX_VALUES = 1_050_000  # enough for the token ids that /detokenize accepts
_PIECE_BYTES = 262_144  # scanned in a few milliseconds
_NO_BACKSLASH = re.compile(rb"[^\\]")


def check_structure(
    texts: Iterable[bytes | bytearray], name: str, *, param: str | None = None, max_values: int = MAX_VALUES
) -> None:
    """Raise InvalidRequest if the JSON texts together exceed a limit. `name` names the texts in the message."""
    num_structure = num_values = num_strings = 0
    for text in texts:
        structure, values, strings = _counted(text)
        num_structure, num_values = num_structure + structure, num_values + values
        num_strings += strings
    for num, most, what in (
        (num_structure, MAX_STRUCTURE, "lists, objects and fields"),
        (num_values, max_values, "values"),
        (num_strings, MAX_STRINGS, "strings"),
    ):
        if num > most:
            raise InvalidRequest(
                f"{name} contains {num:,} {what}; at most {most:,} are accepted in one request; send fewer",
                param=param,
                code="too_many_values",
            )


def _counted(text: bytes | bytearray) -> tuple[int, int, int]:
    """Return the number of lists, objects and fields in a JSON text, of commas outside strings, and of strings."""
    num_structure = num_values = num_quotes = start = 0
    is_in_string = False
    while start < len(text):
        end = start + _PIECE_BYTES
        if text[end - 1 : end] == b"\\":  # a piece must not end inside an escape
            following = _NO_BACKSLASH.search(text, end)
            end = following.end() if following else len(text)
        parts = text[start:end].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[is_in_string::2])
        num_structure += outside.count(b"[") + outside.count(b"{") + outside.count(b":")
        num_values += outside.count(b",")
        num_quotes += len(parts) - 1
        is_in_string ^= len(parts) % 2 == 0
        start = end
    return num_structure, num_values, num_quotes // 2


CONTAINER_SIZE = 16  # the size of a list or an object, because checking it takes as long as encoding 16 characters
_NUMBERS = frozenset((int, float))


def size_of(value: Any, limit: int, *, container_size: int = CONTAINER_SIZE) -> int:
    """Return the number of characters and values in a JSON value. Stops counting once the number exceeds `limit`."""
    size, found = 0, [value]
    while found and size <= limit:
        one = found.pop()
        kind = type(one)  # a parser creates no subclasses, so `isinstance` is not needed
        size += 1
        if kind is str:
            size += len(one)
        elif kind is dict:
            size += container_size + sum(map(len, one))
            found.extend(one.values())
        elif kind is list:
            size += container_size
            if size + len(one) > limit or _NUMBERS.issuperset(map(type, one)):
                size += len(one)
            else:
                found.extend(one)
    return size


def is_longer(value: Any, max_characters: int) -> bool:
    """Return whether a value has more than `max_characters` as JSON, even without its punctuation."""
    return size_of(value, max_characters, container_size=0) > max_characters
