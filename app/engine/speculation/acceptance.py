"""How likely drafts are to be kept, by what became of those before. Imports nothing of a step."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from app.engine.speculation.prompt_lookup import PromptLookup

_NEWEST_SHARE = 1 / 8  # of a draft in a sequence's acceptance
FIRST_ACCEPTANCE = 0.7


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
