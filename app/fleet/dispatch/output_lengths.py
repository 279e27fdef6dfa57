"""How many tokens a request will generate, learnt from those that have ended. For sums of work: a mean."""

from __future__ import annotations

from dataclasses import dataclass

_MIN_OUTPUTS = 4  # a bucket with fewer is not used
_NEWEST_SHARE = 0.02  # of a bucket's moving average, once it has seen more than its inverse


class OutputLengths:
    """Mean output length by the power of two below `max_tokens`, and over all.

    The engine's LengthPredictor separates short outputs from long ones by a quantile for each tenant and prompt
    length. The sum of outstanding work needs means, and an ingress sees too few requests of each tenant for more.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, _Mean] = {}
        self._all = _Mean()

    def expected_tokens(self, max_tokens: int) -> int:
        """Tokens that a request with this limit should generate, at least 1; the limit while nothing is known."""
        bucket = self._buckets.get(max_tokens.bit_length(), self._all)
        mean = bucket if bucket.num_outputs >= _MIN_OUTPUTS else self._all
        if mean.num_outputs < _MIN_OUTPUTS:
            return max_tokens
        return max(1, min(max_tokens, round(mean.value)))

    def learn(self, max_tokens: int, num_generated: int) -> None:
        """A request with this limit has ended by itself (a stop or its limit, no abort) at this length."""
        for mean in (self._buckets.setdefault(max_tokens.bit_length(), _Mean()), self._all):
            mean.add(num_generated)


@dataclass(slots=True)
class _Mean:
    """The plain mean of the first, a moving average later."""

    value: float = 0.0
    num_outputs: int = 0

    def add(self, value: int) -> None:
        self.num_outputs += 1
        self.value += max(1 / self.num_outputs, _NEWEST_SHARE) * (value - self.value)
