"""Measures the service and writes the measurements as Prometheus text. Uses neither Ray nor torch."""

from app.metrics.event_loop import LoopMonitor, LoopSnapshot, task_name
from app.metrics.exposition import CONTENT_TYPE, Scrape, exposition, pieces, replica_metrics
from app.metrics.reports import (
    EngineCounts,
    EngineReport,
    InvalidReport,
    Known,
    Later,
    ProcessCounts,
    ReplicaMetrics,
    decoded,
    encoded,
    sum_counts,
)
from app.metrics.requests import NO_MODEL, CallMetrics, ModelMetrics, RequestMetrics, Snapshot, num_counted

__all__ = [
    "CONTENT_TYPE",
    "NO_MODEL",
    "CallMetrics",
    "EngineCounts",
    "EngineReport",
    "InvalidReport",
    "Known",
    "Later",
    "LoopMonitor",
    "LoopSnapshot",
    "ModelMetrics",
    "ProcessCounts",
    "ReplicaMetrics",
    "RequestMetrics",
    "Scrape",
    "Snapshot",
    "decoded",
    "encoded",
    "exposition",
    "num_counted",
    "pieces",
    "replica_metrics",
    "sum_counts",
    "task_name",
]
