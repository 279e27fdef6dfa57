"""What all matchers of requests do: drawn tokens are noted, and gone through when it is asked what follows."""

from __future__ import annotations

from abc import ABC, abstractmethod


class LazyMatcher(ABC):
    """A `Matcher` whose work can be done beside the model's: `advance` takes no time, `prepare` does all there is."""

    def __init__(self) -> None:
        self._drawn: list[int] = []  # what has not been gone through yet
        self._allowed: bytes | None = None  # behind all of those, once it is known

    def allowed(self) -> bytes:
        """See `Matcher`."""
        allowed = self._allowed
        return self._find_allowed() if allowed is None else allowed

    def prepare(self) -> None:
        """See `Matcher`."""
        if self._allowed is None:
            self._find_allowed()

    def advance(self, token_id: int) -> None:
        """Go on behind a drawn token."""
        self._drawn.append(token_id)
        self._allowed = None

    def catch_up(self) -> None:
        """Go through the drawn tokens now, and not in a step."""
        drawn, self._drawn = self._drawn, []
        for token_id in drawn:
            self._consume(token_id)

    def _find_allowed(self) -> bytes:
        self.catch_up()
        self._allowed = allowed = self._compute_allowed()
        return allowed

    @abstractmethod
    def _consume(self, token_id: int) -> None:
        """Go through the next token."""

    @abstractmethod
    def _compute_allowed(self) -> bytes:
        """What may follow all that was gone through."""
