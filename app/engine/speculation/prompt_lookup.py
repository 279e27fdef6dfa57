"""Drafts the tokens that followed the last time that a sequence's latest tokens stood in its prompt or output.

Prompt lookup decoding (Saxena, 2023; in transformers and vLLM), with an index that is kept up token by token and a
source that is followed while it goes on to match, as in suffix decoding (Oliaro et al., 2024). No model, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

NGRAM = 3  # tokens that must have stood together before
# Of a longer prompt the last ones are looked up: the index takes some 200 bytes for each.
MAX_PROMPT_TOKENS = 16_384
_MAX_MATCHED = 32  # beyond, a longer match says no more


class PromptLookup:
    """The tokens of one sequence, and where each n-gram of them stood last."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self._tokens = tokens = list(prompt_token_ids[-MAX_PROMPT_TOKENS:])
        # The place after each n-gram. The last n-gram has nothing after it yet.
        ngrams = zip(*(tokens[first:] for first in range(NGRAM)), strict=False)
        self._places: dict[tuple[int, ...], int] = dict(zip(ngrams, range(NGRAM, len(tokens)), strict=False))
        self._source = 0  # the place of what should follow, by the last match; 0: none
        self._num_matched = 0  # equal tokens before the source and at the end
        self.num_generated = 0  # tokens that were added

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add generated tokens."""
        tokens = self._tokens
        self.num_generated += len(token_ids)
        for token_id in token_ids:
            if len(tokens) >= NGRAM:
                self._places[tuple(tokens[-NGRAM:])] = len(tokens)
            if self._source and tokens[self._source] == token_id:
                self._source += 1
                self._num_matched += 1
            else:
                self._source = 0
            tokens.append(token_id)

    def draft(self, at_most: int) -> list[int]:
        """The tokens that should follow: no more than matched before them, and none without a match."""
        tokens = self._tokens
        if not self._source:
            self._source = self._places.get(tuple(tokens[-NGRAM:]), 0)
            self._num_matched = self._match_length()
        number = min(at_most, self._num_matched)
        found = tokens[self._source : self._source + number] if self._source else []
        if found and len(found) < number:  # the match goes up to the end, so what follows is a cycle
            found = (found * number)[:number]
        return found

    def _match_length(self) -> int:
        tokens, source = self._tokens, self._source
        length = 0
        while length < min(source, _MAX_MATCHED) and tokens[source - 1 - length] == tokens[-1 - length]:
            length += 1
        return length
