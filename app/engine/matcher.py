"""The tokens that may be drawn next, as one bit for each token of the vocabulary. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from itertools import takewhile
from typing import Protocol

from app.engine.request import Request


class Matcher(Protocol):
    """The state of one request's grammar, which decides the tokens that may follow the generated ones."""

    @property
    def ignored_keywords(self) -> Sequence[str]:
        """The places of schema keywords that the matcher ignores, for the client."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the matcher can compute no more allowed tokens, for the client. The request ends. None: no failure."""
        ...

    def allowed(self) -> bytes:
        """Return the tokens that may be drawn, always at least one. Token t is bit t % 8 of byte t // 8.

        A second call returns the same bytes.
        """
        ...

    def prepare(self) -> None:
        """Compute the result of the next `allowed` in advance. Any thread may call, but only one at a time."""
        ...

    def advance(self, token_id: int) -> None:
        """Advance by a drawn token. Fast, because `prepare` or `allowed` computes the tokens that may follow."""
        ...

    def after(self, token_id: int) -> Matcher:
        """Return a copy that has advanced by one more token. The copy has failed if the token is not allowed."""
        ...

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, the grammar allows in a row."""
        ...

    def forced(self, at_most: int) -> list[int]:
        """Return the most probable next tokens, at most `at_most`, if the grammar allows only one text. Often empty."""
        ...


class Matchers(Protocol):
    """Creates the matchers of requests."""

    def matcher_of(self, request: Request) -> Future[Matcher | None]:
        """Return the matcher of a request's grammar, advanced past the generated tokens; None without a grammar.

        The future raises InvalidRequest if the grammar cannot be used, and Overloaded if too many other grammars wait.
        """
        ...

    def prepare(self) -> None:
        """Start the preparations that the first grammar would otherwise wait for, without blocking."""
        ...

    def close(self) -> None:
        """Stop. Do not use this object afterwards."""
        ...


class TokenSet:
    """A matcher that allows the same tokens at every step."""

    failure: str | None = None
    ignored_keywords: Sequence[str] = ()

    def __init__(self, token_ids: Iterable[int], *, vocab_size: int) -> None:
        self._allowed = _bits_of(tuple(token_ids), vocab_size)

    def allowed(self) -> bytes:
        return self._allowed

    def prepare(self) -> None:
        """Do nothing, because the set is already computed."""

    def advance(self, token_id: int) -> None:
        """Do nothing, because the set never changes."""

    def after(self, token_id: int) -> Matcher:
        return self

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return len(list(takewhile(partial(has_token, self._allowed), token_ids)))

    def forced(self, at_most: int) -> list[int]:
        return []


@lru_cache(maxsize=8)
def _bits_of(token_ids: tuple[int, ...], vocab_size: int) -> bytes:
    """Return the bits of a set of tokens. Cached: all prompts of a request share one set, and 16,384 bits take 1 ms."""
    return with_tokens(bytes(-(-vocab_size // 8)), token_ids)


def allowed_after_bans(matcher: Matcher, banned_token_ids: Iterable[int]) -> bytes:
    """Return the tokens that a matcher allows, without banned ones. If no token is left, the bans do not apply."""
    allowed = matcher.allowed()
    left = without_tokens(allowed, banned_token_ids)
    return left if any_token(left) else allowed


def with_tokens(allowed: bytes, token_ids: Iterable[int]) -> bytes:
    """Return a copy in which the bits of these tokens are set."""
    bits = bytearray(allowed)
    for token_id in token_ids:
        bits[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(bits)


def without_tokens(allowed: bytes, token_ids: Iterable[int]) -> bytes:
    """Return a copy in which the bits of these tokens are cleared."""
    bits = bytearray(allowed)
    for token_id in token_ids:
        bits[token_id >> 3] &= ~(1 << (token_id & 7))
    return bytes(bits)


def has_token(allowed: bytes, token_id: int) -> bool:
    """Return whether the bit of this token is set."""
    return bool(allowed[token_id >> 3] & 1 << (token_id & 7))


def tokens_of(allowed: bytes, *, at_most: int) -> list[int]:
    """Return the tokens whose bit is set, ascending, or an empty list if there are more than `at_most`."""
    bits = int.from_bytes(allowed, "little")
    found: list[int] = []
    while bits and len(found) < at_most:
        found.append((bits & -bits).bit_length() - 1)
        bits &= bits - 1
    return [] if bits else found


def any_token(allowed: bytes) -> bool:
    """Return whether any bit is set."""
    return allowed.count(0) < len(allowed)
