"""Searches for a string in text that arrives in pieces."""

from __future__ import annotations


def partial_match_length(text: str, wanted: str) -> int:
    """Return the length of the longest suffix of `text` that is an incomplete prefix of `wanted`."""
    at = text.find(wanted[:1], max(0, len(text) - len(wanted) + 1))
    while at >= 0:
        if wanted.startswith(text[at:]):
            return len(text) - at
        at = text.find(wanted[:1], at + 1)
    return 0
