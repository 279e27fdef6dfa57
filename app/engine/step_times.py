"""How long an engine's steps take, learned while it serves. No clock here.

The tuner asks for the largest step within a time, drafters what a draft adds to a step, deadlines and `Retry-After` for
the pace of late. The planner's times (`deployments/plan/step_cost.py`) are fitted to steps that it has made to order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, inf


@dataclass(slots=True)
class RecentMean:
    """The plain mean of the first values, a moving average later."""

    newest_share: float  # of a value in the average, at least
    value: float = 0.0
    number: int = 0

    def note(self, value: float) -> None:
        self.number += 1
        self.value += max(1 / self.number, self.newest_share) * (value - self.value)


def without_pause(seconds: float, expected_s: float) -> float:
    """The time of a step, at most three times what was expected: what a pause of the system takes is no step's time."""
    return min(seconds, 3.0 * expected_s)


@dataclass(slots=True)
class _SizeClass:
    """Averages of the steps of about one size."""

    # Steps of full size are some ten to a hundred a second.
    size: RecentMean = field(default_factory=lambda: RecentMean(1 / 64))
    seconds: RecentMean = field(default_factory=lambda: RecentMean(1 / 64))
    deviation: RecentMean = field(default_factory=lambda: RecentMean(1 / 64))
    slope: float = 0.0  # seconds for one more

    def note(self, size: int, seconds: float) -> None:
        expected = self.seconds.value + self.slope * (size - self.size.value) if self.seconds.number else seconds
        if self.seconds.number >= 8:  # with fewer, it says too little of what a step may take
            seconds = without_pause(seconds, expected)
        self.size.note(size)
        self.seconds.note(seconds)
        self.deviation.note(abs(seconds - expected))


class StepTimes:
    """How long steps take by their size: recent averages for classes of sizes, straight lines between them."""

    def __init__(self) -> None:
        self._classes: dict[int, _SizeClass] = {}

    def note(self, size: int, seconds: float) -> None:
        """A step of this size, at least 1, took so long."""
        self._classes.setdefault(_class_of(size), _SizeClass()).note(size, seconds)

    def largest_within(self, limit_s: float) -> float:
        """The largest size of which nearly all steps take at most `limit_s`; infinite while nothing is known.

        Beyond the sizes that there were, times are expected to go on as they rose.
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
        min_rise = 0.25  # of the times beyond the known sizes, as a part of the mean time for each token of the largest
        if len(knots) > 1:
            rise = max((before_s - first_s) / (before_size - first_size), min_rise * mean_rise)
        return before_size + (limit_s - before_s) / rise if rise else inf

    def seconds(self, size: int) -> float:
        """Of nearly all steps of this size, at most; 0 while nothing is known."""
        before_size, before_s = 0.0, 0.0
        for knot_size, bound_s in self._knots():
            if knot_size >= size:
                return before_s + (size - before_size) * (bound_s - before_s) / (knot_size - before_size)
            before_size, before_s = knot_size, bound_s
        return before_s

    def _knots(self) -> list[tuple[float, float]]:
        """Sizes and the times that nearly all steps keep, both rising."""
        knots: list[tuple[float, float]] = []
        before_size, before_s = 0.0, 0.0
        # Mean deviations above the mean that a limit leaves room for, as in Jacobson's timer (1988): about the 99th
        # percentile.
        deviations = 3.0
        for _, each in sorted(self._classes.items()):
            each.slope = max(0.0, (each.seconds.value - before_s) / (each.size.value - before_size))
            bound_s = each.seconds.value + deviations * each.deviation.value
            knots.append((each.size.value, max(bound_s, knots[-1][1] if knots else 0.0)))
            before_size, before_s = each.size.value, each.seconds.value
        return knots


def _class_of(size: int) -> int:
    """1, 2, 3, 4 to 5, 6 to 7, 8 to 11, …: each class ends at one and a half or at 1.33 times its first."""
    length = size.bit_length()
    classes_per_doubling = 2
    return classes_per_doubling * length + (size >> max(0, length - 2) & 1)


class Throughput:
    """Steps, tokens and ended requests for each second of computing; idle time does not count."""

    def __init__(self) -> None:
        # Sums in which the weight of old steps decays; their ratios are the averages.
        self._seconds = 0.0
        self._num_steps = 0.0
        self._num_tokens = 0.0
        self._num_ended = 0.0
        self._squared_tokens = 0.0
        self._tokens_by_seconds = 0.0
        self._token_s: float | None = None  # that one token more takes; None while all steps were of one size

    def note_step(self, seconds: float, *, num_tokens: int, num_ended: int) -> None:
        """A step took `seconds`, computed `num_tokens` and ended `num_ended` requests."""
        horizon_s = 10.0  # seconds of computing after which a step counts for a third of a new one
        fading = exp(-max(seconds, 0.0) / horizon_s)
        self._seconds = self._seconds * fading + seconds
        self._num_steps = self._num_steps * fading + 1
        self._num_tokens = self._num_tokens * fading + num_tokens
        self._num_ended = self._num_ended * fading + num_ended
        self._squared_tokens = self._squared_tokens * fading + num_tokens**2
        self._tokens_by_seconds = self._tokens_by_seconds * fading + num_tokens * seconds
        mean_tokens, mean_s = self._num_tokens / self._num_steps, self._seconds / self._num_steps
        variance = self._squared_tokens / self._num_steps - mean_tokens**2
        if variance > 0.01 * mean_tokens**2:  # else the steps of late say nothing of other sizes
            self._token_s = (self._tokens_by_seconds / self._num_steps - mean_tokens * mean_s) / variance

    @property
    def step_s(self) -> float:
        """Seconds of a step; 0 before the first."""
        return self._seconds / self._num_steps if self._num_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self._num_tokens / self._seconds if self._seconds > 0 else 0.0

    def tokens_per_s_at(self, num_tokens: int) -> float:
        """Tokens a second in steps of this many tokens; 0 before the first step.

        This number compares engines; `tokens_per_s` depends on how full their batches were as well. The time of a step
        is modelled as a constant and a time for each token, by least squares; neither is below 0. While all steps are
        of one size, as of a request that is alone, a token keeps the time that it had before.
        """
        if self._num_tokens <= 0 or self._seconds <= 0:
            return 0.0
        mean_tokens, mean_s = self._num_tokens / self._num_steps, self._seconds / self._num_steps
        # While there was but one size, each token is assumed to cost the same.
        token_s = mean_s / mean_tokens if self._token_s is None else self._token_s
        token_s = min(max(token_s, 0.0), mean_s / mean_tokens)
        return num_tokens / (mean_s + token_s * (num_tokens - mean_tokens))

    @property
    def ended_per_s(self) -> float:
        """Requests that end in a second: how fast the queue drains."""
        return self._num_ended / self._seconds if self._seconds > 0 else 0.0
