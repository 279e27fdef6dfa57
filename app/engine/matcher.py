"""Which tokens may be drawn next, as a bit for each token of the vocabulary. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Protocol

from app.engine.request import Request


class Matcher(Protocol):
    """One request's place in what its output must look like."""

    @property
    def failure(self) -> str | None:
        """Why it can no longer tell, in words for the caller; the request ends by it. None: it can."""
        ...

    def allowed(self) -> bytes:
        """The tokens that may be drawn: token t is bit t % 8 of byte t // 8. At least one, whatever happens.

        Changes nothing: asked twice, it says the same.
        """
        ...

    def prepare(self) -> None:
        """Find out what `allowed` will say, so that it has only to be read. In any thread, but in one at a time."""
        ...

    def advance(self, token_id: int) -> None:
        """Go on behind a drawn token. Takes no time: what follows from it is found out when it is asked for."""
        ...


class Matchers(Protocol):
    """Where matchers come from."""

    def matcher_of(self, request: Request) -> Future[Matcher | None]:
        """A matcher for the request's grammar behind its generated tokens; None where it has no grammar.

        The future raises InvalidRequest when its grammar cannot be used, Overloaded when too many others wait.
        """
        ...

    def close(self) -> None:
        """Stop; nothing may be asked afterwards."""
        ...


class TokenSet:
    """The same tokens at every step."""

    failure: str | None = None

    def __init__(self, token_ids: Iterable[int], *, vocab_size: int) -> None:
        self._allowed = with_tokens(bytes(-(-vocab_size // 8)), token_ids)

    def allowed(self) -> bytes:
        return self._allowed

    def prepare(self) -> None:
        """Nothing is left to find out."""

    def advance(self, token_id: int) -> None:
        """Nothing changes."""


def allowed_after_bans(matcher: Matcher, banned_token_ids: Iterable[int]) -> bytes:
    """What a matcher allows without the banned tokens. Where that would leave nothing, the ban does not hold."""
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


def any_token(allowed: bytes) -> bool:
    """Whether any bit is set."""
    return allowed.count(0) < len(allowed)
