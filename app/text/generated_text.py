"""The text of one request: converts token deltas to text deltas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct

from app.engine.request import FinishReason, TokenDelta
from app.text.detokenizer import Detokenizer
from app.text.reasoning import Reasoning, ReasoningPhase, ReasoningSplitter
from app.text.stop_strings import StopStrings
from app.text.tokenizer import Tokenizer


class TextDelta(Struct, gc=False):
    """The text that a token delta adds. `num_tokens` includes hidden tokens (end of text, special tokens)."""

    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    stop_string: str | None = None  # the stop string that ended the text
    reasoning: str = ""  # reasoning that precedes `text`
    num_reasoning_tokens: int = 0  # how many of the `num_tokens` are reasoning


def _sign(number: int) -> str:
    """Return a lone surrogate that represents a hidden token in the search. Surrogates never occur in text."""
    first_surrogate = 0xD800
    return chr(first_surrogate + number)


class GeneratedText:
    """Converts one request's tokens to text: decodes them, separates reasoning, and ends the text at a stop string.

    A stop string may contain special tokens that are hidden. Stop strings are ignored within the first `min_tokens`
    tokens and in reasoning.
    """

    __slots__ = (
        "_detokenizer", "_include_stop", "_min_tokens", "_num_tokens", "_num_undecided_tokens", "_signs", "_splitter",
        "_stop", "_stop_strings", "_unsigned",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        stop_tokens: Mapping[int, str] = MappingProxyType({}),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        shown_token_ids: frozenset[int] = frozenset(),
        include_stop: bool = False,
        reasoning: Reasoning | None = None,
    ) -> None:
        """`stop_tokens` are the special tokens in the stop strings, as returned by `Tokenizer.special_tokens_in`.

        `skip_special_tokens` hides neither `shown_token_ids` nor the marks of `reasoning`. With `include_stop`, the
        text includes the stop string or stop token that ends it.
        """
        if reasoning is not None:
            shown_token_ids |= tokenizer.special_ids(reasoning.marks.special_texts)
        self._splitter = None if reasoning is None else ReasoningSplitter(reasoning)
        self._num_undecided_tokens = 0  # tokens that may belong to the opening mark of reasoning
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, shown_token_ids=shown_token_ids
        )
        hidden = stop_tokens.keys() - shown_token_ids if skip_special_tokens else ()
        self._signs = {token_id: _sign(number) for number, token_id in enumerate(hidden)}
        self._unsigned = {ord(sign): "" for sign in self._signs.values()}
        # Maps each stop string, in the form that is searched, to the form that the client sent.
        self._stop = {self._signed(text, stop_tokens): text for text in stop} | {text: text for text in stop}
        self._stop_strings = StopStrings(tuple(self._stop), is_shown=include_stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def may_end_itself(self) -> bool:
        """Whether the text may end before the last delta because of a stop string."""
        return self._stop_strings is not None

    def push(self, delta: TokenDelta) -> TextDelta:
        """Return the text that a delta adds. If it completes a stop string, the result has the finish reason STOP.

        Tokens after the stop string are neither shown nor counted. A stop token is counted, but its text is only shown
        with `include_stop`.
        """
        if self._stop_strings is not None or self._splitter is not None:
            return self._push_one_by_one(delta)
        if delta.finish_reason is None:
            return TextDelta(self._detokenizer.push(delta.token_ids), len(delta.token_ids))
        text = self._detokenizer.push(self._visible(delta)) + self._detokenizer.flush()
        return TextDelta(text, len(delta.token_ids), delta.finish_reason)

    def _push_one_by_one(self, delta: TokenDelta) -> TextDelta:
        added = TextDelta("", len(delta.token_ids), delta.finish_reason)
        for num_tokens, token_id in enumerate(self._visible(delta), start=1):
            self._num_tokens += 1
            self._add(self._signs.get(token_id) or self._detokenizer.push((token_id,)), added, num_tokens=1)
            if added.stop_string is not None:
                added.num_tokens, added.finish_reason = num_tokens, FinishReason.STOP
                return added
        if delta.finish_reason is not None:
            self._add(self._detokenizer.flush(), added, is_last=True)
            if added.stop_string is not None:
                added.finish_reason = FinishReason.STOP
        return added

    def _add(self, text: str, added: TextDelta, *, num_tokens: int = 0, is_last: bool = False) -> None:
        """Add the text of `num_tokens` tokens to `added`. With `is_last`, also add text that was held back."""
        if self._splitter is not None:
            text = self._split(text, self._splitter, added, num_tokens=num_tokens, is_last=is_last)
        stop_strings = self._stop_strings
        if stop_strings is not None and (is_last or self._num_tokens > self._min_tokens):
            text = stop_strings.push(text)
            if stop_strings.found is not None:
                added.stop_string = self._stop[stop_strings.found]
                if self._include_stop:
                    text = text.removesuffix(stop_strings.found) + added.stop_string
            elif is_last:
                text += stop_strings.flush()
        added.text += text.translate(self._unsigned) if self._unsigned else text

    def _split(
        self, text: str, splitter: ReasoningSplitter, added: TextDelta, *, num_tokens: int, is_last: bool
    ) -> str:
        """Add the reasoning to `added`, and return the rest of the text. Drops the splitter once the answer starts."""
        was_behind = splitter.phase is ReasoningPhase.BEHIND
        parts = [splitter.push(text), splitter.flush()] if is_last else [splitter.push(text)]
        self._num_undecided_tokens += num_tokens
        if splitter.phase is not ReasoningPhase.BEFORE:
            added.num_reasoning_tokens += self._num_undecided_tokens if splitter.has_begun and not was_behind else 0
            self._num_undecided_tokens = 0
        if splitter.phase is ReasoningPhase.ANSWER:
            self._splitter = None
        added.reasoning += "".join(part.reasoning for part in parts).translate(self._unsigned)
        return "".join(part.text for part in parts)

    def _signed(self, text: str, stop_tokens: Mapping[int, str]) -> str:
        """Replace the text of each hidden token in a stop string with the token's lone surrogate."""
        for token_id in sorted(self._signs, key=lambda each: len(stop_tokens[each]), reverse=True):
            text = text.replace(stop_tokens[token_id], self._signs[token_id])
        return text

    def _visible(self, delta: TokenDelta) -> tuple[int, ...]:
        return delta.token_ids if delta.stop_token_id is None or self._include_stop else delta.token_ids[:-1]
