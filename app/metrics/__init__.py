"""What the service measures of itself, as Prometheus text. No Ray, no torch."""

from app.metrics.exposition import CONTENT_TYPE, Scrape, exposition
from app.metrics.reports import BatchCounts, EngineReport, KnownReplicas
from app.metrics.requests import NO_MODEL, CallMetrics, ModelMetrics, RequestMetrics, Snapshot

__all__ = [
    "CONTENT_TYPE",
    "NO_MODEL",
    "BatchCounts",
    "CallMetrics",
    "EngineReport",
    "KnownReplicas",
    "ModelMetrics",
    "RequestMetrics",
    "Scrape",
    "Snapshot",
    "exposition",
]
