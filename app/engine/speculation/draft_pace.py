"""How likely a draft must be kept to be worth computing: learned from how long steps with and without drafts take.

Where an engine launches ahead, a step that has waited for drafts counts as one with drafts, whether it has got any.

Where a step waits for memory, a row more is nearly free; where it is bound by computing, a row takes as long as a token
does, and no draft is worth it. (That the number of drafts must fall with the load: SmartSpec, Liu et al., 2024.)
No clock here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2

from app.engine.batch import StepBatch, StepResult
from app.engine.step_times import RecentMean, without_pause

_MIN_STEPS = 4  # of each kind, before they are compared
_AT_FIRST = 0.3  # the least chance while too little is known
_PROBE_EVERY = 64  # steps of one size: one of them without drafts, or with drafts where they are not worth it
_MAX_PROBE_EVERY = 1024  # of a draft model: it first computes what it has missed


def _average() -> RecentMean:
    return RecentMean(newest_share=1 / 16)


@dataclass(slots=True)
class _SizeClass:
    """Steps of about so many sequences."""

    plain_s: RecentMean = field(default_factory=_average)  # of one sequence's token, without drafts
    drafted_s: RecentMean = field(default_factory=_average)  # of one sequence's tokens, with drafts
    num_drafts: RecentMean = field(default_factory=_average)  # of one sequence, in a step with any
    num_kept: RecentMean = field(default_factory=_average)  # of one sequence's tokens, in such a step
    probe_every: int = _PROBE_EVERY
    num_until_probe: int = _PROBE_EVERY  # steps

    @property
    def is_known(self) -> bool:
        return min(self.plain_s.number, self.drafted_s.number) >= _MIN_STEPS

    @property
    def lacks_plain(self) -> bool:
        """Whether only steps without drafts are missing."""
        return self.plain_s.number < _MIN_STEPS <= self.drafted_s.number

    def least_chance(self) -> float:
        """At which a draft brings as much as it takes."""
        if not self.is_known:
            return _AT_FIRST
        plain_s, drafted_s = max(self.plain_s.value, 1e-9), max(self.drafted_s.value, 1e-9)
        draft_s = max(0.0, drafted_s - plain_s) / max(self.num_drafts.value, 1e-9)
        margin = 1.25  # a draft must bring so much more than it takes
        return margin * draft_s * max(1 / plain_s, self.num_kept.value / drafted_s)


class DraftPace:
    """One engine's. What it says depends on the steps and times that it gets, and on nothing else."""

    def __init__(self, *, by_model: bool = False) -> None:
        """by_model: drafts take time before a step, and are never missing. So steps without them are measured on
        purpose, and while none is worthwhile, each probe comes after twice as many steps as the one before."""
        self._by_model = by_model
        self._max_probe_every = _MAX_PROBE_EVERY if by_model else _PROBE_EVERY
        self._classes: dict[int, _SizeClass] = {}
        self._of_size: dict[int, _SizeClass] = {}  # by the number of sequences

    def least_chance(self, num_sequences: int, *, chance: float = 1.0) -> float:
        """The chance of being kept below which a draft is not worth computing in a step of so many sequences.

        1 and more: none is. `chance`: of the likeliest draft that there may be. Called once for a step that may have
        drafts. From time to time it says otherwise, so that steps with and without drafts stay known.
        """
        known = self._class_of(num_sequences)
        known.num_until_probe -= 1
        least = 1.0 if self._by_model and known.lacks_plain else known.least_chance()
        if known.num_until_probe > 0:
            return least
        is_drafting = least < chance
        known.probe_every = _PROBE_EVERY if is_drafting else min(2 * known.probe_every, self._max_probe_every)
        known.num_until_probe = known.probe_every
        return 1.0 if is_drafting else min(_AT_FIRST, chance**2)

    def stepped(self, batch: StepBatch, result: StepResult, seconds: float) -> None:
        """A step took so long. One with a prompt in it says nothing of drafts."""
        num_sequences = len(batch.sequences)
        num_drafts = batch.num_scheduled_tokens - num_sequences if batch.has_drafts else 0
        if num_drafts or batch.num_scheduled_tokens == len(batch.sampled):
            self.note(
                num_sequences=num_sequences,
                num_drafts=num_drafts,
                num_kept=len(result.token_ids),
                seconds=seconds,
                has_waited=batch.has_waited,
            )

    def note(
        self, *, num_sequences: int, num_drafts: int, num_kept: int, seconds: float, has_waited: bool = False
    ) -> None:
        """A step of so many sequences took so long; `num_kept` tokens came of it."""
        known, each_s = self._class_of(num_sequences), seconds / num_sequences
        is_plain = not (num_drafts or has_waited)
        average = known.plain_s if is_plain else known.drafted_s
        if average.number >= _MIN_STEPS:
            each_s = without_pause(each_s, average.value)
        average.note(each_s)
        if not is_plain:
            known.num_drafts.note(num_drafts / num_sequences)
            known.num_kept.note(num_kept / num_sequences)

    def _class_of(self, num_sequences: int) -> _SizeClass:
        found = self._of_size.get(num_sequences)
        per_doubling = 12  # size classes
        if found is None:
            number = round(per_doubling * log2(num_sequences))
            found = self._of_size[num_sequences] = self._classes.setdefault(number, _SizeClass())
        return found
