"""Families of Prometheus metrics. Tables define each family once: its kind, name, help, value and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, Literal, TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from app.engine.histogram import Distribution

SourceT = TypeVar("SourceT")
Labels = tuple[str, ...]
_KINDS = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}


@dataclass(frozen=True, slots=True)
class Family(Generic[SourceT]):
    """One family of metrics. `value` returns a source's value: a number, or a Distribution for a histogram.

    If the family declares its own `labels` in addition to the sources' labels, `value` returns a mapping from label
    values (a string for one label, a tuple for several) to numbers.
    """

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    text: str
    value: Callable[[SourceT], Any]
    labels: Labels = ()

    def metric(self, labels: Labels, sources: Iterable[tuple[Labels, SourceT]]) -> Metric:
        """Return the prometheus_client metric. `sources` pairs each source with its values for `labels`."""
        family: Any = _KINDS[self.kind](self.name, self.text, labels=(*labels, *self.labels))
        for values, source in sources:
            for own, value in self._values(source):
                if isinstance(value, Distribution):
                    family.add_metric((*values, *own), buckets=_buckets(value), sum_value=value.total)
                else:
                    family.add_metric((*values, *own), value)
        metric: Metric = family
        return metric

    def _values(self, source: SourceT) -> Iterator[tuple[Labels, Any]]:
        value = self.value(source)
        if not self.labels:
            yield (), value
            return
        for own, number in value.items():
            yield (own,) if isinstance(own, str) else own, number


def metrics_of(
    table: Iterable[Family[SourceT]], labels: Labels, sources: Sequence[tuple[Labels, SourceT]]
) -> Iterator[Metric]:
    """Yield one metric for each family in a table. See `Family.metric`."""
    return (family.metric(labels, sources) for family in table)


def _buckets(spread: Distribution) -> list[tuple[str, float]]:
    bounds = [f"{bound:g}" for bound in spread.bounds]
    return list(zip([*bounds, "+Inf"], accumulate(spread.counts), strict=True))
