"""Matchers. A matcher tracks one request's position in its grammar, or in free text with triggers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

from llguidance import LLMatcher

from app.engine.matcher import any_token, has_token, tokens_of, with_tokens, without_tokens
from app.grammar.compiling import reason_of
from app.grammar.free_text import FreeText, FreeTextState


class LazyMatcher(ABC):
    """A `Matcher` that works while the model is computing: `advance` queues a token, and `prepare` consumes it."""

    def __init__(self) -> None:
        self._drawn: list[int] = []  # queued tokens that have not been consumed yet
        self._allowed: bytes | None = None  # allowed tokens after all queued tokens; None if not computed yet
        self.ignored_keywords: Sequence[str] = ()  # see `Matcher`

    def allowed(self) -> bytes:
        """See `Matcher`."""
        allowed = self._allowed
        return self._find_allowed() if allowed is None else allowed

    def prepare(self) -> None:
        """See `Matcher`."""
        if self._allowed is None:
            self._find_allowed()

    def advance(self, token_id: int) -> None:
        """Queue a sampled token, which is consumed later."""
        self._drawn.append(token_id)
        self._allowed = None

    def after(self, token_id: int) -> Self:
        """See `Matcher`."""
        other = self.copied()
        other.advance(token_id)
        return other

    def copied(self) -> Self:
        """Return an independent matcher at the same position."""
        self.catch_up()
        other = copy(self)
        other._drawn = []
        other._separate()
        return other

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """See `Matcher`."""
        ahead = self
        for number, token_id in enumerate(token_ids):
            if not has_token(ahead.allowed(), token_id):
                return number
            ahead = ahead.after(token_id)
        return len(token_ids)

    @abstractmethod
    def forced(self, at_most: int) -> list[int]:
        """See `Matcher`."""

    @abstractmethod
    def _separate(self) -> None:
        """Replace all mutable state that this copy still shares with the original."""

    def catch_up(self) -> None:
        """Consume the queued tokens now, so that no step has to wait for this."""
        drawn, self._drawn = self._drawn, []
        for token_id in drawn:
            self._consume(token_id)

    def _find_allowed(self) -> bytes:
        self.catch_up()
        self._allowed = allowed = self._compute_allowed()
        return allowed

    @abstractmethod
    def _consume(self, token_id: int) -> None:
        """Advance the grammar by one token."""

    @abstractmethod
    def _compute_allowed(self) -> bytes:
        """Return a bit mask of the tokens that may follow the consumed tokens."""


@dataclass(slots=True)
class MatchingTime:
    """CPU time of all matchers for one grammar. The matchers share a cache that grows with this time."""

    seconds: float = 0.0


class GrammarMatcher(LazyMatcher):
    """Computes the tokens that a grammar allows next. End tokens are only allowed where the grammar may end."""

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        stop_token_ids: Iterable[int],
        texts: Sequence[bytes],
        spent: MatchingTime,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """`stop_token_ids` are the request's stop tokens. `matcher` already includes the model's end tokens.

        `texts` are the texts of the model's tokens. The matcher adds its CPU time to `spent`. `on_failure` is called if
        the output can no longer match.
        """
        super().__init__()
        self._matcher = matcher
        self._stop_token_ids = frozenset(stop_token_ids)
        self._texts = texts
        self._num_bytes = -(-len(texts) // 8)
        self._spent = spent
        self._on_failure = on_failure
        self.failure: str | None = None

    @property
    def may_end(self) -> bool:
        """Whether the output so far is complete."""
        self.catch_up()
        return self.failure is None and self._matcher.is_accepting()

    @property
    def is_complete(self) -> bool:
        """Whether the output is complete and no token may follow."""
        return self.may_end and self._matcher.is_stopped()

    def accepts(self, token_id: int) -> bool:
        """Return whether this token may follow."""
        return self.num_allowed([token_id]) == 1

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """See `Matcher`."""
        self.catch_up()
        return self._matcher.validate_tokens(list(token_ids))

    def forced(self, at_most: int) -> list[int]:
        """See `Matcher`."""
        found: list[int] = []
        ahead = self
        while len(found) < at_most and (token_id := ahead._forced_token()) is not None:
            found.append(token_id)
            ahead = ahead.after(token_id)
        return found

    def _forced_token(self) -> int | None:
        """Return the longest allowed token if all other allowed tokens are its prefixes, and otherwise None."""
        self.catch_up()
        if self.failure is not None or not self._matcher.deep_copy().compute_ff_bytes():
            return None  # no bytes are forced, so the next token is a choice
        max_ways = 32  # the maximum number of allowed tokens to compare
        allowed = tokens_of(self.allowed(), at_most=max_ways)
        longest = max(allowed, key=lambda token_id: len(self._texts[token_id]), default=None)
        if longest is None or not all(self._texts[longest].startswith(self._texts[each]) for each in allowed):
            return None
        return longest

    def _separate(self) -> None:
        """See `LazyMatcher`. Copies are used for drafts, and a failed draft must not cause a recompilation."""
        self._matcher = self._matcher.deep_copy()
        self._on_failure = lambda: None

    def _consume(self, token_id: int) -> None:
        """See `LazyMatcher`. Ignores stop tokens, because no tokens follow them."""
        if self.failure is None and token_id not in self._stop_token_ids and not self._matcher.consume_token(token_id):
            self._fail(reason_of(self._matcher.get_error()))

    def _compute_allowed(self) -> bytes:
        """See `LazyMatcher`. Allows every token after a failure, because the request fails in any case."""
        if self.failure is None:
            began_at = time.thread_time()
            allowed = self._matcher.compute_bitmask()[: self._num_bytes]
            self._spent.seconds += time.thread_time() - began_at
            if not self._matcher.is_error():
                return self._with_stops(allowed) if self._stop_token_ids else allowed
            self._fail(reason_of(self._matcher.get_error()))
        return b"\xff" * self._num_bytes

    def _with_stops(self, allowed: bytes) -> bytes:
        if self._matcher.is_accepting():
            return with_tokens(allowed, self._stop_token_ids)
        left = without_tokens(allowed, self._stop_token_ids)
        return left if any_token(left) else allowed

    def _fail(self, reason: str) -> None:
        self.failure = f"the output can no longer match the requested format: {reason}"
        self._on_failure()


@dataclass(frozen=True, slots=True)
class TagContent:
    """The content after a trigger."""

    begin: Callable[[], GrammarMatcher]  # creates its matcher
    is_last: bool  # whether the output ends after it


class TaggedMatcher(LazyMatcher):
    """Allows free text until a trigger is complete, and then the content of the trigger's tag until the content ends.

    If the content may either end or continue, a token that cannot belong to the content ends it and is free text.
    """

    def __init__(self, text: FreeText, pieces: Iterable[TagContent]) -> None:
        """`pieces` contains one content for each trigger of `text`."""
        super().__init__()
        self._text = text
        self._pieces = tuple(pieces)
        self._place: FreeTextState = text.beginning
        self._inside: GrammarMatcher | None = None
        self._is_last = False

    @property
    def failure(self) -> str | None:
        return None if self._inside is None else self._inside.failure

    def forced(self, at_most: int) -> list[int]:
        """See `Matcher`. Free text is never forced."""
        self.catch_up()
        return [] if self._inside is None or self._may_leave() else self._inside.forced(at_most)

    def _separate(self) -> None:
        if self._inside is not None:
            self._inside = self._inside.copied()

    def _compute_allowed(self) -> bytes:
        if self._inside is None:
            return self._text.allowed(self._place)
        allowed = self._inside.allowed()
        return either(allowed, self._text.allowed(self._text.middle)) if self._may_leave() else allowed

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
        if isinstance(reached, FreeTextState):
            self._place = reached
        else:
            piece = self._pieces[reached]
            self._inside, self._is_last = piece.begin(), piece.is_last

    def _may_leave(self) -> bool:
        return self._inside is not None and not self._is_last and self._inside.may_end

    def _leave(self) -> None:
        self._inside, self._place = None, self._text.middle


def either(one: bytes, other: bytes) -> bytes:
    """Return the union of two bit masks with the same length."""
    return (int.from_bytes(one) | int.from_bytes(other)).to_bytes(len(one))
