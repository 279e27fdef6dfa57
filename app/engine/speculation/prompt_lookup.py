"""Drafts the tokens that followed the last time that a sequence's latest tokens stood in its prompt or output, and
those of the prediction that a request may bring.

Prompt lookup decoding (Saxena, 2023; in transformers and vLLM), with an index that is kept up token by token and a
source that is followed while it goes on to match, as in suffix decoding (Oliaro et al., 2024). How many are worth
computing follows from what became of those before. No model, no torch; imports nothing of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

NGRAM = 3  # tokens that must have stood together before
NEAR = 32  # tokens of a prediction in which one equal token is enough
# Of a longer prompt the last ones are looked up: the index takes some 200 bytes for each.
MAX_PROMPT_TOKENS = 16_384
_NEWEST_SHARE = 1 / 8  # of a draft in a sequence's acceptance
FIRST_ACCEPTANCE = 0.7
FIRST_OF_PREDICTIONS = 0.9  # likewise, where the client says what the output may be


class PromptLookup:
    """The tokens of one sequence, and where each n-gram of them stood last."""

    def __init__(self, prompt_token_ids: Sequence[int], prediction: Sequence[int] = ()) -> None:
        """`prediction`: what much of the output may be. It is followed from its beginning."""
        # The output follows the prompt, so the prediction stands before both.
        self._tokens = tokens = [*prediction, *prompt_token_ids[-MAX_PROMPT_TOKENS:]]
        self._num_given, self._num_predicted = len(tokens), len(prediction)
        self._places = _places(tokens, self._num_predicted, self._num_given)
        self._places |= _places(tokens, max(0, self._num_predicted - MAX_PROMPT_TOKENS), self._num_predicted)
        # The place of what should follow, by the last match. That of the prediction's beginning needs none.
        self._source: int | None = 0 if prediction else None
        self.num_matched = 0  # equal tokens before the source and at the end
        self._left_at = 0  # where the output has left the prediction, after enough equal tokens
        self._last_ngram = tuple(tokens[-NGRAM:])

    @property
    def is_predicted(self) -> bool:
        """Whether what should follow stands in the prediction."""
        return self._source is not None and self._source < self._num_predicted

    def follow(self, generated_token_ids: Sequence[int]) -> None:
        """Add the tokens that were generated since the last call."""
        tokens = self._tokens
        for token_id in generated_token_ids[len(tokens) - self._num_given :]:
            self._places[self._last_ngram] = len(tokens)
            if self._source is not None and tokens[self._source] == token_id:
                self._source += 1
                self.num_matched += 1
                if self._source == self._num_predicted:  # its end; no match in the prompt begins so early
                    self._leave()
            else:
                self._leave()
            tokens.append(token_id)
            self._last_ngram = tuple(tokens[-NGRAM:])

    def _leave(self) -> None:
        if self._source is not None and self._source <= self._num_predicted and self.num_matched >= NGRAM:
            self._left_at = self._source
        self._source, self.num_matched = None, 0

    def has_match(self) -> bool:
        """Whether the last tokens stood there before."""
        if self._source is None:
            self._source = self._resumed() or self._places.get(self._last_ngram)
            self.num_matched = 0 if self._source is None else self._match_length(self._source)
        return self._source is not None

    def _resumed(self) -> int | None:
        """The place in the prediction, near where the output left it, after the most tokens that are equal to the last
        ones; the first of several."""
        tokens, last = self._tokens, self._tokens[-1] if self._num_predicted else None
        near = range(self._left_at, min(self._num_predicted - 1, self._left_at + NEAR))
        places = [place + 1 for place in near if tokens[place] == last]
        return max(places, key=self._match_length, default=None)

    def draft(self, at_most: int) -> list[int]:
        """The tokens that should follow, none without a match: of a prediction as many as there are, else no more than
        matched before them."""
        if not self.has_match() or self._source is None:
            return []
        if self.is_predicted:
            return self._tokens[self._source : min(self._source + at_most, self._num_predicted)]
        number = min(at_most, self.num_matched)
        found = self._tokens[self._source : self._source + number]
        if found and len(found) < number:  # the match goes up to the end, so what follows is a cycle
            found = (found * number)[:number]
        return found

    def _match_length(self, source: int) -> int:
        tokens = self._tokens
        length = 0
        max_matched = 32  # beyond, a longer match says no more
        while length < min(source, max_matched) and tokens[source - 1 - length] == tokens[-1 - length]:
            length += 1
        return length


def _places(tokens: Sequence[int], start: int, end: int) -> dict[tuple[int, ...], int]:
    """The place after each n-gram from `start` to `end`. The last one has nothing after it."""
    ngrams = zip(*(tokens[start + first : end] for first in range(NGRAM)), strict=False)
    return dict(zip(ngrams, range(start + NGRAM, end), strict=False))


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
    are_predicted: bool = False  # the last drafts: they stand in its prediction
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
