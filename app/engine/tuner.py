"""Moves an engine's limits so that it holds its targets: a controller fed with every step. No clock, no torch.

The time between two tokens is that of the step between them, so the tuner learns how long steps take by their size and
sets the limits to the largest step within the target. That is the token budget of Sarathi-Serve (Agrawal et al., 2024),
found while serving and not by a sweep. The largest step is also the best for first tokens: a prompt needs the fewest
steps. As steps are estimated, not tried, a change of traffic needs no search.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, exp, inf, log

from app.config import SchedulerConfig, TargetsConfig
from app.engine.batch import StepBatch, StepLimits
from app.engine.observer import EndedStep, StepObserver
from app.engine.request import TokenDelta
from app.engine.step_times import StepTimes

logger = logging.getLogger(__name__)

PERIOD_S = 1.0  # between two decisions
WINDOW_S = 30.0  # of the percentiles that are compared with the targets
# A lower bound, where the configured limit is not below it: a step has so many tokens, and an eighth of the configured
# requests may run. So no target stops an engine.
MIN_PREFILL_TOKENS = 16
# A limit moves when the one that is wanted is below or above it by more. As estimates vary by less, it stays where it
# is while the traffic stays the same; it is lowered sooner, because a target is missed otherwise.
_TOO_HIGH, _TOO_LOW = 0.95, 1.2
# Seconds without a preemption for memory until more requests may run again.
_MEMORY_PATIENCE_S, _MAX_MEMORY_PATIENCE_S = 10.0, 300.0


class TuningReason(StrEnum):
    """What holds the limits where they are."""

    CONFIGURED = "configured"  # they are the upper bounds
    ITL = "itl"  # larger steps would take longer than a gap between tokens may
    TTFT = "ttft"  # larger steps would take longer than a first token may wait for them
    MEMORY = "memory"  # more requests would not fit into the KV memory
    UNREACHABLE = "unreachable"  # even the smallest steps are too slow for the targets


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The limits in force, why they are, and how the targets were held in the last `WINDOW_S`."""

    limits: StepLimits
    reason: TuningReason = TuningReason.CONFIGURED
    step_s: float  # the longest that steps are planned to take
    ttft_p99_s: float = 0.0  # 0 without first tokens
    itl_p99_s: float = 0.0
    num_changes: int = 0
    is_missed: bool = False  # a target was missed in that time, and other limits would not help

    @property
    def needs_replicas(self) -> bool:
        """Whether less load on this engine would help."""
        return self.is_missed and self.reason is not TuningReason.UNREACHABLE


class Tuner(StepObserver):
    """One engine's controller. What it decides depends on the steps and times that it gets, and on nothing else."""

    def __init__(
        self, config: SchedulerConfig, *, running: Sequence[object], limit: Callable[[StepLimits], None]
    ) -> None:
        """The settings must have targets. `running`: the engine's list of what runs. `limit` sets its limits."""
        self._running = running
        self._limit = limit
        targets = config.targets
        assert targets is not None, "without targets there is nothing to hold"
        self._itl_s = inf if targets.itl_p99_ms is None else targets.itl_p99_ms / 1e3
        self._ttft_s = inf if targets.ttft_p99_s is None else targets.ttft_p99_s
        self._highest = StepLimits.of(config)
        self._min_running = max(1, config.max_running // 8)
        self._mixed = StepTimes()  # of steps with prompts, by their tokens
        self._decoding = StepTimes()  # of other steps, by their requests
        self._gaps_s = RecentTimes()
        self._first_tokens_s = RecentTimes()
        self._memory = _MemoryLimit(self._highest.max_running)
        self._due_at: float | None = None
        self._is_unreachable = False
        self.tuning = Tuning(limits=self._highest, step_s=self._planned_s()[0])
        self._teller = _Teller(targets)

    def step_ended(self, step: EndedStep) -> None:
        at, num_running = step.at, len(self._running)
        if step.batch:
            self._note(step)
        if self._due_at is not None and at < self._due_at:
            return
        is_first, self._due_at = self._due_at is None, at + PERIOD_S
        if is_first:
            return
        limits = self._update(at, num_running)
        if limits is not None:
            self._limit(limits)
        self._teller.tell(self.tuning, at)

    def _note(self, step: EndedStep) -> None:
        batch, at, seconds = step.batch, step.at, step.gap_s
        num_tokens, num_sequences = batch.num_scheduled_tokens, len(batch.sequences)
        # Tokens that come together have one gap before them.
        num_gaps = num_sequences if batch.has_drafts else len(batch.sampled)
        if num_tokens == num_sequences or batch.has_drafts:
            self._decoding.note(num_sequences, seconds)
        else:
            self._mixed.note(num_tokens, seconds)
            num_gaps -= self._note_first_tokens(batch, step.deltas, at)
        if num_gaps > 0:
            self._gaps_s.note(at, seconds, num_gaps)
        if batch.has_preempted:
            self._memory.preempted(num_sequences, at)

    def _note_first_tokens(self, batch: StepBatch, deltas: Sequence[TokenDelta], at: float) -> int:
        """How many there are. Those of background requests have no target."""
        times = {delta.request_id: delta.times for delta in deltas if delta.times is not None}
        if times:
            background = {each.request.request_id for each in batch.sequences if each.request.is_background}
            for request_id in times.keys() - background:
                self._first_tokens_s.note(at, times[request_id].queue_s + times[request_id].prefill_s)
        return len(times)

    # ------------------------------------------------------------------ deciding

    def _update(self, at: float, num_running: int) -> StepLimits | None:
        before = self.tuning
        step_s, why = self._planned_s()
        wanted, reason = self._wanted(step_s, why, at, num_running)
        limits = _settled(before.limits, wanted, self._highest)
        is_moved = limits != before.limits
        has_missed = self._first_tokens_s.has_missed(self._ttft_s, at) or self._gaps_s.has_missed(self._itl_s, at)
        self.tuning = Tuning(
            limits=limits,
            reason=reason if limits != self._highest else TuningReason.CONFIGURED,
            step_s=step_s,
            ttft_p99_s=self._first_tokens_s.p99(at),
            itl_p99_s=self._gaps_s.p99(at),
            num_changes=before.num_changes + is_moved,
            is_missed=has_missed and not is_moved,
        )
        return limits if is_moved else None

    def _planned_s(self) -> tuple[float, TuningReason]:
        """The longest that a step may take, and why not longer."""
        steps_to_first_token = 2  # a request waits for the step that it finds, and for its own
        by_ttft = self._ttft_s / steps_to_first_token
        target_s, reason = min((self._itl_s, TuningReason.ITL), (by_ttft, TuningReason.TTFT))
        headroom = 0.95  # the part of a target that steps are planned for
        step_s = headroom * target_s
        smallest_s = max(
            self._decoding.seconds(self._min_running), self._mixed.seconds(self._min_running + MIN_PREFILL_TOKENS)
        )
        # Once it is out of reach, the same measure of doubt as for a limit: else it would come and go.
        self._is_unreachable = smallest_s > (step_s / _TOO_LOW if self._is_unreachable else step_s)
        # Where even the smallest steps are too slow, steps may be so many times as long, so that requests go on.
        slack_when_unreachable = 1.5
        if self._is_unreachable:
            return max(step_s, slack_when_unreachable * smallest_s), TuningReason.UNREACHABLE
        return step_s, reason

    def _wanted(self, step_s: float, why: TuningReason, at: float, num_running: int) -> tuple[StepLimits, TuningReason]:
        highest = self._highest
        num_tokens = self._mixed.largest_within(step_s)
        share_for_prompts = 1 / 4  # of a step beside those that decode, up to MIN_PREFILL_TOKENS
        # A step in which all of them decode leaves room for a prompt.
        for_prompts = min(MIN_PREFILL_TOKENS, share_for_prompts * num_tokens)
        by_time = min(self._decoding.largest_within(step_s), num_tokens - for_prompts)
        num_tokens = max(num_tokens, num_running + for_prompts, MIN_PREFILL_TOKENS)
        max_step_tokens = int(min(num_tokens, highest.max_step_tokens))
        by_memory = self._memory.max_running(at)
        max_running = int(min(max(min(by_time, by_memory), self._min_running), highest.max_running, max_step_tokens))
        chunk_tokens = min(highest.prefill_chunk_tokens, max_step_tokens)
        is_by_memory = by_memory < by_time and max_step_tokens == highest.max_step_tokens
        reason = TuningReason.MEMORY if is_by_memory else why
        return StepLimits(max_step_tokens, chunk_tokens, max_running), reason


def _settled(current: StepLimits, wanted: StepLimits, highest: StepLimits) -> StepLimits:
    """The wanted limits where they are far enough from the current ones."""
    tokens, chunk, running = (
        new if new < _TOO_HIGH * old or new > _TOO_LOW * old or new == top else old
        for old, new, top in zip(current, wanted, highest, strict=True)
    )
    return StepLimits(tokens, min(chunk, tokens), min(running, tokens))


class _Teller:
    """Logs other limits, from time to time, and once that the targets are out of reach."""

    _EVERY_S = 10.0  # at most

    def __init__(self, targets: TargetsConfig) -> None:
        self._targets = targets
        self._has_told_of_reach = False
        self._num_changes_told, self._tells_at = 0, -inf

    def tell(self, tuning: Tuning, at: float) -> None:
        if tuning.reason is TuningReason.UNREACHABLE and not self._has_told_of_reach:
            self._has_told_of_reach = True
            logger.warning(
                "%s cannot be held: even the smallest steps take longer; steps of up to %.3g ms are planned instead",
                self._targets, 1000 * tuning.step_s,
            )  # fmt: skip
        if tuning.num_changes > self._num_changes_told and at >= self._tells_at:
            self._num_changes_told, self._tells_at = tuning.num_changes, at + self._EVERY_S
            logger.info(
                "limits are now %s, because of %s (change %d); p99 in the last %.0f s: TTFT %.3g s, ITL %.3g ms",
                tuning.limits._asdict(), tuning.reason, tuning.num_changes, WINDOW_S, tuning.ttft_p99_s,
                1000 * tuning.itl_p99_s,
            )  # fmt: skip


class _MemoryLimit:
    """How many requests may run so that none is preempted for memory: as many as fitted, and from time to time more."""

    def __init__(self, highest: int) -> None:
        self._highest = float(highest)
        self._limit = self._highest
        self._patience_s = _MEMORY_PATIENCE_S / 2
        self._moved_at = -inf

    def preempted(self, num_running: int, at: float) -> None:
        """So many requests were left when others were preempted."""
        if at - self._moved_at >= PERIOD_S:  # else it is the same shortage
            self._patience_s = min(2 * self._patience_s, _MAX_MEMORY_PATIENCE_S)
        self._limit, self._moved_at = min(self._limit, num_running), at

    def max_running(self, at: float) -> float:
        """After each preemption it takes twice as long until more are tried."""
        memory_growth = 1.2  # so many times as many
        if self._limit < self._highest and at - self._moved_at >= self._patience_s:
            self._limit, self._moved_at = min(self._highest, memory_growth * self._limit), at
        return self._limit


_CLASS_WIDTH = log(1.05)


class RecentTimes:
    """The times of the last `WINDOW_S`, counted in classes of 5%, by the second."""

    def __init__(self) -> None:
        self._parts: deque[tuple[float, Counter[int]]] = deque()

    def note(self, at: float, seconds: float, number: int = 1) -> None:
        """So many times of `seconds`, `at` a time that is not before the last."""
        if not self._parts or at >= self._parts[-1][0] + PERIOD_S:
            self._parts.append((at, Counter()))
            self._forget(at)
        self._parts[-1][1][ceil(log(max(seconds, 1e-6)) / _CLASS_WIDTH)] += number

    def p99(self, at: float) -> float:
        """Of the window that ends `at`; 0 where there is none."""
        counts = self._counts(at)
        left = counts.total() // 100
        for number in sorted(counts, reverse=True):
            left -= counts[number]
            if left < 0:
                return exp((number - 0.5) * _CLASS_WIDTH)
        return 0.0

    def has_missed(self, target_s: float, at: float) -> bool:
        """Whether more than a hundredth were longer, and more than a few."""
        if target_s == inf:
            return False
        counts = self._counts(at)
        last = ceil(log(target_s) / _CLASS_WIDTH)
        num_missed = sum(number for each, number in counts.items() if each > last)
        min_misses = 3  # in a window, beyond which a target is missed: one slow request is no trend
        return num_missed > max(min_misses, counts.total() / 100)

    def _counts(self, at: float) -> Counter[int]:
        self._forget(at)
        return sum((counts for _, counts in self._parts), Counter())

    def _forget(self, at: float) -> None:
        while self._parts and self._parts[0][0] < at - WINDOW_S:
            self._parts.popleft()
