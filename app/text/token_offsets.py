"""Where each token's text begins in the text of all of them."""

from __future__ import annotations

from collections.abc import Iterable

from app.text.detokenizer import Detokenizer
from app.text.tokenizer import Tokenizer


class TokenOffsets:
    """Offsets in characters. Tokens that make one character together all begin where it does."""

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
