"""Matchers for outputs that start with a thought (free text between two marks), followed by structured output."""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum, auto

from app.engine.matcher import with_tokens, without_tokens
from app.engine.request import Thought
from app.grammar.free_text import FreeText, FreeTextState, TokenTable, Trigger
from app.grammar.matchers import GrammarMatcher, LazyMatcher, TaggedMatcher, either

BeginOutput = Callable[[], GrammarMatcher | TaggedMatcher | None]  # returns None if the output may be any text

_MAX_BLANKS = 4  # tokens of white space between a thought and the output


class _Phase(Enum):
    BEFORE = auto()  # at most white space and a prefix of the opening mark so far
    INSIDE = auto()
    BEHIND = auto()  # after the thought, at most followed by white space
    OUTPUT = auto()


class ThoughtText:
    """Data shared by all matchers of thoughts with the same end mark."""

    def __init__(self, table: TokenTable, thought: Thought) -> None:
        self.table = table
        self.free = FreeText(table, [Trigger(thought.end.encode(), is_opening=False)])


class ThoughtMatcher(LazyMatcher):
    """Allows a thought, followed by the output that its own matcher allows (any text if there is no matcher)."""

    def __init__(
        self, text: ThoughtText, thought: Thought, begin_output: BeginOutput, *, end_token_ids: Collection[int]
    ) -> None:
        """`end_token_ids` are banned in the thought if the output has a matcher, so that the output must follow."""
        super().__init__()
        self._table, self._free = text.table, text.free
        self._thought = thought
        self._begin_output = begin_output
        self._output = begin_output()
        self._end_token_ids = end_token_ids
        self._phase = _Phase.INSIDE if thought.is_open else _Phase.BEFORE
        self._written = b""  # text so far in the phase BEFORE, which may become the opening mark
        self._may_be_output = True  # whether `_written` may also be output
        self._place = self._free.middle
        self._num_tokens = self._num_blanks = 0

    @property
    def failure(self) -> str | None:
        return None if self._output is None else self._output.failure

    def forced(self, at_most: int) -> list[int]:
        """See `Matcher`. A thought is never forced."""
        self.catch_up()
        if self._output is None or self._phase is not _Phase.OUTPUT:
            return []
        return self._output.forced(at_most)

    def _separate(self) -> None:
        if self._output is not None:
            self._output = self._output.copied()

    def _compute_allowed(self) -> bytes:
        nothing = bytes(len(self._table.all))
        match self._phase:
            case _Phase.BEFORE:
                rest = with_tokens(nothing, self._table.beginning(self._begin[len(self._written.lstrip()) :]))
                return either(rest, self._allowed_in_output()) if self._may_be_output else rest
            case _Phase.INSIDE if self._is_spent:
                return with_tokens(nothing, self._ending())
            case _Phase.INSIDE:
                allowed = self._free.allowed(self._place)
                return allowed if self._output is None else without_tokens(allowed, self._end_token_ids)
            case _Phase.BEHIND if self._num_blanks < _MAX_BLANKS:
                return either(self._allowed_in_output(), self._table.blanks)
            case _:
                return self._allowed_in_output()

    def _consume(self, token_id: int) -> None:
        match self._phase:
            case _Phase.BEFORE:
                self._consume_before(token_id)
            case _Phase.INSIDE:
                self._consume_inside(token_id)
            case _Phase.BEHIND if self._is_blank_between(token_id):
                self._num_blanks += 1
            case _:
                self._phase = _Phase.OUTPUT
                self._advance_output(token_id)

    def _consume_before(self, token_id: int) -> None:
        """Consume a token before the thought.

        While the text may still become either the opening mark or output, the token counts as part of both.
        """
        self._written += self._text_of(token_id)
        written = self._written.lstrip()
        if written.startswith(self._begin):
            self._phase, self._output = _Phase.INSIDE, self._begin_output()
            if len(written) > len(self._begin):
                self._consume_inside(token_id)
        elif self._begin.startswith(written):
            self._may_be_output = self._may_be_output and self._is_in_output(token_id)
            if self._may_be_output:
                self._advance_output(token_id)
        else:
            self._phase = _Phase.OUTPUT
            self._advance_output(token_id)

    def _consume_inside(self, token_id: int) -> None:
        self._num_tokens += 1
        reached = self._free.after(self._place, token_id)
        if isinstance(reached, FreeTextState):
            self._place = reached
        else:
            self._phase = _Phase.BEHIND

    def _advance_output(self, token_id: int) -> None:
        if self._output is not None:
            self._output.advance(token_id)

    def _is_blank_between(self, token_id: int) -> bool:
        """Return whether a token is white space after the thought that is not allowed in the output itself."""
        is_blank = self._num_blanks < _MAX_BLANKS and self._table.texts[token_id].isspace()
        return is_blank and not self._is_in_output(token_id)

    def _is_in_output(self, token_id: int) -> bool:
        return bool(self._allowed_in_output()[token_id >> 3] & 1 << (token_id & 7))

    def _allowed_in_output(self) -> bytes:
        return self._table.all if self._output is None else self._output.allowed()

    @property
    def _begin(self) -> bytes:
        return self._thought.begin.encode()

    @property
    def _is_spent(self) -> bool:
        return self._thought.max_tokens is not None and self._num_tokens >= self._thought.max_tokens

    def _ending(self) -> list[int]:
        """Return a list with the longest token that is a prefix of the rest of the end mark, or equal to this rest."""
        return self._table.beginning(self._thought.end.encode()[len(self._place.tail) :])[:1]

    def _text_of(self, token_id: int) -> bytes:
        begin = self._thought.begin
        return begin.encode() if self._table.special.get(begin) == token_id else self._table.texts[token_id]
