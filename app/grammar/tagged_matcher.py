"""One request's place in a text that is free but for marked pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from app.grammar.free_text import FreePlace, FreeText
from app.grammar.grammar_matcher import GrammarMatcher
from app.grammar.lazy_matcher import LazyMatcher


@dataclass(frozen=True, slots=True)
class Piece:
    """What follows a trigger."""

    begin: Callable[[], GrammarMatcher]
    is_last: bool


class TaggedMatcher(LazyMatcher):
    """Everything may be drawn until a trigger is complete; then what its piece allows, to its end.

    Where a piece may end and may go on as well, free text may follow: what cannot belong to the piece is text.
    """

    def __init__(self, text: FreeText, pieces: Iterable[Piece]) -> None:
        """A piece for each trigger of the text."""
        super().__init__()
        self._text = text
        self._pieces = tuple(pieces)
        self._place: FreePlace = text.beginning
        self._inside: GrammarMatcher | None = None
        self._is_last = False

    @property
    def failure(self) -> str | None:
        return None if self._inside is None else self._inside.failure

    def _compute_allowed(self) -> bytes:
        if self._inside is None:
            return self._text.allowed(self._place)
        allowed = self._inside.allowed()
        return _either(allowed, self._text.allowed(self._text.middle)) if self._may_leave() else allowed

    def _consume(self, token_id: int) -> None:
        if self._inside is not None and self._may_leave() and not self._inside.accepts(token_id):
            self._leave()
        if self._inside is not None:
            self._inside.advance(token_id)
        else:
            self._advance_in_text(token_id)
        if self._inside is not None and not self._is_last and self._inside.is_complete:
            self._leave()

    def _advance_in_text(self, token_id: int) -> None:
        reached = self._text.after(self._place, token_id)
        if isinstance(reached, FreePlace):
            self._place = reached
        else:
            piece = self._pieces[reached]
            self._inside, self._is_last = piece.begin(), piece.is_last

    def _may_leave(self) -> bool:
        return self._inside is not None and not self._is_last and self._inside.may_end

    def _leave(self) -> None:
        self._inside, self._place = None, self._text.middle


def _either(one: bytes, other: bytes) -> bytes:
    return (int.from_bytes(one) | int.from_bytes(other)).to_bytes(len(one))
