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
_FIRST_ACCEPTANCE = 0.7
# What a sequence's acceptance regains in a step without drafts, so that they are tried again.
_REGAINED_SHARE = 1 / 256


class Drafter(Protocol):
    """Proposes the next tokens of sequences that decode. What it proposes costs time and never changes a token."""

    def begin(self, num_sequences: int) -> bool:
        """Whether the next step, of so many sequences, may have drafts. Called before `draft`."""
        ...

    def draft(self, sequence: Sequence, at_most: int) -> Several[int]:
        """The tokens that may follow the known ones of a sequence."""
        ...

    def stepped(self, batch: Batch, result: StepResult, *, at: float, goes_on: bool) -> None:
        """A step has ended `at` that time of the engine's clock; the result holds the tokens that were kept.

        `goes_on`: another step follows at once.
        """
        ...


@dataclass(slots=True)
class SequenceDrafts:
    """What a drafter knows of a running sequence."""

    lookup: PromptLookup
    acceptance: float = _FIRST_ACCEPTANCE  # the chance of a draft behind kept ones

    def follow(self, generated_token_ids: list[int]) -> None:
        """Add the tokens that were generated since the last call."""
        self.lookup.extend(generated_token_ids[self.lookup.num_generated :])

    def note(self, num_drafts: int, num_kept: int) -> None:
        """So many drafts were computed, and kept."""
        for _ in range(num_kept):
            self.acceptance += _NEWEST_SHARE * (1.0 - self.acceptance)
        if num_kept < num_drafts:
            self.acceptance -= _NEWEST_SHARE * self.acceptance

    def num_worthwhile(self, least_chance: float) -> int:
        """How many drafts in a row have at least this chance to be kept."""
        if least_chance >= self.acceptance:
            self.acceptance += _REGAINED_SHARE * (_FIRST_ACCEPTANCE - self.acceptance)
            return 0
        return int(log(max(least_chance, 1e-6)) / log(min(self.acceptance, 0.999)))


@dataclass(slots=True)
class LookupDrafter:
    """Drafts by prompt lookup: as many as recent acceptance and step times make worthwhile, `max_drafts` at most."""

    max_drafts: int
    _pace: DraftPace = field(default_factory=DraftPace)
    _least_chance: float = 1.0
    _last_end: float | None = None  # of a step after which others followed at once

    def begin(self, num_sequences: int) -> bool:
        self._least_chance = self._pace.least_chance(num_sequences)
        return self._least_chance < 1.0

    def draft(self, sequence: Sequence, at_most: int) -> Several[int]:
        drafts = sequence.drafts
        if drafts is None:
            drafts = sequence.drafts = SequenceDrafts(PromptLookup(sequence.request.prompt_token_ids))
        drafts.follow(sequence.generated_token_ids)
        number = min(at_most, self.max_drafts, drafts.num_worthwhile(self._least_chance))
        return drafts.lookup.draft(number) if number > 0 else ()

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
                if len(item.token_ids) > 1 and sequence.drafts is not None:
                    sequence.drafts.note(len(item.token_ids) - 1, num_kept - 1)
