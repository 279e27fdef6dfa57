"""Drafts the tokens that followed the previous occurrence of a sequence's newest tokens.

The occurrence is in the prompt, the output, or a request's prediction of its output: prompt lookup decoding (Saxena,
2023; in transformers and vLLM). The index is updated token by token, and a match is followed as long as it continues,
as in suffix decoding (Oliaro et al., 2024). The acceptance of earlier drafts determines how many drafts are worth
computing. Does not use a model or torch, and does not import batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

NGRAM = 3  # number of equal tokens that count as a match
NEAR = 32  # after the output left a prediction, a single equal token among this many following tokens is a match
# Only this many last tokens of a prompt are indexed, because the index takes about 200 bytes per token.
MAX_PROMPT_TOKENS = 16_384
_NEWEST_SHARE = 1 / 8  # minimum weight of a new draft in a sequence's acceptance
FIRST_ACCEPTANCE = 0.7
FIRST_OF_PREDICTIONS = 0.9  # initial acceptance for a request with a prediction of the output


class PromptLookup:
    """A sequence's tokens, and the last position of each n-gram in them."""

    def __init__(self, prompt_token_ids: Sequence[int], prediction: Sequence[int] = ()) -> None:
        """`prediction`: a guess of the output, which is followed from its first token on."""
        # The prediction comes first, because the output is appended to the prompt.
        self._tokens = tokens = [*prediction, *prompt_token_ids[-MAX_PROMPT_TOKENS:]]
        self._num_given, self._num_predicted = len(tokens), len(prediction)
        self._places = _places(tokens, self._num_predicted, self._num_given)
        self._places |= _places(tokens, max(0, self._num_predicted - MAX_PROMPT_TOKENS), self._num_predicted)
        # Index of the token that should follow, according to the last match. A prediction's start needs no match.
        self._source: int | None = 0 if prediction else None
        self.num_matched = 0  # how many tokens before the source equal the last tokens
        self._left_at = 0  # index at which the output left the prediction, after at least NGRAM equal tokens
        self._last_ngram = tuple(tokens[-NGRAM:])

    @property
    def is_predicted(self) -> bool:
        """Whether the next draft comes from the prediction."""
        return self._source is not None and self._source < self._num_predicted

    def follow(self, generated_token_ids: Sequence[int]) -> None:
        """Add the tokens that were generated since the last call."""
        tokens = self._tokens
        for token_id in generated_token_ids[len(tokens) - self._num_given :]:
            self._places[self._last_ngram] = len(tokens)
            if self._source is not None and tokens[self._source] == token_id:
                self._source += 1
                self.num_matched += 1
                if self._source == self._num_predicted:  # the end of the prediction; sources in the prompt are higher
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
        """Whether the last tokens have a match. Looks for a new one if the last match has ended."""
        if self._source is None:
            self._source = self._resumed() or self._places.get(self._last_ngram)
            self.num_matched = 0 if self._source is None else self._match_length(self._source)
        return self._source is not None

    def _resumed(self) -> int | None:
        """Return where to resume the prediction: after the longest match for the last tokens, near `_left_at`.

        Among equally long matches, the first one is used.
        """
        tokens, last = self._tokens, self._tokens[-1] if self._num_predicted else None
        near = range(self._left_at, min(self._num_predicted - 1, self._left_at + NEAR))
        places = [place + 1 for place in near if tokens[place] == last]
        return max(places, key=self._match_length, default=None)

    def draft(self, at_most: int) -> list[int]:
        """Return up to `at_most` tokens that should follow, or none without a match.

        A match outside the prediction yields no more tokens than it has matched so far.
        """
        if not self.has_match() or self._source is None:
            return []
        if self.is_predicted:
            return self._tokens[self._source : min(self._source + at_most, self._num_predicted)]
        number = min(at_most, self.num_matched)
        found = self._tokens[self._source : self._source + number]
        if found and len(found) < number:  # the match reaches the last token, so the tokens repeat in a cycle
            found = (found * number)[:number]
        return found

    def _match_length(self, source: int) -> int:
        tokens = self._tokens
        length = 0
        max_matched = 32  # a longer match is not better
        while length < min(source, max_matched) and tokens[source - 1 - length] == tokens[-1 - length]:
            length += 1
        return length


def _places(tokens: Sequence[int], start: int, end: int) -> dict[tuple[int, ...], int]:
    """Return the index after each n-gram in [start, end), except the last n-gram, which no token follows."""
    ngrams = zip(*(tokens[start + first : end] for first in range(NGRAM)), strict=False)
    return dict(zip(ngrams, range(start + NGRAM, end), strict=False))


def updated(acceptance: float, num_drafts: int, num_kept: int, newest_share: float) -> float:
    """Return the updated acceptance chance of a draft that follows accepted ones, given the counts of one more step."""
    for _ in range(num_kept):
        acceptance += newest_share * (1.0 - acceptance)
    return acceptance if num_kept == num_drafts else acceptance - newest_share * acceptance


@dataclass(slots=True)
class SequenceDrafts:
    """The state of a drafter for a running sequence."""

    lookup: PromptLookup
    are_forced: bool = False  # whether the grammar forced the last drafts
    are_predicted: bool = False  # whether the last drafts came from the prediction
    acceptance: float = FIRST_ACCEPTANCE  # chance that a draft is accepted if all drafts before it were accepted
    num_noted: int = 0  # steps with drafts
    num_unmatched: int = 0  # lookups without a match since the last match

    def note(self, num_drafts: int, num_kept: int) -> None:
        """Learn from a step with drafts. The first steps have more weight, to replace the default quickly."""
        self.num_noted += 1
        share = max(_NEWEST_SHARE, 1 / (1 + self.num_noted))
        self.acceptance = updated(self.acceptance, num_drafts, num_kept, share)

    def num_worthwhile(self, min_acceptance: float) -> int:
        """Return how many drafts in a row have at least this chance of being accepted."""
        # A match of this many tokens shows that a text is being copied, so drafts are tried even if earlier ones were
        # rejected. Matches grow token by token, even in steps without drafts.
        long_match = 8
        is_long = self.lookup.num_matched >= long_match
        return num_worthwhile(max(self.acceptance, FIRST_ACCEPTANCE) if is_long else self.acceptance, min_acceptance)


def num_worthwhile(chance: float, min_acceptance: float) -> int:
    """Return how many consecutive drafts reach `min_acceptance`, if each has `chance` after accepted drafts."""
    return 0 if min_acceptance >= chance else int(log(max(min_acceptance, 1e-6)) / log(min(chance, 0.999)))
