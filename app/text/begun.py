"""A string looked for in text that comes in pieces."""

from __future__ import annotations


def num_begun(text: str, wanted: str) -> int:
    """How many characters at the end of a text may begin a string that is not complete there."""
    at = text.find(wanted[:1], max(0, len(text) - len(wanted) + 1))
    while at >= 0:
        if wanted.startswith(text[at:]):
            return len(text) - at
        at = text.find(wanted[:1], at + 1)
    return 0
