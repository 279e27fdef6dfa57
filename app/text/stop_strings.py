"""Finds stop strings in text that arrives in pieces. No tokens here."""

from __future__ import annotations

from collections.abc import Sequence

from app.text.begun import num_begun


class StopStrings:
    """Passes text through until a stop string is complete. The stop string and the text after it are dropped.

    The stop string that is complete first wins; if two end at the same character, the longer one wins. So the result
    does not depend on how the text was cut into pieces. Text that may become a stop string is held back.
    """

    def __init__(self, stop: Sequence[str], *, is_shown: bool = False) -> None:
        """`is_shown`: pass the stop string through, and drop only the text after it."""
        self._stop = tuple(stop)
        self._firsts = frozenset(text[0] for text in stop)
        self._is_shown = is_shown
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Take the next text and return the text that is certainly before any stop string."""
        if self.found is not None:
            return ""
        text, self._held = self._held + piece, ""
        if self._firsts.isdisjoint(text):  # nearly always; costs no time per stop string
            return text
        complete = [(at + len(stop), -len(stop), stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if complete:
            end, _, self.found = min(complete)
            return text[:end] if self._is_shown else text[: end - len(self.found)]
        num_held = max((num_begun(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Return the text that was held back. Call this method after the last piece."""
        held, self._held = self._held, ""
        return held
