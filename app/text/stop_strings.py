"""Finding stop strings in text that comes in pieces. Knows nothing of tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Hands text through until one of the stop strings is complete; what follows never comes out, nor does that string.

    The stop string that is complete first wins; of two that end at the same character, the longer. So the result does
    not depend on how the text was cut into pieces. Text that may yet become a stop string is held back.
    """

    def __init__(self, stop: Sequence[str], *, is_shown: bool = False) -> None:
        """`is_shown`: the stop string itself comes out, what follows does not."""
        self._patterns = [_Pattern(text) for text in stop]
        self._is_shown = is_shown
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Take the next text and return what is certainly before any stop string."""
        if self.found is not None:
            return ""
        text = self._held + piece
        for end, character in enumerate(piece, start=len(self._held) + 1):
            complete = [pattern.text for pattern in self._patterns if pattern.advance(character)]
            if complete:
                self.found = max(complete, key=len)
                self._held = ""
                return text[:end] if self._is_shown else text[: end - len(self.found)]
        num_held = max((pattern.num_matched for pattern in self._patterns), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Return what was held back: nothing more will come."""
        held, self._held = self._held, ""
        return held


class _Pattern:
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
