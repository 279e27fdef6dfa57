"""Families of Prometheus metrics, each made of its rows: the values of its labels and a number or a distribution."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from app.engine.histogram import Distribution

Labels = tuple[str, ...]


def gauge(name: str, text: str, labels: Labels, rows: Iterable[tuple[Labels, float]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def counter(name: str, text: str, labels: Labels, rows: Iterable[tuple[Labels, float]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def by_reason(name: str, text: str, label: str, models: Iterable[tuple[str, Mapping[str, float]]]) -> Metric:
    rows = [((model, reason), count) for model, counts in models for reason, count in counts.items()]
    return counter(name, text, ("model_name", label), rows)


def histogram(name: str, text: str, labels: Labels, rows: Iterable[tuple[Labels, Distribution]]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, spread in rows:
        family.add_metric(values, buckets=_buckets(spread), sum_value=spread.total)
    return family


def _buckets(spread: Distribution) -> list[tuple[str, float]]:
    bounds = [f"{bound:g}" for bound in spread.bounds]
    return list(zip([*bounds, "+Inf"], accumulate(spread.counts), strict=True))
