"""Drafts the tokens that followed the last time that a sequence's latest tokens stood in its prompt or output.

Prompt lookup decoding (Saxena, 2023; in transformers and vLLM), with an index that is kept up token by token and a
source that is followed while it goes on to match, as in suffix decoding (Oliaro et al., 2024). No model, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

NGRAM = 3  # tokens that must have stood together before
# Of a longer prompt the last ones are looked up: the index takes some 200 bytes for each.
MAX_PROMPT_TOKENS = 16_384


class PromptLookup:
    """The tokens of one sequence, and where each n-gram of them stood last."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self._tokens = tokens = list(prompt_token_ids[-MAX_PROMPT_TOKENS:])
        # The place after each n-gram. The last n-gram has nothing after it yet.
        ngrams = zip(*(tokens[first:] for first in range(NGRAM)), strict=False)
        self._places: dict[tuple[int, ...], int] = dict(zip(ngrams, range(NGRAM, len(tokens)), strict=False))
        self._source = 0  # the place of what should follow, by the last match; 0: none
        self.num_matched = 0  # equal tokens before the source and at the end
        self._last_ngram = tuple(tokens[-NGRAM:])
        self._num_prompt_tokens = len(tokens)

    def follow(self, generated_token_ids: Sequence[int]) -> None:
        """Add the tokens that were generated since the last call."""
        tokens = self._tokens
        for token_id in generated_token_ids[len(tokens) - self._num_prompt_tokens :]:
            self._places[self._last_ngram] = len(tokens)
            if self._source and tokens[self._source] == token_id:
                self._source += 1
                self.num_matched += 1
            else:
                self._source = self.num_matched = 0
            tokens.append(token_id)
            self._last_ngram = tuple(tokens[-NGRAM:])

    def has_match(self) -> bool:
        """Whether the last tokens stood there before."""
        if not self._source:
            self._source = self._places.get(self._last_ngram, 0)
            self.num_matched = self._match_length() if self._source else 0
        return self._source > 0

    def draft(self, at_most: int) -> list[int]:
        """The tokens that should follow: no more than matched before them, and none without a match."""
        if not self.has_match():
            return []
        number = min(at_most, self.num_matched)
        found = self._tokens[self._source : self._source + number]
        if found and len(found) < number:  # the match goes up to the end, so what follows is a cycle
            found = (found * number)[:number]
        return found

    def _match_length(self) -> int:
        tokens, source = self._tokens, self._source
        length = 0
        max_matched = 32  # beyond, a longer match says no more
        while length < min(source, max_matched) and tokens[source - 1 - length] == tokens[-1 - length]:
            length += 1
        return length
