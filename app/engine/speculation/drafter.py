"""The interface of drafters, which propose draft tokens for a step's sequences, and the prompt-lookup drafter."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from app.engine.batch import MAX_MULTI_TOKEN_SEQUENCES, BatchBuilder, ScheduledSequence, StepBatch, StepResult
from app.engine.matcher import Matcher
from app.engine.running import RunningSequences
from app.engine.sequence import EngineSequence
from app.engine.speculation.draft_pace import DraftPace
from app.engine.speculation.prompt_lookup import (
    FIRST_ACCEPTANCE,
    FIRST_OF_PREDICTIONS,
    PromptLookup,
    SequenceDrafts,
    num_worthwhile,
    updated,
)

# take(sequence, at_most) allocates blocks and returns how many drafts fit. Called at most once per sequence.
Take = Callable[[EngineSequence, int], int]


class Drafter(ABC):
    """Proposes the next tokens of decoding sequences. A wrong proposal costs time but never changes an output token."""

    only_predictions: bool = False  # whether to draft only for requests that contain a prediction of their output

    def expects_drafts(self, sequences: Sequence[EngineSequence]) -> bool:
        """Whether the next step will probably have drafts for these sequences, whose last tokens are being drawn.

        Only called if the engine launches ahead. If True, the next step waits for the last tokens.
        """
        return True

    @abstractmethod
    def begin(self, num_sequences: int) -> bool:
        """Whether the next step, which has `num_sequences` sequences, may have drafts. Called before `draft`."""

    @abstractmethod
    def draft(
        self, items: Sequence[ScheduledSequence], sequences: Sequence[EngineSequence], take: Take
    ) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield (index of a sequence, its drafts) for some of the sequences. `take` limits the number of drafts.

        items: the step's item for each sequence, which contains the sequence's last token.
        """

    @abstractmethod
    def stepped(self, batch: StepBatch, result: StepResult, *, seconds: float) -> None:
        """Learn from a step that took `seconds`. `result` contains the accepted tokens."""

    def sleep(self) -> None:
        """Release the drafter's memory on the device, as a model runner does. No sequence may be running."""

    def wake(self) -> None:
        """Allocate the memory again. Raises the errors of `ModelRunner.wake`."""


def hopes_for_drafts(drafter: Drafter, running: RunningSequences, *, max_rows: int | None) -> bool:
    """Whether a step of the running sequences will probably have drafts once their last tokens are known."""
    sequences = running.in_order
    if drafter.only_predictions and not running.num_predicted:
        return False
    if not sequences or _num_draftable(len(sequences), max_rows) <= 0:
        return False
    return all(each.is_decoding for each in sequences) and drafter.expects_drafts(sequences)


def _num_draftable(num_sequences: int, max_rows: int | None) -> int:
    """Return the maximum number of drafts in a step of `max_rows` tokens, limited further for CUDA graphs."""
    return sys.maxsize if max_rows is None else min(max_rows - num_sequences, MAX_MULTI_TOKEN_SEQUENCES)


def add_drafts(
    builder: BatchBuilder, drafter: Drafter, running: RunningSequences, *, is_short: bool, max_rows: int | None
) -> None:
    """Fill the rest of the budget with drafts if every sequence in the step is decoding.

    A step with a prompt is limited by computation, so drafts would not be cheap. `is_short`: whether a sequence waits
    for blocks, so that drafts must not use new ones. `max_rows`: maximum tokens in a step with drafts, or None.
    """
    sequences = builder.sequences
    num_tokens_left = min(builder.num_tokens_left, _num_draftable(len(sequences), max_rows))
    # Cheap conditions come first, because they exclude most steps. The last one iterates over all sequences.
    if drafter.only_predictions and not running.num_predicted:
        return
    if num_tokens_left <= 0 or not builder.has_single_tokens or not drafter.begin(len(sequences)):
        return
    if not all(each.is_decoding for each in sequences):
        return

    def take(sequence: EngineSequence, at_most: int) -> int:
        nonlocal num_tokens_left
        number = min(at_most, num_tokens_left, running.num_draftable(sequence, is_short=is_short))
        if number <= 0:
            return 0
        running.extend(sequence, 1 + number)
        num_tokens_left -= number
        return number

    for place, drafts in drafter.draft(builder.scheduled, sequences, take):
        builder.add_drafts(place, drafts)


def one_by_one(
    sequences: Sequence[EngineSequence], take: Take, draft: Callable[[EngineSequence], Sequence[int]]
) -> Iterator[tuple[int, Sequence[int]]]:
    """Implement `Drafter.draft` with a function that returns the drafts for one sequence."""
    for place, sequence in enumerate(sequences):
        drafts = draft(sequence)
        if drafts and (number := take(sequence, len(drafts))):  # no drafts is the common case, so it is checked first
            yield place, drafts[:number]


@dataclass(slots=True)
class LookupDrafter(Drafter):
    """Drafts the tokens that a grammar forces, or otherwise tokens found by prompt lookup.

    Recent acceptance and step times determine how many drafts are worthwhile, up to `max_drafts`, or up to
    `max_predicted` from a prediction.
    """

    max_drafts: int = 8
    max_predicted: int = 16
    only_predictions: bool = False
    _pace: DraftPace = field(default_factory=DraftPace)
    _acceptance: float = FIRST_ACCEPTANCE  # average over all sequences
    _acceptance_of_forced: float = 0.9  # forced tokens are nearly always drawn
    _least_chance: float = 1.0
    _num_steps: int = 0
    _is_promising: bool = True  # whether any sequence was promising in the last step with a lookup
    _skips_lookup: bool = True  # whether the current step skips the lookup
    _has_hoped: bool = False  # whether `expects_drafts` delayed the next step, which must then look up drafts
    _guess: tuple[EngineSequence, int] | None = None  # the guess of `expects_drafts` for a token that is being drawn

    def expects_drafts(self, sequences: Sequence[EngineSequence]) -> bool:
        self._has_hoped = False
        if self.begin(len(sequences)):
            for each in sequences:
                if each.request.sampling.max_tokens - each.num_generated_tokens > 1:
                    found = self._draft_of(each)  # the first token is a guess for the token that is being drawn
                    if len(found) > 1:
                        self._has_hoped, self._guess = True, (each, found[0])
                        break
        return self._has_hoped

    def begin(self, num_sequences: int) -> bool:
        if self._has_hoped:
            self._has_hoped = self._skips_lookup = False
            return True
        self._num_steps += 1
        # While no sequence is promising, only one in four steps looks up drafts, because a lookup takes 3% of a step
        # with the smallest models.
        one_of = 4
        self._skips_lookup = not self._is_promising and self._num_steps % one_of > 0
        if self._skips_lookup:
            return False
        self._is_promising = False
        self._least_chance = self._pace.min_acceptance(num_sequences)
        return self._least_chance < 1.0

    def draft(
        self, items: Sequence[ScheduledSequence], sequences: Sequence[EngineSequence], take: Take
    ) -> Iterator[tuple[int, Sequence[int]]]:
        return one_by_one(sequences, take, self._draft_of)

    def _draft_of(self, sequence: EngineSequence) -> Sequence[int]:
        """Return tokens that may follow a sequence's known tokens."""
        drafts, prediction = sequence.drafts, sequence.request.prediction_token_ids
        if self.only_predictions and not prediction:
            return ()
        if drafts is None:
            lookup = PromptLookup(sequence.request.prompt_token_ids, prediction)
            acceptance = FIRST_OF_PREDICTIONS if prediction else self._acceptance
            drafts = sequence.drafts = SequenceDrafts(lookup, acceptance=acceptance)
        forced = self._forced(sequence.matcher)
        drafts.are_forced, drafts.are_predicted = bool(forced), False
        if forced:
            return forced
        generated = sequence.generated_token_ids
        drafts.lookup.follow(generated[:-1] if sequence.has_unknown_token else generated)
        has_match = drafts.lookup.has_match()
        number = drafts.num_worthwhile(self._least_chance)
        drafts.num_unmatched = 0 if has_match else drafts.num_unmatched + 1
        num_hopeful = 8  # after this many lookups without a match, a sequence is not promising
        if number and drafts.num_unmatched < num_hopeful:
            self._is_promising = True
        if not has_match:
            return ()
        drafts.are_predicted = drafts.lookup.is_predicted
        found = drafts.lookup.draft(min(self.max_predicted if drafts.are_predicted else self.max_drafts, number))
        return found if sequence.matcher is None else found[: sequence.matcher.num_allowed(found)]

    def _forced(self, matcher: Matcher | None) -> list[int]:
        if matcher is None:
            return []
        self._is_promising = True
        number = num_worthwhile(self._acceptance_of_forced, self._least_chance)
        return matcher.forced(min(self.max_drafts, number))

    def stepped(self, batch: StepBatch, result: StepResult, *, seconds: float) -> None:
        if not self._skips_lookup:
            self._pace.stepped(batch, result, seconds)
        self._skips_lookup = True
        if self._guess is not None:  # the guess counts as a draft
            (sequence, guess), self._guess = self._guess, None
            if sequence.drafts is not None:
                self._note(sequence.drafts, 1, int(sequence.generated_token_ids[-1] == guess))
        if batch.has_drafts:
            for item, sequence, num_kept in zip(batch.scheduled, batch.sequences, result.num_kept, strict=True):
                number = len(item.token_ids) - 1
                if number and sequence.drafts is not None:
                    self._note(sequence.drafts, number, num_kept - 1)

    def _note(self, drafts: SequenceDrafts, number: int, num_kept: int) -> None:
        newest_share_of_all = 1 / 64  # weight of a new draft in the averages over all sequences
        if drafts.are_forced:
            share = newest_share_of_all
            self._acceptance_of_forced = updated(self._acceptance_of_forced, number, num_kept, share)
        else:
            drafts.note(number, num_kept)
            if drafts.are_predicted:
                return
            self._acceptance = updated(self._acceptance, number, num_kept, newest_share_of_all)
