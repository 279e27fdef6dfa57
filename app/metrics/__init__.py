"""What the service measures of itself, and how it tells it: Prometheus text. No Ray, no torch."""

from app.metrics.batches import BatchCounts
from app.metrics.exposition import CONTENT_TYPE, Scrape, exposition
from app.metrics.replicas import EngineReport, KnownReplicas
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
