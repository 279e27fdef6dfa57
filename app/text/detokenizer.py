"""Token ids of one request to text, as they come: no character split, none held for ever. No torch here.

The window with a settled front is how TGI and vLLM do it; the bound on what may be held is ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from app.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A UTF-8 character has at most four bytes and a visible token at least one: an unfinished character
# began no more than three tokens ago.
MAX_UNFINISHED_TOKENS = 3
MAX_WINDOW_TOKENS = 12


class Detokenizer:
    """Incremental decoding with bounded work per token.

    The pieces of all `push` calls and the final `flush` put together are the text of all ids at once, however the ids
    were grouped. (Exactly so for byte-level tokenizers. A tokenizer with byte fallback spoils a whole run of byte
    tokens when one of them is invalid; characters already handed out stay as they were.)

        window   [ settled: text handed out, kept because a token's text may depend on its left neighbour | unsettled ]
        text     [ handed out: num_shown characters                                             | held back           ]
    """

    __slots__ = ("_are_independent", "_hidden", "_num_settled", "_num_shown", "_tokenizer", "_window")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`shown_token_ids`: shown even if they are special and those are skipped."""
        self._tokenizer = tokenizer
        self._are_independent = tokenizer.token_bytes.are_independent
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        if shown_token_ids:
            self._hidden -= shown_token_ids
        self._window: list[int] = []
        self._num_settled = 0
        self._num_shown = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids and return the text that is certain by now."""
        if len(token_ids) == 1:  # nearly always
            return "" if token_ids[0] in self._hidden else self._push_one(token_ids[0])
        return "".join([self._push_one(token_id) for token_id in token_ids if token_id not in self._hidden])

    def flush(self) -> str:
        """Return what was held back: nothing more will come."""
        text = self._decode()
        piece = text[self._num_shown :]
        self._num_shown = len(text)
        return piece

    def _push_one(self, token_id: int) -> str:
        if self._are_independent and self._num_settled == len(self._window):
            piece = self._tokenizer.token_text(token_id)
            if piece and REPLACEMENT not in piece:  # whole characters, whatever comes before or after
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
                self._window.pop()  # a token without text; kept, it could push a visible neighbour out of the window
            return piece
        piece = text[self._num_shown : self._end_of_certain_text(text)]
        self._num_shown += len(piece)
        if len(self._window) > MAX_WINDOW_TOKENS:
            self._cut(len(text) - self._num_shown)
        return piece

    def _end_of_certain_text(self, text: str) -> int:
        """Where the text ends that no later token can change: before a character that may be unfinished."""
        if len(self._window) - self._num_settled <= MAX_UNFINISHED_TOKENS:
            return len(text.rstrip(REPLACEMENT))
        return len(text) - 1

    def _settle(self) -> None:
        """Nothing is held back: keep only the newest tokens, as the left neighbours of what comes."""
        del self._window[: self._num_settled]
        self._num_settled = len(self._window)
        if self._num_settled == 1:  # nearly always, and then the text is one of few
            self._num_shown = len(self._tokenizer.token_text(self._window[0]))
        else:
            self._num_shown = len(self._decode())

    def _cut(self, num_held: int) -> None:
        """Shorten a window that does not settle. UTF-8 falls into step again at the next first byte of a character,
        so a window that holds the whole unfinished character ends as the longer one did."""
        del self._window[: -(MAX_UNFINISHED_TOKENS + 1)]
        self._num_settled = 0
        self._num_shown = max(0, len(self._decode()) - num_held)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


class TokenOffsets:
    """Where each token's text begins in the text of all of them, in characters.

    Tokens that make one character together all begin where it does.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._num_characters = 0

    def push(self, token_ids: Iterable[int]) -> list[int]:
        """One offset for each of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._num_characters)
            self._num_characters += len(self._detokenizer.push((token_id,)))
        return offsets
