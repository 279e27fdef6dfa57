"""Estimates how long an engine's steps take, based on its recent steps. Does not read a clock.

The tuner uses it to find the largest step within a time limit, and drafters to find how much time a draft adds to a
step. Deadlines and `Retry-After` use the recent throughput. The planner (`deployments/plan/step_cost.py`) has its own
measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, inf


@dataclass(slots=True)
class RecentMean:
    """The arithmetic mean of the first values, which becomes a moving average as more follow."""

    newest_share: float  # minimum weight of a new value in the average
    value: float = 0.0
    number: int = 0

    def note(self, value: float) -> None:
        self.number += 1
        self.value += max(1 / self.number, self.newest_share) * (value - self.value)


def without_pause(seconds: float, expected_s: float) -> float:
    """Limit a step's time to three times the expected time, because the system must have paused a longer step."""
    return min(seconds, 3.0 * expected_s)


@dataclass(slots=True)
class _SizeClass:
    """Averages over steps of similar size."""

    # At ten to a hundred steps of full size per second, the last few seconds count.
    size: RecentMean = field(default_factory=lambda: RecentMean(1 / 64))
    seconds: RecentMean = field(default_factory=lambda: RecentMean(1 / 64))
    deviation: RecentMean = field(default_factory=lambda: RecentMean(1 / 64))
    slope: float = 0.0  # additional seconds per additional token or request

    def note(self, size: int, seconds: float) -> None:
        expected = self.seconds.value + self.slope * (size - self.size.value) if self.seconds.number else seconds
        if self.seconds.number >= 8:  # the expected time is not reliable before that
            seconds = without_pause(seconds, expected)
        self.size.note(size)
        self.seconds.note(seconds)
        self.deviation.note(abs(seconds - expected))


class StepTimes:
    """Step times by step size: recent averages for classes of sizes, interpolated linearly."""

    def __init__(self) -> None:
        self._classes: dict[int, _SizeClass] = {}

    def note(self, size: int, seconds: float) -> None:
        """Record that a step of this size (at least 1) took `seconds`."""
        self._classes.setdefault(_class_of(size), _SizeClass()).note(size, seconds)

    def largest_within(self, limit_s: float) -> float:
        """Return the largest size at which nearly all steps take at most `limit_s`, or infinity before the first step.

        Times beyond the largest observed size are extrapolated linearly.
        """
        knots = self._knots()
        if not knots or limit_s == inf:
            return inf
        before_size, before_s = 0.0, 0.0
        for size, bound_s in knots:
            if bound_s > limit_s:
                return before_size + (size - before_size) * (limit_s - before_s) / (bound_s - before_s)
            before_size, before_s = size, bound_s
        first_size, first_s = knots[0]
        rise = mean_rise = before_s / before_size
        min_rise = 0.25  # minimum slope for extrapolating, relative to the time per token at the largest size
        if len(knots) > 1:
            rise = max((before_s - first_s) / (before_size - first_size), min_rise * mean_rise)
        return before_size + (limit_s - before_s) / rise if rise else inf

    def seconds(self, size: int) -> float:
        """Return an upper bound on the time of nearly all steps of this size, or 0 before the first step."""
        before_size, before_s = 0.0, 0.0
        for knot_size, bound_s in self._knots():
            if knot_size >= size:
                return before_s + (size - before_size) * (bound_s - before_s) / (knot_size - before_size)
            before_size, before_s = knot_size, bound_s
        return before_s

    def _knots(self) -> list[tuple[float, float]]:
        """Return (mean size, upper bound on nearly all steps' times) for each class, in ascending order."""
        knots: list[tuple[float, float]] = []
        before_size, before_s = 0.0, 0.0
        # The bound is this many mean deviations above the mean, about the 99th percentile (Jacobson's timer, 1988).
        deviations = 3.0
        for _, each in sorted(self._classes.items()):
            each.slope = max(0.0, (each.seconds.value - before_s) / (each.size.value - before_size))
            bound_s = each.seconds.value + deviations * each.deviation.value
            knots.append((each.size.value, max(bound_s, knots[-1][1] if knots else 0.0)))
            before_size, before_s = each.size.value, each.seconds.value
        return knots


def _class_of(size: int) -> int:
    """Return the class of a size. There are two classes per doubling: 1, 2, 3, 4 to 5, 6 to 7, 8 to 11, …"""
    length = size.bit_length()
    classes_per_doubling = 2
    return classes_per_doubling * length + (size >> max(0, length - 2) & 1)


class Throughput:
    """The last step's time, and recent steps, tokens and ended requests per second of computing, without idle time."""

    def __init__(self) -> None:
        self.last_step_at = 0.0  # when the last step's results were processed, in seconds of the engine's clock
        self.last_step_s = 0.0  # duration of the last step
        self.last_gap_s = 0.0  # time between the ends of the last two steps, or the last step's duration after a pause
        self.is_paused = True  # whether no request was running after the last step
        # Old steps have less weight in these sums. The averages are ratios of two sums.
        self._seconds = 0.0
        self._num_steps = 0.0
        self._num_tokens = 0.0
        self._num_ended = 0.0
        self._squared_tokens = 0.0
        self._tokens_by_seconds = 0.0
        self._token_s: float | None = None  # seconds per additional token; None if all steps so far had the same size

    def note_step(self, now: float, *, began_at: float, num_tokens: int, num_ended: int) -> None:
        """Record that a step with `num_tokens` tokens, after which `num_ended` requests ended, has finished `now`."""
        # A step that was launched ahead began while the previous step was still running.
        seconds = self.last_step_s = now - max(began_at, self.last_step_at)
        self.last_gap_s = now - (began_at if self.is_paused else self.last_step_at)
        self.last_step_at, self.is_paused = now, False
        horizon_s = 10.0  # after this many seconds of computing, a step's weight has dropped to about a third
        fading = exp(-max(seconds, 0.0) / horizon_s)
        self._seconds = self._seconds * fading + seconds
        self._num_steps = self._num_steps * fading + 1
        self._num_tokens = self._num_tokens * fading + num_tokens
        self._num_ended = self._num_ended * fading + num_ended
        self._squared_tokens = self._squared_tokens * fading + num_tokens**2
        self._tokens_by_seconds = self._tokens_by_seconds * fading + num_tokens * seconds
        mean_tokens, mean_s = self._num_tokens / self._num_steps, self._seconds / self._num_steps
        variance = self._squared_tokens / self._num_steps - mean_tokens**2
        if variance > 0.01 * mean_tokens**2:  # steps of similar size do not show how time depends on the size
            self._token_s = (self._tokens_by_seconds / self._num_steps - mean_tokens * mean_s) / variance

    @property
    def step_s(self) -> float:
        """Mean seconds per step, or 0 before the first step."""
        return self._seconds / self._num_steps if self._num_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self._num_tokens / self._seconds if self._seconds > 0 else 0.0

    def tokens_per_s_at(self, num_tokens: int) -> float:
        """Return the tokens per second in steps of `num_tokens` tokens, or 0 before the first step.

        Use this number to compare engines, because `tokens_per_s` also depends on how full their batches were. A step's
        time is modelled as a constant plus a time per token, by least squares; neither is negative. While all steps
        have the same size, for example with a single request, the time per token keeps its last value.
        """
        if self._num_tokens <= 0 or self._seconds <= 0:
            return 0.0
        mean_tokens, mean_s = self._num_tokens / self._num_steps, self._seconds / self._num_steps
        # If all steps so far had the same size, their time is assumed to be proportional to their tokens.
        token_s = mean_s / mean_tokens if self._token_s is None else self._token_s
        token_s = min(max(token_s, 0.0), mean_s / mean_tokens)
        return num_tokens / (mean_s + token_s * (num_tokens - mean_tokens))

    @property
    def ended_per_s(self) -> float:
        """Requests that end per second of computing, which is how fast the queue drains."""
        return self._num_ended / self._seconds if self._seconds > 0 else 0.0
