"""The figures of a run: speed, waiting, use of the slots, fairness between tenants, share within a service level."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.engine.run import Run
from benchmarks.engine.step_trace import Step
from benchmarks.harness.figures import percentile, rounded
from benchmarks.harness.timeline import Slo, times_of
from benchmarks.harness.workload import Workload

MIN_CONTENDED_STEPS = 50  # in fewer, shares are chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A run, and what was seen of it from inside. None where the engine does not report it."""

    run: Run
    joined_s: Mapping[str, float]  # when each request was first computed, by request id
    bubble_share: float | None = None  # slot time held by nothing while requests waited
    mean_running: float | None = None  # requests in a step
    steps: Sequence[Step] = ()


def service_figures(workload: Workload, served: Served, slo: Slo | None) -> dict[str, Any]:
    """Times are of the requests that were answered, in seconds from their arrival; shares are from 0 to 1."""
    run = served.run
    answered = {name: timeline for name, timeline in run.timelines.items() if not timeline.has_failed}
    latencies = [timeline.latency_s for timeline in answered.values()]
    waits = [served.joined_s[name] - timeline.arrival_s for name, timeline in answered.items()]
    kept = [one for one in answered.values() if slo is not None and slo.is_kept(one, len(one.token_ids))]
    return {
        "seconds": round(run.seconds, 4),
        "num_requests": len(run.timelines),
        "num_failed": len(run.timelines) - len(answered),  # refused, expired or ended by an error
        "num_output_tokens": run.num_output_tokens,
        "output_tokens_per_s": round(run.num_output_tokens / run.seconds, 2),
        "requests_per_s": round(len(answered) / run.seconds, 4),
        **times_of(run.answered),
        "latency_mean_s": round(fmean(latencies), 6) if latencies else None,
        "queue_wait_mean_s": round(fmean(waits), 6) if waits else None,
        "queue_wait_p99_s": rounded(percentile(waits, 99)),
        "queue_wait_longest_s": rounded(max(waits, default=None)),
        "bubble_share": rounded(served.bubble_share),
        "mean_running": rounded(served.mean_running),
        "num_steps": run.num_steps,
        "preemptions": run.num_preemptions,
        "jain_index": rounded(jain_over_tenants(workload, served)),
        "slo_share": None if slo is None else round(len(kept) / len(run.timelines), 4),  # of all requests
        "slo_requests_per_s": None if slo is None else round(len(kept) / run.seconds, 4),
    }


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
