"""Finding stop strings in text that comes in pieces. Knows nothing of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from app.text.begun import num_begun


class StopStrings:
    """Hands text through until one of the stop strings is complete; what follows never comes out, nor does that string.

    The stop string that is complete first wins; of two that end at the same character, the longer. So the result does
    not depend on how the text was cut into pieces. Text that may yet become a stop string is held back.
    """

    def __init__(self, stop: Sequence[str], *, is_shown: bool = False) -> None:
        """`is_shown`: the stop string itself comes out, what follows does not."""
        self._stop = tuple(stop)
        self._firsts = frozenset(text[0] for text in stop)
        self._is_shown = is_shown
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Take the next text and return what is certainly before any stop string."""
        if self.found is not None:
            return ""
        text, self._held = self._held + piece, ""
        if self._firsts.isdisjoint(text):  # nearly always, and no time goes by for each of many stop strings
            return text
        complete = [(at + len(stop), -len(stop), stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if complete:
            end, _, self.found = min(complete)
            return text[:end] if self._is_shown else text[: end - len(self.found)]
        num_held = max((num_begun(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Return what was held back: nothing more will come."""
        held, self._held = self._held, ""
        return held
