"""Adjusts an engine's limits so that it meets its latency targets. Does not use torch or read a clock.

The time between two tokens is the time of the step between them. The tuner therefore learns how the time of a step
depends on its size, and limits steps to the largest size within the target. This limit is the token budget of
Sarathi-Serve (Agrawal et al., 2024), but found while serving, instead of by a sweep. The largest steps are also best
for first tokens, because a prompt then needs the fewest steps. Step times are estimated rather than found by trial, so
the tuner adapts to new traffic without a search.
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

PERIOD_S = 1.0  # seconds between two decisions
WINDOW_S = 30.0  # the percentiles of this many seconds are compared with the targets
# Lower bounds ensure that an unreachable target cannot stop an engine: a step may always have this many tokens, and an
# eighth of the configured requests may always run. A configured limit applies even if it is lower.
MIN_PREFILL_TOKENS = 16
# A limit only changes if the calculated value differs by these factors. Estimates vary by less, so limits stay constant
# under constant traffic. Limits are lowered sooner than raised, because a limit that is too high misses targets.
_TOO_HIGH, _TOO_LOW = 0.95, 1.2
# Seconds without a preemption for memory until more requests may run again: the initial value and the maximum.
_MEMORY_PATIENCE_S, _MAX_MEMORY_PATIENCE_S = 10.0, 300.0


class TuningReason(StrEnum):
    """Why the limits are not higher."""

    CONFIGURED = "configured"  # the limits are at their configured maximums
    ITL = "itl"  # larger steps would exceed the target for the gap between two tokens
    TTFT = "ttft"  # larger steps would exceed the target for the first token
    MEMORY = "memory"  # more requests would not fit into the KV memory
    UNREACHABLE = "unreachable"  # even the smallest steps are too slow for the targets


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The current limits, the reason for them, and the latencies of the last `WINDOW_S` seconds."""

    limits: StepLimits
    reason: TuningReason = TuningReason.CONFIGURED
    step_s: float  # the longest planned time for a step
    ttft_p99_s: float = 0.0  # 0 without first tokens
    itl_p99_s: float = 0.0
    num_changes: int = 0
    is_missed: bool = False  # whether a target was missed in the window and other limits would not help

    @property
    def needs_replicas(self) -> bool:
        """Whether less load on this engine would help."""
        return self.is_missed and self.reason is not TuningReason.UNREACHABLE


class Tuner(StepObserver):
    """Controls one engine's limits. Its decisions only depend on the observed steps and their times."""

    def __init__(
        self, config: SchedulerConfig, *, running: Sequence[object], limit: Callable[[StepLimits], None]
    ) -> None:
        """`config` must have targets. `running` is the engine's list of running sequences. `limit` sets new limits."""
        self._running = running
        self._limit = limit
        targets = config.targets
        assert targets, "the tuner requires targets"
        self._itl_s = inf if targets.itl_p99_ms is None else targets.itl_p99_ms / 1e3
        self._ttft_s = inf if targets.ttft_p99_s is None else targets.ttft_p99_s
        self._highest = StepLimits.of(config)
        self._min_running = max(1, config.max_running // 8)
        self._mixed = StepTimes()  # times of steps that compute prompts, by number of tokens
        self._decoding = StepTimes()  # times of all other steps, by number of requests
        self._gaps_s = RecentTimes()
        self._first_tokens_s = RecentTimes()
        self._memory = _MemoryLimit(self._highest.max_running)
        self._due_at: float | None = None
        self._is_unreachable = False
        self.tuning = Tuning(limits=self._highest, step_s=self._planned_s()[0])
        self._log = TuningLog(targets)

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
        self._log.tell(self.tuning, at)

    def _note(self, step: EndedStep) -> None:
        batch, at, seconds = step.batch, step.at, step.gap_s
        num_tokens, num_sequences = batch.num_scheduled_tokens, len(batch.sequences)
        # In a step with drafts, all of a request's accepted tokens arrive together, after a single gap.
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
        """Record a step's first tokens and return their number. Background requests have no target."""
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
        """Return the longest time that a step may take, and the reason for it."""
        steps_to_first_token = 2  # a request waits for the running step, and then for its own step
        by_ttft = self._ttft_s / steps_to_first_token
        target_s, reason = min((self._itl_s, TuningReason.ITL), (by_ttft, TuningReason.TTFT))
        headroom = 0.95  # steps are planned to take at most this share of a target
        step_s = headroom * target_s
        smallest_s = max(
            self._decoding.seconds(self._min_running), self._mixed.seconds(self._min_running + MIN_PREFILL_TOKENS)
        )
        # The factor _TOO_LOW adds hysteresis, to avoid frequent changes between reachable and unreachable.
        self._is_unreachable = smallest_s > (step_s / _TOO_LOW if self._is_unreachable else step_s)
        # If even the smallest steps are too slow, steps may take this multiple of their time so that requests progress.
        slack_when_unreachable = 1.5
        if self._is_unreachable:
            return max(step_s, slack_when_unreachable * smallest_s), TuningReason.UNREACHABLE
        return step_s, reason

    def _wanted(self, step_s: float, why: TuningReason, at: float, num_running: int) -> tuple[StepLimits, TuningReason]:
        highest = self._highest
        num_tokens = self._mixed.largest_within(step_s)
        share_for_prompts = 1 / 4  # share of a step that is reserved for prompts, up to MIN_PREFILL_TOKENS
        # Even if every running request decodes, a step must have room for prompt tokens.
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
    """Return the new limits. A limit keeps its current value unless the wanted one differs enough."""
    tokens, chunk, running = (
        new if new < _TOO_HIGH * old or new > _TOO_LOW * old or new == top else old
        for old, new, top in zip(current, wanted, highest, strict=True)
    )
    return StepLimits(tokens, min(chunk, tokens), min(running, tokens))


class TuningLog:
    """Logs changed limits at most every few seconds, and logs once if the targets are unreachable."""

    _EVERY_S = 10.0  # minimum seconds between two log lines about changed limits

    def __init__(self, targets: TargetsConfig) -> None:
        self._targets = targets
        self._has_told_of_reach = False
        self._num_changes_told, self._tells_at = 0, -inf

    def tell(self, tuning: Tuning, at: float) -> None:
        if tuning.reason is TuningReason.UNREACHABLE and not self._has_told_of_reach:
            self._has_told_of_reach = True
            logger.warning(
                "%s cannot be met: even the smallest steps take longer; steps of up to %.3g ms are allowed instead",
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
    """The number of requests that fit into memory: the number left after the last preemption, raised slowly."""

    def __init__(self, highest: int) -> None:
        self._highest = float(highest)
        self._limit = self._highest
        self._patience_s = _MEMORY_PATIENCE_S / 2
        self._moved_at = -inf

    def preempted(self, num_running: int, at: float) -> None:
        """Record that `num_running` requests were left after a preemption for memory."""
        if at - self._moved_at >= PERIOD_S:  # preemptions within one period belong to the same shortage
            self._patience_s = min(2 * self._patience_s, _MAX_MEMORY_PATIENCE_S)
        self._limit, self._moved_at = min(self._limit, num_running), at

    def max_running(self, at: float) -> float:
        """Return the current limit. A shortage of memory doubles the time until the limit is raised again."""
        memory_growth = 1.2  # factor by which the limit is raised
        if self._limit < self._highest and at - self._moved_at >= self._patience_s:
            self._limit, self._moved_at = min(self._highest, memory_growth * self._limit), at
        return self._limit


_CLASS_WIDTH = log(1.05)


class RecentTimes:
    """A histogram of times in the last `WINDOW_S` seconds, in classes of 5%, with one part per second."""

    def __init__(self) -> None:
        self._parts: deque[tuple[float, Counter[int]]] = deque()

    def note(self, at: float, seconds: float, number: int = 1) -> None:
        """Record `number` times of `seconds` each. `at` must not decrease between calls."""
        if not self._parts or at >= self._parts[-1][0] + PERIOD_S:
            self._parts.append((at, Counter()))
            self._forget(at)
        self._parts[-1][1][ceil(log(max(seconds, 1e-6)) / _CLASS_WIDTH)] += number

    def p99(self, at: float) -> float:
        """Return the 99th percentile in the window that ends at `at`, or 0 if the window contains no times."""
        counts = self._counts(at)
        left = counts.total() // 100
        for number in sorted(counts, reverse=True):
            left -= counts[number]
            if left < 0:
                return exp((number - 0.5) * _CLASS_WIDTH)
        return 0.0

    def has_missed(self, target_s: float, at: float) -> bool:
        """Whether more than 1% of the times, and more than 3 in total, were longer than the target."""
        if target_s == inf:
            return False
        counts = self._counts(at)
        last = ceil(log(target_s) / _CLASS_WIDTH)
        num_missed = sum(number for each, number in counts.items() if each > last)
        min_misses = 3  # more times must be too long, because a few slow requests are not a trend
        return num_missed > max(min_misses, counts.total() / 100)

    def _counts(self, at: float) -> Counter[int]:
        self._forget(at)
        return sum((counts for _, counts in self._parts), Counter())

    def _forget(self, at: float) -> None:
        while self._parts and self._parts[0][0] < at - WINDOW_S:
            self._parts.popleft()
