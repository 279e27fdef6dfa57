"""Which tokens may be drawn next, as a bit for each token of the vocabulary. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from itertools import takewhile
from typing import Protocol

from app.engine.request import Request


class Matcher(Protocol):
    """The state of one request's grammar: which tokens may follow the generated ones."""

    @property
    def ignored_keywords(self) -> Sequence[str]:
        """Places of keywords of its schemas that it does not keep, for the client."""
        ...

    @property
    def failure(self) -> str | None:
        """Why it can no longer tell which tokens may follow, for the client; the request ends. None: it can."""
        ...

    def allowed(self) -> bytes:
        """The tokens that may be drawn: token t is bit t % 8 of byte t // 8. Always at least one.

        Changes nothing: a second call returns the same.
        """
        ...

    def prepare(self) -> None:
        """Compute what `allowed` will return. In any thread, but in one at a time."""
        ...

    def advance(self, token_id: int) -> None:
        """Advance by a drawn token. Takes no time: what may follow is computed by `prepare` or `allowed`."""
        ...

    def after(self, token_id: int) -> Matcher:
        """Another matcher, behind one more token; it has failed where the token is not allowed. This one stays."""
        ...

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, may follow in a row."""
        ...

    def forced(self, at_most: int) -> list[int]:
        """The next tokens, where only one text may follow: those that most probably write it. Often none."""
        ...


class Matchers(Protocol):
    """Makes matchers."""

    def matcher_of(self, request: Request) -> Future[Matcher | None]:
        """A matcher for the request's grammar, advanced past its generated tokens; None without a grammar.

        The future raises InvalidRequest when its grammar cannot be used, Overloaded when too many others wait.
        """
        ...

    def prepare(self) -> None:
        """Begin what the first grammar would wait for, and return at once."""
        ...

    def close(self) -> None:
        """Stop; must not be used afterwards."""
        ...


class TokenSet:
    """The same tokens at every step."""

    failure: str | None = None
    ignored_keywords: Sequence[str] = ()

    def __init__(self, token_ids: Iterable[int], *, vocab_size: int) -> None:
        self._allowed = _bits_of(tuple(token_ids), vocab_size)

    def allowed(self) -> bytes:
        return self._allowed

    def prepare(self) -> None:
        """Nothing to compute."""

    def advance(self, token_id: int) -> None:
        """The set stays the same."""

    def after(self, token_id: int) -> Matcher:
        return self

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return len(list(takewhile(partial(has_token, self._allowed), token_ids)))

    def forced(self, at_most: int) -> list[int]:
        return []


@lru_cache(maxsize=8)
def _bits_of(token_ids: tuple[int, ...], vocab_size: int) -> bytes:
    """Kept, as all prompts of one body ask for the same tokens: to set 16,384 bits takes a millisecond."""
    return with_tokens(bytes(-(-vocab_size // 8)), token_ids)


def allowed_after_bans(matcher: Matcher, banned_token_ids: Iterable[int]) -> bytes:
    """The tokens that a matcher allows, without banned ones. If none would be left, the ban does not apply."""
    allowed = matcher.allowed()
    left = without_tokens(allowed, banned_token_ids)
    return left if any_token(left) else allowed


def with_tokens(allowed: bytes, token_ids: Iterable[int]) -> bytes:
    """The same bits with those of some tokens set."""
    bits = bytearray(allowed)
    for token_id in token_ids:
        bits[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(bits)


def without_tokens(allowed: bytes, token_ids: Iterable[int]) -> bytes:
    """The same bits with those of some tokens cleared."""
    bits = bytearray(allowed)
    for token_id in token_ids:
        bits[token_id >> 3] &= ~(1 << (token_id & 7))
    return bytes(bits)


def has_token(allowed: bytes, token_id: int) -> bool:
    """Whether the bit of this token is set."""
    return bool(allowed[token_id >> 3] & 1 << (token_id & 7))


def tokens_of(allowed: bytes, *, at_most: int) -> list[int]:
    """The tokens with a set bit, ascending; none of them if there are more than `at_most`."""
    bits = int.from_bytes(allowed, "little")
    found: list[int] = []
    while bits and len(found) < at_most:
        found.append((bits & -bits).bit_length() - 1)
        bits &= bits - 1
    return [] if bits else found


def any_token(allowed: bytes) -> bool:
    """Whether any bit is set."""
    return allowed.count(0) < len(allowed)
