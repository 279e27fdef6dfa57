"""Drafts the tokens that followed the last time that a sequence's latest tokens stood in its prompt or output.

Prompt lookup decoding (Saxena, 2023; in transformers and vLLM), with an index that is kept up token by token and a
source that is followed while it goes on to match, as in suffix decoding (Oliaro et al., 2024). How many are worth
computing follows from what became of those before. No model, no torch; imports nothing of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

NGRAM = 3  # tokens that must have stood together before
# Of a longer prompt the last ones are looked up: the index takes some 200 bytes for each.
MAX_PROMPT_TOKENS = 16_384
_NEWEST_SHARE = 1 / 8  # of a draft in a sequence's acceptance
FIRST_ACCEPTANCE = 0.7


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


def updated(acceptance: float, num_drafts: int, num_kept: int, newest_share: float) -> float:
    """The chance of a draft behind kept ones, after so many drafts of which so many were kept."""
    for _ in range(num_kept):
        acceptance += newest_share * (1.0 - acceptance)
    return acceptance if num_kept == num_drafts else acceptance - newest_share * acceptance


@dataclass(slots=True)
class SequenceDrafts:
    """What a drafter knows of a running sequence."""

    lookup: PromptLookup
    are_forced: bool = False  # the last drafts: by its grammar
    acceptance: float = FIRST_ACCEPTANCE  # the chance of a draft behind kept ones
    num_noted: int = 0  # steps with drafts
    num_unmatched: int = 0  # looks without a match since the last one

    def note(self, num_drafts: int, num_kept: int) -> None:
        """So many drafts were computed, and kept. The first steps say more than what others of its kind did."""
        self.num_noted += 1
        share = max(_NEWEST_SHARE, 1 / (1 + self.num_noted))
        self.acceptance = updated(self.acceptance, num_drafts, num_kept, share)

    def num_worthwhile(self, least_chance: float) -> int:
        """How many drafts in a row have at least this chance to be kept."""
        # So many equal tokens in a row are tried whatever became of drafts before: a text is copied. Without drafts,
        # too, a match grows token by token.
        long_match = 8
        is_long = self.lookup.num_matched >= long_match
        return num_worthwhile(max(self.acceptance, FIRST_ACCEPTANCE) if is_long else self.acceptance, least_chance)


def num_worthwhile(chance: float, least_chance: float) -> int:
    """How many drafts in a row have at least the least chance, if each behind kept ones has `chance`."""
    return 0 if least_chance >= chance else int(log(max(least_chance, 1e-6)) / log(min(chance, 0.999)))
