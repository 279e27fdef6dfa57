"""The arrival times of a request's tokens, in this process or over HTTP, and the SLO for these times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.harness.figures import percentiles


@dataclass(slots=True)
class Deliveries:
    """The times of one request, in seconds of one clock."""

    arrival_s: float  # the time at which the request arrived or was due
    delivered_s: list[float] = field(default_factory=list)  # the time of each delivery of one or more tokens

    @property
    def time_to_first_token_s(self) -> float:
        return self.delivered_s[0] - self.arrival_s

    @property
    def latency_s(self) -> float:
        return self.delivered_s[-1] - self.arrival_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive deliveries."""
        return [after - before for before, after in zip(self.delivered_s, self.delivered_s[1:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """The bounds, in seconds, that an answered request must meet to count as goodput; None: no bound."""

    ttft_s: float | None = None
    itl_s: float | None = None  # mean time per token after the first (DistServe's time per output token)
    latency_s: float | None = None

    def is_kept(self, answered: Deliveries, num_tokens: int) -> bool:
        mean_gap_s = sum(answered.gaps_s) / (num_tokens - 1) if num_tokens > 1 else 0.0
        seen = ((answered.time_to_first_token_s, self.ttft_s), (mean_gap_s, self.itl_s))
        return all(bound is None or value <= bound for value, bound in (*seen, (answered.latency_s, self.latency_s)))


def times_of(
    answered: Sequence[Deliveries], percents: Sequence[int] = (50, 95, 99), *, streams: bool = True
) -> dict[str, float | None]:
    """Return percentiles of TTFT, ITL and latency over answered requests; without `streams`, TTFT and ITL are None."""
    streamed = answered if streams else ()
    return (
        percentiles("ttft", [each.time_to_first_token_s for each in streamed], percents)
        | percentiles("itl", [gap for each in streamed for gap in each.gaps_s], percents)
        | percentiles("latency", [each.latency_s for each in answered], percents)
    )
