"""The figures of a run: speed, waiting, use of the slots, fairness between tenants, share within a service level."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.engine.run import Run, Timeline
from benchmarks.engine.step_trace import Step
from benchmarks.harness.figures import percentile
from benchmarks.harness.workload import Workload

MIN_CONTENDED_STEPS = 50  # in fewer, shares are chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A service level: what a request must see to count as served well. Seconds from its arrival; None: no bound."""

    ttft_s: float | None = None
    latency_s: float | None = None

    def is_kept(self, timeline: Timeline) -> bool:
        if timeline.has_failed or not timeline.delivered_s:
            return False
        first_in_time = self.ttft_s is None or timeline.time_to_first_token_s <= self.ttft_s
        return first_in_time and (self.latency_s is None or timeline.latency_s <= self.latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A run, and what was seen of it from inside. None where the engine does not report it."""

    run: Run
    joined_s: Mapping[str, float]  # when each request was first computed, by request id
    padding_share: float = 0.0  # of all computed tokens
    bubble_share: float | None = None
    mean_running: float | None = None
    steps: Sequence[Step] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFigures:
    """Times are of the requests that were answered, in seconds from their arrival; shares are from 0 to 1."""

    seconds: float
    num_requests: int
    num_failed: int  # refused, expired or ended by an error
    num_output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p95_s: float | None
    itl_p99_s: float | None
    latency_mean_s: float | None
    latency_p50_s: float | None
    latency_p95_s: float | None
    latency_p99_s: float | None
    queue_wait_mean_s: float | None
    queue_wait_p99_s: float | None
    queue_wait_longest_s: float | None
    bubble_share: float | None  # slot time held by nothing while requests waited
    padding_share: float  # computed tokens that belong to no request
    mean_running: float | None  # requests in a step
    num_steps: int | None
    preemptions: int | None
    jain_index: float | None  # over tenants, see `jain_over_tenants`; None without contention between tenants
    slo_share: float | None  # requests within the promise, of all
    slo_requests_per_s: float | None

    @classmethod
    def of(cls, workload: Workload, served: Served, promise: Promise | None) -> ServiceFigures:
        run = served.run
        answered = {name: timeline for name, timeline in run.timelines.items() if not timeline.has_failed}
        timelines = list(answered.values())
        first = [timeline.time_to_first_token_s for timeline in timelines] if run.streams else []
        gaps = [gap for timeline in timelines for gap in timeline.gaps_s] if run.streams else []
        latencies = [timeline.latency_s for timeline in timelines]
        waits = [served.joined_s[name] - timeline.arrival_s for name, timeline in answered.items()]
        num_kept = sum(map(promise.is_kept, run.timelines.values())) if promise is not None else None
        return cls(
            seconds=round(run.seconds, 4),
            num_requests=len(run.timelines),
            num_failed=len(run.timelines) - len(answered),
            num_output_tokens=run.num_output_tokens,
            output_tokens_per_s=round(run.num_output_tokens / run.seconds, 2),
            requests_per_s=round(len(answered) / run.seconds, 4),
            **_percentiles("ttft", first),
            **_percentiles("itl", gaps),
            latency_mean_s=_mean(latencies),
            **_percentiles("latency", latencies),
            queue_wait_mean_s=_mean(waits),
            queue_wait_p99_s=_rounded(percentile(waits, 99)),
            queue_wait_longest_s=_rounded(percentile(waits, 100)),
            bubble_share=_rounded(served.bubble_share),
            padding_share=round(served.padding_share, 6),
            mean_running=_rounded(served.mean_running),
            num_steps=run.num_steps,
            preemptions=run.num_preemptions,
            jain_index=_rounded(jain_over_tenants(workload, served)),
            slo_share=None if num_kept is None else round(num_kept / len(run.timelines), 4),
            slo_requests_per_s=None if num_kept is None else round(num_kept / run.seconds, 4),
        )


def jain_over_tenants(workload: Workload, served: Served, *, min_steps: int = MIN_CONTENDED_STEPS) -> float | None:
    """Jain's index over the tokens computed for each tenant in the steps in which requests of every tenant waited.

    Over a whole run it would say nothing: in the end all requests are served. None where there are fewer
    such steps than `min_steps`.
    """
    tenant_of = {timed.request.request_id: timed.request.tenant for timed in workload.requests}
    if len(set(tenant_of.values())) < 2:
        return None
    waits: dict[str, list[tuple[float, float]]] = defaultdict(list)  # by tenant: from its arrival to its first step
    for timed in workload.requests:
        name = timed.request.request_id
        waits[timed.request.tenant].append((timed.arrival_s, served.joined_s.get(name, served.run.seconds)))
    contended = [
        step
        for step in served.steps
        if all(any(since <= step.began_s < until for since, until in waits[tenant]) for tenant in waits)
    ]
    tokens = dict.fromkeys(waits, 0)
    for step in contended:
        for name, number in step.num_tokens.items():
            tokens[tenant_of[name]] += number
    return jain(tokens.values()) if len(contended) >= min_steps else None


def jain(shares: Iterable[float]) -> float | None:
    """Jain, Chiu and Hawe (1984): 1 when all are equal, 1/n when one has everything; None when all are 0."""
    values = list(shares)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def _percentiles(name: str, samples: Sequence[float]) -> dict[str, float | None]:
    return {f"{name}_p{percent}_s": _rounded(percentile(samples, percent)) for percent in (50, 95, 99)}


def _mean(samples: Sequence[float]) -> float | None:
    return round(sum(samples) / len(samples), 6) if samples else None


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 6)
