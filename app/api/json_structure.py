"""How large JSON is: a text before it is parsed, and a value before it is checked.

Python's parsers make all values of a text in one piece, in which no other thread runs: millions would take a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from app.errors import InvalidRequest

# Each of these takes some 20 ms of a Zen 3 with nothing else on it; beside other work, twice that.
MAX_STRUCTURE = 60_000  # lists, objects and the fields of objects: 5,000 conversations of three messages
MAX_STRINGS = 125_000  # names of fields too; the parser takes three times as long for a string as for a number
MAX_VALUES = 1_050_000  # as many token ids as /detokenize takes
_PIECE_BYTES = 262_144  # so much is looked at in a few milliseconds
_NO_BACKSLASH = re.compile(rb"[^\\]")


def check_structure(
    texts: Iterable[bytes | bytearray], name: str, *, param: str | None = None, max_values: int = MAX_VALUES
) -> None:
    """Raise InvalidRequest when these JSON texts, which `name` names, have more values together than are parsed."""
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
                f"{name}: there are {num:,} {what}; at most {most:,} are accepted: send less in one request",
                param=param,
                code="too_many_values",
            )


def _counted(text: bytes | bytearray) -> tuple[int, int, int]:
    """The lists, objects and fields of a JSON text, its commas, its strings. What is in strings does not count."""
    num_structure = num_values = num_quotes = start = 0
    is_in_string = False
    while start < len(text):
        end = start + _PIECE_BYTES
        if text[end - 1 : end] == b"\\":  # a piece never ends within an escape
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


CONTAINER_SIZE = 16  # what a list or an object counts for: to check one takes as long as to encode so many characters
_NUMBERS = frozenset((int, float))


def size_of(value: Any, limit: int, *, container_size: int = CONTAINER_SIZE) -> int:
    """The characters and values in a JSON value, counted until there are more than `limit`."""
    size, found = 0, [value]
    while found and size <= limit:
        one = found.pop()
        kind = type(one)  # a parser makes no subclasses
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
    """Whether a JSON value has more characters than this without its signs, so that its text has more in any case."""
    return size_of(value, max_characters, container_size=0) > max_characters
