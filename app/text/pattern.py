"""A string looked for in text that comes in pieces."""

from __future__ import annotations


class Pattern:
    """One string and how much of it the text so far ends with (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._fallback = _fallbacks(text)

    def advance(self, character: str) -> bool:
        """Take one more character; true when it completes the string."""
        num_matched = self.num_matched
        while num_matched and self.text[num_matched] != character:
            num_matched = self._fallback[num_matched - 1]
        self.num_matched = num_matched + (self.text[num_matched] == character)
        return self.num_matched == len(self.text)


def _fallbacks(text: str) -> list[int]:
    """For each prefix of `text`: the length of its longest proper suffix that is a prefix too."""
    fallbacks = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = fallbacks[length - 1]
        length += text[index] == text[length]
        fallbacks[index] = length
    return fallbacks
