"""The tokens that may be drawn next, as one bit for each token in the vocabulary. Does not use torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from itertools import takewhile
from typing import Protocol

from app.engine.request import Request


class Matcher(Protocol):
    """The state of one request's grammar, which decides which tokens may follow the generated ones."""

    @property
    def ignored_keywords(self) -> Sequence[str]:
        """The locations of the schema keywords that the matcher ignores, for the client."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the matcher can no longer compute allowed tokens, for the client, or None. A failure ends the request."""
        ...

    def allowed(self) -> bytes:
        """Return the tokens that may be drawn, always at least one. Token t is bit t % 8 of byte t // 8.

        Calls return the same bytes until `advance`.
        """
        ...

    def prepare(self) -> None:
        """Compute the result of the next `allowed` in advance. May be called from any thread, but not concurrently."""
        ...

    def advance(self, token_id: int) -> None:
        """Advance by a drawn token. Fast: the next allowed tokens are only computed by `prepare` or `allowed`."""
        ...

    def after(self, token_id: int) -> Matcher:
        """Return a copy that has advanced by one more token. If the token is not allowed, the copy has failed."""
        ...

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens the grammar allows in a row, starting with the first one."""
        ...

    def forced(self, at_most: int) -> list[int]:
        """Return up to `at_most` of the most probable next tokens, if the grammar allows only one text. Often empty."""
        ...


class Matchers(Protocol):
    """Creates matchers for requests."""

    def matcher_of(self, request: Request) -> Future[Matcher | None]:
        """Return a matcher for a request's grammar, advanced past its generated tokens, or None without a grammar.

        The future raises InvalidRequest if the grammar cannot be used, and Overloaded if too many others are waiting.
        """
        ...

    def prepare(self) -> None:
        """Start the preparations that the first grammar would otherwise have to wait for. Does not block."""
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
    """Return a set of tokens as bits. Cached, because all prompts of a request share one set; 16,384 bits take 1 ms."""
    return with_tokens(bytes(-(-vocab_size // 8)), token_ids)


def allowed_after_bans(matcher: Matcher, banned_token_ids: Iterable[int]) -> bytes:
    """Return the tokens that a matcher allows, except banned ones. The bans do not apply if no token would be left."""
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
    return bool(allowed[token_id >> 3] & 1 << (token_id & 7))


def tokens_of(allowed: bytes, *, at_most: int) -> list[int]:
    """Return the tokens whose bits are set, in ascending order, or an empty list if there are more than `at_most`."""
    bits = int.from_bytes(allowed, "little")
    found: list[int] = []
    while bits and len(found) < at_most:
        found.append((bits & -bits).bit_length() - 1)
        bits &= bits - 1
    return [] if bits else found


def any_token(allowed: bytes) -> bool:
    return allowed.count(0) < len(allowed)
