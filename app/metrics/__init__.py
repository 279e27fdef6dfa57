"""What the service measures of itself, as Prometheus text. No Ray, no torch."""

from app.metrics.event_loop import LoopMonitor, LoopSnapshot, name_task, task_name
from app.metrics.exposition import CONTENT_TYPE, Scrape, exposition
from app.metrics.reports import EngineReport, KnownReports
from app.metrics.requests import NO_MODEL, CallMetrics, ModelMetrics, RequestMetrics, Snapshot, num_counted

__all__ = [
    "CONTENT_TYPE",
    "NO_MODEL",
    "CallMetrics",
    "EngineReport",
    "KnownReports",
    "LoopMonitor",
    "LoopSnapshot",
    "ModelMetrics",
    "RequestMetrics",
    "Scrape",
    "Snapshot",
    "exposition",
    "name_task",
    "num_counted",
    "task_name",
]
