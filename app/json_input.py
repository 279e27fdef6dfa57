"""Reads all JSON that clients send: bodies, lines of files, schemas in strings."""

from __future__ import annotations

import math
from typing import Any

from pydantic_core import from_json

_DIGITS = bytes(ord("0") if chr(byte).isdecimal() else byte for byte in range(128)) + bytes(range(128, 256))
# Exponents, and 309 digits in a row, which is the length of the largest float.
_MARKS_OF_LARGE = (b"0e0", b"0E0", b"0e+0", b"0E+0", b"0" * 309)
_MAX_INTEGER = 2**1024  # integers of at least this size are beyond the largest float


def read_json(text: bytes | bytearray) -> Any:
    """Return the value of a JSON text.

    Raises ValueError if the text is not JSON, nests too deeply, or contains NaN, Infinity, half of a surrogate pair, or
    a number beyond the largest float, which would become infinite. JSON cannot express that. The error names the place.
    """
    value, digits = from_json(text, allow_inf_nan=False), text.translate(_DIGITS)
    # Checking every value takes several times as long as parsing. Only texts with an exponent or many digits in a row,
    # in a number or a string, may contain a number beyond the largest float, and few texts do.
    if any(mark in digits for mark in _MARKS_OF_LARGE) and (place := _place_beyond_float(value)) is not None:
        raise ValueError(f"the number at {place or 'the top'} is beyond the largest float, about 1.8e308")
    return value


def _place_beyond_float(value: Any) -> str | None:
    """Return the place of the first number beyond the largest float, such as `metadata.a[0]`, or None."""
    found: list[tuple[str, Any]] = [("", value)]
    while found:
        place, one = found.pop()
        if isinstance(one, dict):
            found += [(f"{place}.{name}" if place else name, inner) for name, inner in reversed(one.items())]
        elif isinstance(one, list):
            found += [(f"{place}[{index}]", inner) for index, inner in reversed([*enumerate(one)])]
        elif (isinstance(one, float) and math.isinf(one)) or (isinstance(one, int) and abs(one) >= _MAX_INTEGER):
            return place[:100]
    return None
