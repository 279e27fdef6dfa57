"""Trace a run step by step and compute its figures: speed, waiting, use of slots, fairness between tenants, goodput."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from app.engine.batch import StepBatch
from app.engine.engine import Engine
from app.engine.observer import EndedStep, StepObserver
from app.engine.sequence import EngineSequence
from app.engine.stats import EngineStats
from app.engine.trace.entries import FailureKind
from benchmarks.engine.run import Run
from benchmarks.harness.figures import percentile, rounded
from benchmarks.harness.timeline import Slo, times_of
from benchmarks.harness.workload import Workload

MIN_CONTENDED_STEPS = 50  # in fewer steps, the shares are random


@dataclass(frozen=True, slots=True)
class Step:
    """One step, or (without requests) a time in which the engine waited. Times are in seconds after the start."""

    began_s: float
    ended_s: float
    num_tokens: Mapping[str, int]  # tokens computed in this step, by request id
    num_running: int  # requests with a slot, including idle ones
    num_waiting: int  # requests without a slot

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


class StepTrace(StepObserver):
    """All steps of one run, in order, recorded as the engine's observer."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._start_s = 0.0
        self._stats: Callable[[], EngineStats] | None = None
        self._held: deque[tuple[int, int]] = deque()  # running and waiting, of steps that have not ended

    def start(self, engine: Engine) -> None:
        """Start the trace: the run of this engine begins now."""
        self._start_s, self._stats = engine.now(), engine.stats

    def scheduled(self, batch: StepBatch) -> None:
        assert self._stats is not None, "started before the first step"
        if batch.scheduled:
            self._held.append((self._stats().num_running, batch.decision.num_waiting))

    def failed(self, how: FailureKind, sequences: Iterable[EngineSequence] = ()) -> None:
        self._held.clear()

    def step_ended(self, step: EndedStep) -> None:
        if self._held and step.batch.scheduled:
            num_running, num_waiting = self._held.popleft()
            num_tokens = {item.request_id: len(item.token_ids) for item in step.batch.scheduled}
            self._add(step.at - step.seconds, step.at, num_tokens, num_running, num_waiting)

    def waited(self, began_at: float, ended_at: float, stats: EngineStats) -> None:
        """Record that the engine had nothing to do between these times of its clock."""
        self._add(began_at, ended_at, {}, stats.num_running, stats.num_waiting)

    def _add(
        self, began_at: float, ended_at: float, num_tokens: Mapping[str, int], num_running: int, num_waiting: int
    ) -> None:
        # A step that was launched ahead begins when the previous step is done.
        began_s = max(began_at - self._start_s, self.steps[-1].ended_s if self.steps else 0.0)
        ended_s = max(began_s, ended_at - self._start_s)
        self.steps.append(Step(began_s, ended_s, num_tokens, num_running, num_waiting))

    def joined_s(self) -> dict[str, float]:
        """Return the time at which each request was first computed."""
        joined: dict[str, float] = {}
        for step in self.steps:
            for request_id in step.num_tokens:
                joined.setdefault(request_id, step.began_s)
        return joined

    def bubble_share(self, num_slots: int) -> float | None:
        """Return the share of slot time that was empty while requests waited; None without steps."""
        whole_s = sum(step.seconds for step in self.steps) * num_slots
        empty_s = sum(step.seconds * max(0, num_slots - step.num_running) for step in self.steps if step.num_waiting)
        return empty_s / whole_s if whole_s else None

    def mean_running(self) -> float | None:
        """Return the mean number of requests computed in a step."""
        sizes = [len(step.num_tokens) for step in self.steps if step.num_tokens]
        return sum(sizes) / len(sizes) if sizes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A run with the figures of its trace. A figure is None if the engine does not report it."""

    run: Run
    joined_s: Mapping[str, float]  # when each request was first computed, by request id
    bubble_share: float | None = None  # share of slot time that was empty while requests waited
    mean_running: float | None = None  # requests in a step
    steps: Sequence[Step] = ()


def service_figures(workload: Workload, served: Served, slo: Slo | None) -> dict[str, Any]:
    """Return the figures. Times are in seconds from the arrival of answered requests; shares are from 0 to 1."""
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
    """Return Jain's index over the tokens of each tenant, in steps with waiting requests of every tenant.

    The index would say nothing over a whole run, because all requests are served in the end. Returns None if there are
    fewer such steps than `min_steps`.
    """
    tenant_of = {timed.request.request_id: timed.request.tenant for timed in workload.requests}
    if len(set(tenant_of.values())) < 2:
        return None
    waits: dict[str, list[tuple[float, float]]] = defaultdict(list)  # by tenant: from arrival to first step
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
