"""The text of one request: its token deltas in, text deltas out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from app.engine.request import FinishReason, TokenDelta
from app.text.detokenizer import Detokenizer
from app.text.stop_strings import StopStrings
from app.text.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """What one token delta added. `num_tokens` counts hidden ones (end of text, special) too."""

    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    stop_string: str | None = None  # the one that ended the text


class GeneratedText:
    """Detokenizer and stop strings of one request. Stop strings count only after the first `min_tokens` tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        """`include_stop`: the stop string or token that ends the text is shown too."""
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop_strings = StopStrings(stop, is_shown=include_stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def push(self, delta: TokenDelta) -> TextDelta:
        """Take a delta; when a stop string is complete in it, the result says STOP and is the last one.

        Tokens after the one that completed the stop string are neither shown nor counted. A stop token's own text is
        not shown, but it was generated and counts.
        """
        if self._stop_strings is None:
            text = self._detokenizer.push(self._visible(delta))
            text += self._detokenizer.flush() if delta.finish_reason else ""
            return TextDelta(text, len(delta.token_ids), delta.finish_reason)
        return self._push_until_stop(delta, self._stop_strings)

    def _push_until_stop(self, delta: TokenDelta, stop_strings: StopStrings) -> TextDelta:
        pieces = []
        for num_tokens, token_id in enumerate(self._visible(delta), start=1):
            self._num_tokens += 1
            piece = self._detokenizer.push((token_id,))
            pieces.append(stop_strings.push(piece) if self._num_tokens > self._min_tokens else piece)
            if stop_strings.found is not None:
                return _stopped(pieces, num_tokens, stop_strings.found)
        if delta.finish_reason is not None:
            pieces.append(stop_strings.push(self._detokenizer.flush()))
            if stop_strings.found is not None:
                return _stopped(pieces, len(delta.token_ids), stop_strings.found)
            pieces.append(stop_strings.flush())
        return TextDelta(text="".join(pieces), num_tokens=len(delta.token_ids), finish_reason=delta.finish_reason)

    def _visible(self, delta: TokenDelta) -> tuple[int, ...]:
        return delta.token_ids if delta.stop_token_id is None or self._include_stop else delta.token_ids[:-1]


def _stopped(pieces: list[str], num_tokens: int, stop_string: str) -> TextDelta:
    return TextDelta(
        text="".join(pieces), num_tokens=num_tokens, finish_reason=FinishReason.STOP, stop_string=stop_string
    )
