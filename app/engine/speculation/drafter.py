"""Drafters decide what is drafted for each sequence of a step. Here the one that looks drafts up."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass, field

from app.engine.batch import MAX_LONGER, BatchBuilder, ScheduledSequence, StepBatch, StepResult
from app.engine.matcher import Matcher
from app.engine.running import RunningSequences
from app.engine.sequence import Sequence
from app.engine.speculation.draft_pace import DraftPace
from app.engine.speculation.prompt_lookup import (
    FIRST_ACCEPTANCE,
    FIRST_OF_PREDICTIONS,
    PromptLookup,
    SequenceDrafts,
    num_worthwhile,
    updated,
)

# Gives a sequence the blocks for at most so many drafts; returns for how many there is room. Called once for each.
Take = Callable[[Sequence, int], int]


class Drafter(ABC):
    """Proposes the next tokens of sequences that decode. What it proposes costs time and never changes a token."""

    only_predictions: bool = False  # drafts only for requests that bring a prediction of their output

    def hopes(self, sequences: Several[Sequence]) -> bool:
        """Whether the next step probably has drafts for any of these, of which the last tokens are being drawn.

        Asked where an engine launches ahead: such a step waits for those tokens.
        """
        return True

    @abstractmethod
    def begin(self, num_sequences: int) -> bool:
        """Whether the next step, of so many sequences, may have drafts. Called before `draft`."""

    @abstractmethod
    def draft(
        self, items: Several[ScheduledSequence], sequences: Several[Sequence], take: Take
    ) -> Iterator[tuple[int, Several[int]]]:
        """For some of the sequences, by their places, the tokens that may follow the known ones: as many as are taken.

        items: what the step computes of each sequence, its last token.
        """

    @abstractmethod
    def stepped(self, batch: StepBatch, result: StepResult, *, seconds: float) -> None:
        """A step has ended that took so long; the result holds the tokens that were kept."""

    def sleep(self) -> None:
        """Give up what memory of the device it has, as a model runner does; every sequence waits."""

    def wake(self) -> None:
        """Have the memory again. Raises what a model runner raises."""


def hopes_for_drafts(drafter: Drafter, running: RunningSequences, *, max_rows: int | None) -> bool:
    """Whether a step of these probably has drafts once their last tokens are known."""
    sequences = running.in_order
    if drafter.only_predictions and not running.num_predicted:
        return False
    if not sequences or _num_draftable(len(sequences), max_rows) <= 0:
        return False
    return all(each.is_decoding for each in sequences) and drafter.hopes(sequences)


def _num_draftable(num_sequences: int, max_rows: int | None) -> int:
    """Drafts of a step, at most; it may have `max_rows` tokens, and on a GPU no more drafts than its graphs hold."""
    return sys.maxsize if max_rows is None else min(max_rows - num_sequences, MAX_LONGER)


def add_drafts(
    builder: BatchBuilder, drafter: Drafter, running: RunningSequences, *, is_short: bool, max_rows: int | None
) -> None:
    """Use what is left of the budget and of the blocks for drafts, where every sequence of the step decodes.

    A step with a prompt in it is bound by computing. `is_short`: others wait for blocks, so drafts take none.
    `max_rows`: tokens of a step with drafts, where an engine launches ahead.
    """
    sequences = builder.sequences
    num_tokens_left = min(builder.num_tokens_left, _num_draftable(len(sequences), max_rows))
    # These conditions say so for most steps; the last looks at every sequence.
    if drafter.only_predictions and not running.num_predicted:
        return
    if num_tokens_left <= 0 or not builder.has_single_tokens or not drafter.begin(len(sequences)):
        return
    if not all(each.is_decoding for each in sequences):
        return

    def take(sequence: Sequence, at_most: int) -> int:
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
    sequences: Several[Sequence], take: Take, draft: Callable[[Sequence], Several[int]]
) -> Iterator[tuple[int, Several[int]]]:
    """As `Drafter.draft`, of drafts that are found for each sequence apart."""
    for place, sequence in enumerate(sequences):
        drafts = draft(sequence)
        if drafts and (number := take(sequence, len(drafts))):  # the common case, made short: there are none
            yield place, drafts[:number]


@dataclass(slots=True)
class LookupDrafter(Drafter):
    """Drafts what a grammar forces, else by prompt lookup: as many as recent acceptance and step times make
    worthwhile, `max_drafts` at most, of a prediction `max_predicted`."""

    max_drafts: int = 8
    max_predicted: int = 16
    only_predictions: bool = False
    _pace: DraftPace = field(default_factory=DraftPace)
    _acceptance: float = FIRST_ACCEPTANCE  # of all sequences
    _acceptance_of_forced: float = 0.9  # what a grammar forces is nearly always drawn
    _least_chance: float = 1.0
    _num_steps: int = 0
    _is_promising: bool = True  # any sequence of the last step that was looked at
    _is_passing: bool = True  # the current step is not looked at
    _has_hoped: bool = False  # and the current step has waited: it is looked at, too
    _guess: tuple[Sequence, int] | None = None  # the token that is being drawn, as far as it was hoped for

    def hopes(self, sequences: Several[Sequence]) -> bool:
        self._has_hoped = False
        if self.begin(len(sequences)):
            for each in sequences:
                if each.request.sampling.max_tokens - each.num_generated_tokens > 1:
                    found = self._draft_of(each)  # the first of it is the token that is being drawn
                    if len(found) > 1:
                        self._has_hoped, self._guess = True, (each, found[0])
                        break
        return self._has_hoped

    def begin(self, num_sequences: int) -> bool:
        if self._has_hoped:
            self._has_hoped = self._is_passing = False
            return True
        self._num_steps += 1
        # Of so many steps one is looked at, while no sequence is promising: looking takes 3% of a step of the smallest
        # models.
        one_of = 4
        self._is_passing = not self._is_promising and self._num_steps % one_of > 0
        if self._is_passing:
            return False
        self._is_promising = False
        self._least_chance = self._pace.least_chance(num_sequences)
        return self._least_chance < 1.0

    def draft(
        self, items: Several[ScheduledSequence], sequences: Several[Sequence], take: Take
    ) -> Iterator[tuple[int, Several[int]]]:
        return one_by_one(sequences, take, self._draft_of)

    def _draft_of(self, sequence: Sequence) -> Several[int]:
        """What may follow its known tokens."""
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
        num_hopeful = 8  # looks without a match, after which a sequence is not promising
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
        if not self._is_passing:
            self._pace.stepped(batch, result, seconds)
        self._is_passing = True
        if self._guess is not None:  # it is as much as a draft that was computed
            (sequence, guess), self._guess = self._guess, None
            if sequence.drafts is not None:
                self._note(sequence.drafts, 1, int(sequence.generated_token_ids[-1] == guess))
        if batch.has_drafts:
            for item, sequence, num_kept in zip(batch.scheduled, batch.sequences, result.num_kept, strict=True):
                number = len(item.token_ids) - 1
                if number and sequence.drafts is not None:
                    self._note(sequence.drafts, number, num_kept - 1)

    def _note(self, drafts: SequenceDrafts, number: int, num_kept: int) -> None:
        newest_share_of_all = 1 / 64  # in that of all sequences
        if drafts.are_forced:
            share = newest_share_of_all
            self._acceptance_of_forced = updated(self._acceptance_of_forced, number, num_kept, share)
        else:
            drafts.note(number, num_kept)
            if drafts.are_predicted:
                return
            self._acceptance = updated(self._acceptance, number, num_kept, newest_share_of_all)
