"""One request's place in its grammar."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llguidance import LLMatcher

from app.engine.matcher import any_token, with_tokens, without_tokens
from app.grammar.compiling import reason_of


class GrammarMatcher:
    """Says which tokens the grammar allows next. End tokens are allowed where the grammar may end, and nowhere else."""

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        stop_token_ids: Iterable[int],
        vocab_size: int,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """`stop_token_ids`: the request's own, beside the model's end tokens, which `matcher` knows."""
        self._matcher = matcher
        self._stop_token_ids = frozenset(stop_token_ids)
        self._num_bytes = -(-vocab_size // 8)
        self._on_failure = on_failure
        self._drawn: list[int] = []  # what `matcher` has not been told yet
        self._allowed: bytes | None = None  # behind all of those, once it is known
        self.failure: str | None = None

    def allowed(self) -> bytes:
        """See `Matcher`. When it fails, every token is: what is drawn then is not used."""
        allowed = self._allowed
        return self._find_allowed() if allowed is None else allowed

    def prepare(self) -> None:
        """See `Matcher`."""
        if self._allowed is None:
            self._find_allowed()

    def advance(self, token_id: int) -> None:
        """Go on behind a drawn token; behind a stop token nothing comes."""
        self._drawn.append(token_id)
        self._allowed = None

    def catch_up(self) -> None:
        """Go through the drawn tokens now, and not in a step."""
        drawn, self._drawn = self._drawn, []
        for token_id in drawn:
            if self.failure is None and token_id not in self._stop_token_ids:
                self._consume(token_id)

    def _consume(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            self._fail(reason_of(self._matcher.get_error()))

    def _find_allowed(self) -> bytes:
        self.catch_up()
        self._allowed = allowed = self._compute_allowed()
        return allowed

    def _compute_allowed(self) -> bytes:
        if self.failure is None:
            allowed = self._matcher.compute_bitmask()[: self._num_bytes]
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
        self.failure = f"the output cannot go on in the form that was asked for: {reason}"
        self._on_failure()
