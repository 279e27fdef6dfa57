"""Search for a string in text that arrives in pieces."""

from __future__ import annotations


def num_begun(text: str, wanted: str) -> int:
    """Return the number of characters at the end of `text` that are an incomplete start of `wanted`."""
    at = text.find(wanted[:1], max(0, len(text) - len(wanted) + 1))
    while at >= 0:
        if wanted.startswith(text[at:]):
            return len(text) - at
        at = text.find(wanted[:1], at + 1)
    return 0
