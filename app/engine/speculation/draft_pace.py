"""Learns the acceptance chance above which a draft is worth computing, from the times of steps with and without drafts.

In a step that is limited by memory bandwidth, a draft is nearly free. In a step that is limited by computation, a draft
takes as long as any other token and is not worth computing. The number of drafts must therefore decrease with the load
(SmartSpec, Liu et al., 2024). If the engine launches ahead, a step that was delayed to wait for drafts counts as a step
with drafts, even if it has none. This module does not read a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2

from app.engine.batch import StepBatch, StepResult
from app.engine.step_times import RecentMean, without_pause

_MIN_STEPS = 4  # how many steps of each kind are required for a comparison
_AT_FIRST = 0.3  # the minimum acceptance chance before that
_PROBE_EVERY = 64  # one in 64 steps of a size is a probe: without drafts if they are worthwhile, otherwise with drafts
_MAX_PROBE_EVERY = 1024  # maximum with a draft model, because it must first compute the tokens that it has missed


def _average() -> RecentMean:
    return RecentMean(newest_share=1 / 16)


@dataclass(slots=True)
class _SizeClass:
    """Averages over steps with similar numbers of sequences. All averages are per sequence."""

    plain_s: RecentMean = field(default_factory=_average)  # seconds in a step without drafts
    drafted_s: RecentMean = field(default_factory=_average)  # seconds in a step with drafts
    num_drafts: RecentMean = field(default_factory=_average)  # drafts in a step with drafts
    num_kept: RecentMean = field(default_factory=_average)  # output tokens from a step with drafts
    probe_every: int = _PROBE_EVERY
    num_until_probe: int = _PROBE_EVERY  # steps until the next probe

    @property
    def is_known(self) -> bool:
        return min(self.plain_s.number, self.drafted_s.number) >= _MIN_STEPS

    @property
    def lacks_plain(self) -> bool:
        """Whether enough steps with drafts are known, but too few without."""
        return self.plain_s.number < _MIN_STEPS <= self.drafted_s.number

    def min_acceptance(self) -> float:
        """Return the acceptance chance above which a draft saves more time than it costs, with a margin."""
        if not self.is_known:
            return _AT_FIRST
        plain_s, drafted_s = max(self.plain_s.value, 1e-9), max(self.drafted_s.value, 1e-9)
        draft_s = max(0.0, drafted_s - plain_s) / max(self.num_drafts.value, 1e-9)
        margin = 1.25  # a draft must save at least 1.25 times the time that it costs
        return margin * draft_s * max(1 / plain_s, self.num_kept.value / drafted_s)


class DraftPace:
    """Estimates one engine's minimum worthwhile acceptance chance, based only on the recorded steps and times."""

    def __init__(self, *, by_model: bool = False) -> None:
        """by_model: whether the drafts come from a draft model, which always has drafts. Steps without drafts are then
        measured deliberately. The drafts take time, so the interval between probes doubles while none is worthwhile.
        """
        self._by_model = by_model
        self._max_probe_every = _MAX_PROBE_EVERY if by_model else _PROBE_EVERY
        self._classes: dict[int, _SizeClass] = {}
        self._of_size: dict[int, _SizeClass] = {}  # by the number of sequences

    def min_acceptance(self, num_sequences: int, *, chance: float = 1.0) -> float:
        """Return the acceptance chance below which a draft is not worth computing, with `num_sequences` in the step.

        At 1 or more, no draft is worth computing. `chance` is the acceptance chance of the likeliest possible draft.
        Call this once for each step that may have drafts: some results are probes, to measure both kinds of steps.
        """
        known = self._class_of(num_sequences)
        known.num_until_probe -= 1
        least = 1.0 if self._by_model and known.lacks_plain else known.min_acceptance()
        if known.num_until_probe > 0:
            return least
        is_drafting = least < chance
        known.probe_every = _PROBE_EVERY if is_drafting else min(2 * known.probe_every, self._max_probe_every)
        known.num_until_probe = known.probe_every
        return 1.0 if is_drafting else min(_AT_FIRST, chance**2)

    def stepped(self, batch: StepBatch, result: StepResult, seconds: float) -> None:
        """Learn from a step that took `seconds`. Steps with prompts are ignored, because they have no drafts."""
        num_sequences = len(batch.sequences)
        num_drafts = batch.num_scheduled_tokens - num_sequences if batch.has_drafts else 0
        if num_drafts or batch.num_scheduled_tokens == len(batch.sampled):
            self.note(
                num_sequences=num_sequences,
                num_drafts=num_drafts,
                num_kept=len(result.token_ids),
                seconds=seconds,
                launched_alone=batch.launched_alone,
            )

    def note(
        self, *, num_sequences: int, num_drafts: int, num_kept: int, seconds: float, launched_alone: bool = False
    ) -> None:
        """Learn from a step of `num_sequences` that took `seconds` and yielded `num_kept` tokens."""
        known, each_s = self._class_of(num_sequences), seconds / num_sequences
        is_plain = not (num_drafts or launched_alone)
        average = known.plain_s if is_plain else known.drafted_s
        if average.number >= _MIN_STEPS:
            each_s = without_pause(each_s, average.value)
        average.note(each_s)
        if not is_plain:
            known.num_drafts.note(num_drafts / num_sequences)
            known.num_kept.note(num_kept / num_sequences)

    def _class_of(self, num_sequences: int) -> _SizeClass:
        found = self._of_size.get(num_sequences)
        per_doubling = 12  # size classes per doubling of the number of sequences
        if found is None:
            number = round(per_doubling * log2(num_sequences))
            found = self._of_size[num_sequences] = self._classes.setdefault(number, _SizeClass())
        return found
