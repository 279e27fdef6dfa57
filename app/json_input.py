"""Parses all JSON that clients send: bodies, lines of files, schemas in strings."""

from __future__ import annotations

import math
from typing import Any

from pydantic_core import from_json

_DIGITS = bytes(ord("0") if chr(byte).isdecimal() else byte for byte in range(128)) + bytes(range(128, 256))
# Signs of a large number, after all digits were replaced by 0: exponents, and as many digits as the largest float has.
_MARKS_OF_LARGE = (b"0e0", b"0E0", b"0e+0", b"0E+0", b"0" * 309)
_MAX_INTEGER = 2**1024  # integers must be below this value to be within the range of floats


def read_json(text: bytes | bytearray) -> Any:
    """Return the value of a JSON text.

    Raises ValueError, which names the location, if the text is not JSON, is nested too deeply, or contains NaN,
    Infinity, or half of a surrogate pair. A number beyond the largest float is also an error, because it would become
    infinite, which JSON cannot express.
    """
    value, digits = from_json(text, allow_inf_nan=False), text.translate(_DIGITS)
    # Checking every value takes several times as long as parsing. Few texts need the check: those with an exponent or
    # many consecutive digits, in a number or a string.
    if any(mark in digits for mark in _MARKS_OF_LARGE) and (place := _place_beyond_float(value)) is not None:
        raise ValueError(f"the number at {place or 'the top level'} is beyond the largest float, about 1.8e308")
    return value


def _place_beyond_float(value: Any) -> str | None:
    """Return the location of the first number beyond the largest float, such as `metadata.a[0]`, or None."""
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
