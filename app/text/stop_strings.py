"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from app.text.begun import partial_match_length


class StopStrings:
    """Passes text through until a stop string is complete, then drops the stop string and all later text.

    The stop string that is completed first wins, or the longer one if two end at the same character. The result
    therefore does not depend on how the text is divided into pieces. Text that may become a stop string is held back.
    """

    def __init__(self, stop: Sequence[str], *, is_shown: bool = False) -> None:
        """With `is_shown`, the stop string itself is also passed through."""
        self._stop = tuple(stop)
        self._firsts = frozenset(text[0] for text in stop)
        self._is_shown = is_shown
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Add a piece. Returns the new text that cannot be part of a stop string."""
        if self.found is not None:
            return ""
        text, self._held = self._held + piece, ""
        if self._firsts.isdisjoint(text):  # the usual case, whose cost does not depend on the number of stop strings
            return text
        complete = [(at + len(stop), -len(stop), stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if complete:
            end, _, self.found = min(complete)
            return text[:end] if self._is_shown else text[: end - len(self.found)]
        num_held = max((partial_match_length(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Return the text that is still held back. Call this after the last piece."""
        held, self._held = self._held, ""
        return held
