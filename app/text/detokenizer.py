"""Incremental decoding of one request's token ids. No character is split or held back forever.

Decoding a window of recent tokens, as below, comes from TGI and vLLM. Carousel adds a limit on the text held back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from app.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A UTF-8 character has at most four bytes, and a visible token has at least one byte. Therefore, an unfinished
# character began at most three tokens ago.
MAX_UNFINISHED_TOKENS = 3
MAX_WINDOW_TOKENS = 12


class Detokenizer:
    """Incremental decoding with bounded work per token.

    The results of all `push` calls and the final `flush` form the text of all ids, regardless of how the ids were
    grouped. This is exact for byte-level tokenizers. A tokenizer with byte fallback replaces a whole run of byte tokens
    if one byte is invalid, but text that was already returned does not change. A token's text may depend on the
    previous token, so the window contains settled tokens, whose text was returned, before the unsettled tokens:

        window   [ settled tokens                 | unsettled tokens ]
        text     [ returned: num_shown characters      |  held back  ]
    """

    __slots__ = ("_are_independent", "_hidden", "_num_settled", "_num_shown", "_tokenizer", "_window")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`shown_token_ids` are shown even if `skip_special_tokens` hides other special tokens."""
        self._tokenizer = tokenizer
        self._are_independent = tokenizer.token_bytes.are_independent
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        if shown_token_ids:
            self._hidden -= shown_token_ids
        self._window: list[int] = []
        self._num_settled = 0
        self._num_shown = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Decode the next ids. Returns the new text that later tokens cannot change."""
        if len(token_ids) == 1:  # nearly always
            return "" if token_ids[0] in self._hidden else self._push_one(token_ids[0])
        return "".join([self._push_one(token_id) for token_id in token_ids if token_id not in self._hidden])

    def flush(self) -> str:
        """Return the text that is still held back. Call this after the last token."""
        text = self._decode()
        piece = text[self._num_shown :]
        self._num_shown = len(text)
        return piece

    def _push_one(self, token_id: int) -> str:
        if self._are_independent and self._num_settled == len(self._window):
            piece = self._tokenizer.token_text(token_id)
            if piece and REPLACEMENT not in piece:  # only complete characters
                self._window[:] = (token_id,)
                self._num_settled, self._num_shown = 1, len(piece)
                return piece
        self._window.append(token_id)
        text = self._decode()
        if not text.endswith(REPLACEMENT):
            piece = text[self._num_shown :]
            if piece or not text:
                self._settle()
            else:
                self._window.pop()  # a token without text must not displace a visible token from the window
            return piece
        piece = text[self._num_shown : self._end_of_certain_text(text)]
        self._num_shown += len(piece)
        if len(self._window) > MAX_WINDOW_TOKENS:
            self._cut(len(text) - self._num_shown)
        return piece

    def _end_of_certain_text(self, text: str) -> int:
        """Return the end of the text that later tokens cannot change. Unfinished characters follow it."""
        if len(self._window) - self._num_settled <= MAX_UNFINISHED_TOKENS:
            return len(text.rstrip(REPLACEMENT))
        return len(text) - 1

    def _settle(self) -> None:
        """Keep only the newest tokens, on which the next token's text may depend. Call this if no text is held back."""
        del self._window[: self._num_settled]
        self._num_settled = len(self._window)
        if self._num_settled == 1:  # the usual case; `token_text` caches its results
            self._num_shown = len(self._tokenizer.token_text(self._window[0]))
        else:
            self._num_shown = len(self._decode())

    def _cut(self, num_held: int) -> None:
        """Shorten a window that does not settle. The shorter window decodes to the same ending if it includes the whole
        unfinished character, because UTF-8 resynchronizes at the first byte of each character."""
        del self._window[: -(MAX_UNFINISHED_TOKENS + 1)]
        self._num_settled = 0
        self._num_shown = max(0, len(self._decode()) - num_held)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


class TokenOffsets:
    """Computes the offset of each token's text within the whole text, in characters.

    Tokens that form one character together share its offset.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._num_characters = 0

    def push(self, token_ids: Iterable[int]) -> list[int]:
        """Return the offset of each of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._num_characters)
            self._num_characters += len(self._detokenizer.push((token_id,)))
        return offsets
