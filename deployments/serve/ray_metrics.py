"""Exports metrics under vLLM's names through `ray.util.metrics`, for the LLM board of Ray's dashboard.

The board joins these metrics with Serve's by process. Each process therefore exports only its own metrics: an ingress
exports request metrics, and a replica exports its engine's metrics.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample
from ray.util import metrics as ray_metrics

from app.errors import described
from app.metrics import EngineCounts, EngineReport, RequestMetrics, Snapshot
from app.metrics.reports import counts_of, gauges_of
from app.metrics.vllm_names import ModelReport, vllm_families

logger = logging.getLogger(__name__)

_EVERY_S = 10.0  # Ray's agents export with the same period
# The metrics on Ray's board, except those with a value per token or step, because each value costs a call to Ray.
_OF_REQUESTS = (
    "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:request_success", "vllm:time_to_first_token_seconds",
    "vllm:request_time_per_output_token_seconds", "vllm:e2e_request_latency_seconds", "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens", "vllm:request_decode_time_seconds",
)  # fmt: skip
_OF_ENGINES = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits", "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds",
)  # fmt: skip


def families_of_requests(requests: Snapshot) -> list[Metric]:
    """Return the metric families that an ingress exports."""
    reports = [ModelReport(name, model, (), EngineCounts()) for name, model in requests.items()]
    return [each for each in vllm_families(reports) if each.name in _OF_REQUESTS]


def families_of_engine(model_name: str, report: EngineReport) -> list[Metric]:
    """Return the metric families that a replica exports for its engine."""
    no_requests = RequestMetrics([model_name]).snapshot()[model_name]
    reports = [ModelReport(model_name, no_requests, [gauges_of(report)], counts_of(report))]
    return [each for each in vllm_families(reports) if each.name in _OF_ENGINES]


@dataclass(frozen=True, slots=True)
class ValueBucket:
    """The number of a histogram's values in the range (lower, upper]."""

    lower: float
    upper: float
    count: float


class RayMetrics:
    """Exports metrics to Ray. Stores the last exported values, because Ray's counters require differences."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        """`families` returns the process's metric families, with counts since the process started."""
        self._families = families
        self._handed: dict[tuple[str, tuple[str, ...]], float] = {}  # last exported value, by sample name and labels
        self._made: dict[str, Any] = {}  # Ray's metrics, by name

    async def export_forever(self) -> None:
        """Call `hand_over` every ten seconds. Logs errors, and never returns."""
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                await self.hand_over()
            except Exception as error:  # requests work without these metrics
                logger.warning("metrics could not be exported to Ray: %s", described(error))

    async def hand_over(self) -> None:
        """Export the new values, with one call to Ray for each. Other tasks can run between two families."""
        for family in self._families():
            self._hand_over(family)
            await asyncio.sleep(0)

    def _hand_over(self, family: Metric) -> None:
        name = family.name.replace(":", "_")
        if family.type == "gauge":
            for sample in family.samples:
                self._metric(ray_metrics.Gauge, name, sample.labels).set(sample.value, tags=sample.labels)
        elif family.type == "counter":
            for sample in family.samples:
                self._count(name, sample)
        else:
            for labels, buckets, total in self._new_values(family):
                self._observe(name, labels, buckets, total)

    def _metric(self, kind: type, name: str, labels: dict[str, str], **more: Any) -> Any:
        if name not in self._made:
            self._made[name] = kind(name, tag_keys=tuple(labels), **more)
        return self._made[name]

    def _new(self, sample: Sample) -> float:
        key = sample.name, tuple(sample.labels.values())
        before = self._handed.get(key, 0.0)
        self._handed[key] = sample.value
        return float(sample.value - before)

    def _count(self, name: str, sample: Sample) -> None:
        metric, new = self._metric(ray_metrics.Counter, name, sample.labels), self._new(sample)
        if new > 0:
            metric.inc(new, tags=sample.labels)

    def _new_values(self, family: Metric) -> Iterator[tuple[dict[str, str], list[ValueBucket], float]]:
        """Yield (labels, new bucket counts, new sum) for each histogram. Its samples are buckets, count and sum."""
        buckets: list[ValueBucket] = []
        lower = below = 0.0
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                labels = {name: value for name, value in sample.labels.items() if name != "le"}
                upper, new = float(sample.labels["le"]), self._new(sample)
                buckets.append(ValueBucket(lower, upper, new - below))
                lower, below = upper, new
            elif sample.name.endswith("_sum"):
                yield labels, buckets, self._new(sample)
                buckets, lower, below = [], 0.0, 0.0

    def _observe(self, name: str, labels: dict[str, str], buckets: Sequence[ValueBucket], total: float) -> None:
        bounds = [each.upper for each in buckets[:-1]]
        metric = self._metric(ray_metrics.Histogram, name, labels, boundaries=bounds)
        for value, count in representatives(buckets, total):
            for _ in range(round(count)):
                metric.observe(value, tags=labels)


def representatives(buckets: Sequence[ValueBucket], total: float) -> list[tuple[float, float]]:
    """Return (value, count) pairs that reproduce the bucket counts and, if the buckets allow it, the sum.

    All values are at the same share of their bucket's width. The last bucket is assumed to end at twice its start.
    """
    filled = [each for each in buckets if each.count]
    least = sum(each.count * each.lower for each in filled)
    width = sum(each.count * _width(each) for each in filled)
    share = min(1.0, max(0.0, (total - least) / width)) if width else 0.0
    # A value equal to the lower bound would belong to the previous bucket.
    return [(each.lower + max(share, 1e-6) * _width(each), each.count) for each in filled]


def _width(bucket: ValueBucket) -> float:
    return bucket.upper - bucket.lower if bucket.upper != float("inf") else max(bucket.lower, 1.0)
