"""How fast an engine has been recently, and when a refused client should come back. No clock here."""

from __future__ import annotations

from math import exp

HORIZON_S = 10.0  # seconds of computing after which a step counts for a third of a new one


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

    def note_step(self, seconds: float, *, num_tokens: int, num_ended: int) -> None:
        """A step took `seconds`, computed `num_tokens` and ended `num_ended` requests."""
        fading = exp(-max(seconds, 0.0) / HORIZON_S)
        self._seconds = self._seconds * fading + seconds
        self._num_steps = self._num_steps * fading + 1
        self._num_tokens = self._num_tokens * fading + num_tokens
        self._num_ended = self._num_ended * fading + num_ended
        self._squared_tokens = self._squared_tokens * fading + num_tokens**2
        self._tokens_by_seconds = self._tokens_by_seconds * fading + num_tokens * seconds

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
        is modelled as a constant and a time for each token, by least squares; neither is below 0.
        """
        if self._num_tokens <= 0 or self._seconds <= 0:
            return 0.0
        mean_tokens, mean_s = self._num_tokens / self._num_steps, self._seconds / self._num_steps
        variance = self._squared_tokens / self._num_steps - mean_tokens**2
        covariance = self._tokens_by_seconds / self._num_steps - mean_tokens * mean_s
        # Steps of one size alone give no slope: then each token is assumed to cost the same.
        token_s = covariance / variance if variance > 0.01 * mean_tokens**2 else mean_s / mean_tokens
        token_s = min(max(token_s, 0.0), mean_s / mean_tokens)
        return num_tokens / (mean_s + token_s * (num_tokens - mean_tokens))

    @property
    def ended_per_s(self) -> float:
        """Requests that end in a second: how fast the queue drains."""
        return self._num_ended / self._seconds if self._seconds > 0 else 0.0


class RetryTimes:
    """Times at which refused clients should come back: those of a tenant one after the other, as fast as requests end.

    If all of them got the time of the next free place, all but one would be refused again. Tenants share the places
    evenly, so one that floods a full service moves its own times only.
    """

    _MAX_AHEAD_S = 120.0  # no client is told to wait longer, and a flood is forgotten after this
    _MAX_TENANTS = 1_000

    def __init__(self) -> None:
        self._last_at: dict[str, float] = {}  # by tenant, of those with times that have not passed

    def next_after(self, now: float, *, ended_per_s: float, tenant: str = "") -> float:
        """Seconds until a place should be free for this client; 1 while no request has ended."""
        if ended_per_s <= 0:
            return 1.0
        if tenant not in self._last_at or self._last_at[tenant] <= now:
            self._last_at = {each: at for each, at in self._last_at.items() if at > now}
            if len(self._last_at) >= self._MAX_TENANTS:
                self._last_at.pop(next(iter(self._last_at)))
        last_at = self._last_at.setdefault(tenant, now)
        num_tenants = len(self._last_at)
        self._last_at[tenant] = min(last_at + num_tenants / ended_per_s, now + self._MAX_AHEAD_S)
        return self._last_at[tenant] - now
