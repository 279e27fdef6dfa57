"""Decides what is drafted for each sequence of a step: by looking it up, and by how drafts have done of late."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from math import log
from typing import Protocol

from app.engine.batch import Batch, StepResult
from app.engine.sequence import Sequence
from app.engine.speculation.draft_pace import DraftPace
from app.engine.speculation.prompt_lookup import PromptLookup

_NEWEST_SHARE = 1 / 8  # of a draft in a sequence's acceptance
_NEWEST_SHARE_OF_ALL = 1 / 64  # in that of all sequences
_FIRST_ACCEPTANCE = 0.7
# So many equal tokens in a row are tried whatever became of drafts before: a text is copied. Without drafts, too, a
# match grows token by token.
_LONG_MATCH = 8
# Tokens of a sequence with drafts that are not worth computing, for which it is looked up once. Looking up takes 1% of
# a step of a small model.
_LOOKED_UP_EVERY = 4


class Drafter(Protocol):
    """Proposes the next tokens of sequences that decode. What it proposes costs time and never changes a token."""

    def begin(self, num_sequences: int) -> bool:
        """Whether the next step, of so many sequences, may have drafts. Called before `draft`."""
        ...

    def draft(self, sequence: Sequence) -> Several[int]:
        """The tokens that may follow the known ones of a sequence. The first of them may be computed, or none."""
        ...

    def stepped(self, batch: Batch, result: StepResult, *, at: float, goes_on: bool) -> None:
        """A step has ended `at` that time of the engine's clock; the result holds the tokens that were kept.

        `goes_on`: another step follows at once.
        """
        ...


def updated(acceptance: float, num_drafts: int, num_kept: int, newest_share: float) -> float:
    """The chance of a draft behind kept ones, after so many drafts of which so many were kept."""
    for _ in range(num_kept):
        acceptance += newest_share * (1.0 - acceptance)
    return acceptance if num_kept == num_drafts else acceptance - newest_share * acceptance


@dataclass(slots=True)
class SequenceDrafts:
    """What a drafter knows of a running sequence."""

    lookup: PromptLookup
    acceptance: float = _FIRST_ACCEPTANCE  # the chance of a draft behind kept ones
    num_noted: int = 0  # steps with drafts

    def note(self, num_drafts: int, num_kept: int) -> None:
        """So many drafts were computed, and kept. The first steps say more than what others of its kind did."""
        self.num_noted += 1
        share = max(_NEWEST_SHARE, 1 / (1 + self.num_noted))
        self.acceptance = updated(self.acceptance, num_drafts, num_kept, share)

    def num_worthwhile(self, least_chance: float) -> int:
        """How many drafts in a row have at least this chance to be kept."""
        chance = self.acceptance
        if self.lookup.num_matched >= _LONG_MATCH:
            chance = max(chance, _FIRST_ACCEPTANCE)
        return 0 if least_chance >= chance else int(log(max(least_chance, 1e-6)) / log(min(chance, 0.999)))


@dataclass(slots=True)
class LookupDrafter:
    """Drafts by prompt lookup: as many as recent acceptance and step times make worthwhile, `max_drafts` at most."""

    max_drafts: int
    _pace: DraftPace = field(default_factory=DraftPace)
    _acceptance: float = _FIRST_ACCEPTANCE  # of all sequences
    _least_chance: float = 1.0
    _last_end: float | None = None  # of a step after which others followed at once

    def begin(self, num_sequences: int) -> bool:
        self._least_chance = self._pace.least_chance(num_sequences)
        return self._least_chance < 1.0

    def draft(self, sequence: Sequence) -> Several[int]:
        drafts = sequence.drafts
        if drafts is None:
            lookup = PromptLookup(sequence.request.prompt_token_ids)
            drafts = sequence.drafts = SequenceDrafts(lookup, self._acceptance)
        at_most = drafts.num_worthwhile(self._least_chance)
        if not at_most and len(sequence.generated_token_ids) % _LOOKED_UP_EVERY:
            return ()
        drafts.lookup.follow(sequence.generated_token_ids)
        if not drafts.lookup.has_match():
            return ()
        return drafts.lookup.draft(min(self.max_drafts, drafts.num_worthwhile(self._least_chance)))

    def stepped(self, batch: Batch, result: StepResult, *, at: float, goes_on: bool) -> None:
        last_end, self._last_end = self._last_end, at if goes_on else None
        num_sequences = len(batch.sequences)
        num_drafts = batch.num_scheduled_tokens - num_sequences if batch.has_drafts else 0
        if num_drafts == 0 and batch.num_scheduled_tokens != len(batch.sampled):
            return  # a prompt is computed beside
        self._pace.note(
            num_sequences=num_sequences,
            num_drafts=num_drafts,
            num_kept=len(result.token_ids),
            seconds=at - (batch.began_at if last_end is None else last_end),
        )
        if batch.has_drafts:
            for item, sequence, num_kept in zip(batch.scheduled, batch.sequences, result.num_kept, strict=True):
                number = len(item.token_ids) - 1
                if number and sequence.drafts is not None:
                    sequence.drafts.note(number, num_kept - 1)
                    self._acceptance = updated(self._acceptance, number, num_kept - 1, _NEWEST_SHARE_OF_ALL)
