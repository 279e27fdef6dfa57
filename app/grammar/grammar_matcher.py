"""One request's place in its grammar."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llguidance import LLMatcher

from app.engine.matcher import any_token, with_tokens, without_tokens
from app.grammar.compiling import reason_of
from app.grammar.lazy_matcher import LazyMatcher


class GrammarMatcher(LazyMatcher):
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
        super().__init__()
        self._matcher = matcher
        self._stop_token_ids = frozenset(stop_token_ids)
        self._num_bytes = -(-vocab_size // 8)
        self._on_failure = on_failure
        self.failure: str | None = None

    @property
    def may_end(self) -> bool:
        """Whether what is written so far is complete."""
        self.catch_up()
        return self.failure is None and self._matcher.is_accepting()

    @property
    def is_complete(self) -> bool:
        """Whether it is, and nothing may follow."""
        return self.may_end and self._matcher.is_stopped()

    def accepts(self, token_id: int) -> bool:
        """Whether this token may follow."""
        self.catch_up()
        return self._matcher.validate_tokens([token_id]) == 1

    def _consume(self, token_id: int) -> None:
        """See `LazyMatcher`; behind a stop token nothing comes."""
        if self.failure is None and token_id not in self._stop_token_ids and not self._matcher.consume_token(token_id):
            self._fail(reason_of(self._matcher.get_error()))

    def _compute_allowed(self) -> bytes:
        """See `Matcher`. When it fails, every token is allowed: what is drawn then is not used."""
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
