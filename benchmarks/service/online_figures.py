"""What a run against a server over HTTP comes to, as its clients saw it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness.answer import Answer
from benchmarks.harness.figures import percentile
from benchmarks.service.open_loop import Sent

REFUSED = 429


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a request must see to count for goodput; None: no bound. Of an answer that came at all, and whole."""

    ttft_s: float | None = None  # first token, from the time it was to be sent
    itl_s: float | None = None  # mean time between its tokens after the first (DistServe's time per output token)

    def is_kept(self, sent: Sent) -> bool:
        answer = sent.answer
        if not answer.has_succeeded:
            return False
        if self.ttft_s is not None and answer.delivered_s[0] - sent.scheduled_s > self.ttft_s:
            return False
        return self.itl_s is None or mean_gap_s(answer) <= self.itl_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineFigures:
    """Times are of requests that were answered whole, from when they were to be sent; shares are from 0 to 1."""

    seconds: float  # from the first arrival to the last end: what comes after the arrivals counts too
    num_requests: int
    num_answered: int
    errors: dict[str, int]  # by status, or by what went wrong
    num_output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    goodput_requests_per_s: float  # of those that kept the SLO
    goodput_share: float  # of all that were sent
    refused_share: float  # status 429
    refusal_p50_ms: float | None
    refusal_p99_ms: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p95_s: float | None
    itl_p99_s: float | None
    latency_p50_s: float | None
    latency_p95_s: float | None
    latency_p99_s: float | None
    lateness_p99_ms: float  # of the client against its own schedule: in doubt about the rest when it is not small
    lateness_max_ms: float
    client_cpu_share: float  # of one core

    @classmethod
    def of(cls, sent: Sequence[Sent], slo: Slo, *, client_cpu_s: float) -> OnlineFigures:
        """`sent`: at least one request."""
        answered = [one for one in sent if one.answer.has_succeeded]
        refused = [one for one in sent if one.answer.status == REFUSED]
        seconds = max(one.answer.ended_s for one in sent) - min(one.scheduled_s for one in sent)
        num_tokens = sum(one.answer.num_tokens for one in answered)
        num_kept = sum(map(slo.is_kept, sent))
        lateness_ms = [one.lateness_s * 1000 for one in sent]
        refusals_ms = [(one.answer.ended_s - one.answer.begun_s) * 1000 for one in refused]
        return cls(
            seconds=round(seconds, 3),
            num_requests=len(sent),
            num_answered=len(answered),
            errors=dict(Counter(one.answer.outcome for one in sent if not one.answer.has_succeeded)),
            num_output_tokens=num_tokens,
            output_tokens_per_s=round(num_tokens / seconds, 2),
            requests_per_s=round(len(answered) / seconds, 3),
            goodput_requests_per_s=round(num_kept / seconds, 3),
            goodput_share=round(num_kept / len(sent), 4),
            refused_share=round(len(refused) / len(sent), 4),
            refusal_p50_ms=_rounded(percentile(refusals_ms, 50)),
            refusal_p99_ms=_rounded(percentile(refusals_ms, 99)),
            **_percentiles("ttft", [one.answer.delivered_s[0] - one.scheduled_s for one in answered]),
            **_percentiles("itl", [gap for one in answered for gap in one.answer.gaps_s]),
            **_percentiles("latency", [one.answer.delivered_s[-1] - one.scheduled_s for one in answered]),
            lateness_p99_ms=round(percentile(lateness_ms, 99) or 0.0, 3),
            lateness_max_ms=round(max(lateness_ms), 3),
            client_cpu_share=round(client_cpu_s / seconds, 3),
        )


def mean_gap_s(answer: Answer) -> float:
    """Seconds a token after the first took on average; 0 for a single token."""
    after_first = answer.num_tokens - 1
    return (answer.delivered_s[-1] - answer.delivered_s[0]) / after_first if after_first > 0 else 0.0


def _percentiles(name: str, samples: Sequence[float]) -> dict[str, float | None]:
    return {f"{name}_p{percent}_s": _rounded(percentile(samples, percent), 6) for percent in (50, 95, 99)}


def _rounded(number: float | None, digits: int = 3) -> float | None:
    return None if number is None else round(number, digits)
