"""What other processes report for /metrics. A replica's last report is kept when it stops, so that no sum falls."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from app.engine.stats import EngineMeasurements, EngineStats
from app.metrics.event_loop import LoopSnapshot

# Replicas of one model. Beyond that the oldest report is dropped, which Prometheus takes for a restart.
MAX_KNOWN = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What one replica reports of its engine."""

    replica_id: str
    stats: EngineStats
    measurements: EngineMeasurements
    group: str = ""  # of an A/B trial that the replica belongs to
    loop: LoopSnapshot | None = None  # the replica's, beside the engine's thread


class KnownReplicas:
    """The last report of every replica of one model. Instances that learn from each other end up with the same."""

    def __init__(self) -> None:
        self._last: dict[str, EngineReport] = {}

    @property
    def last(self) -> Mapping[str, EngineReport]:
        """By the replica's id, for other ingresses to learn."""
        return self._last

    def learn(self, reports: Iterable[EngineReport]) -> None:
        """Keep the later of two reports of the same replica: an engine only ever counts upwards."""
        for report in reports:
            known = self._last.get(report.replica_id)
            if known is None or known.stats.total_steps <= report.stats.total_steps:
                self._last[report.replica_id] = report
        while len(self._last) > MAX_KNOWN:
            del self._last[next(iter(self._last))]

    def gone(self, present: Collection[str]) -> list[EngineReport]:
        """The reports of replicas that are not among these ids."""
        return [report for replica_id, report in self._last.items() if replica_id not in present]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCounts:
    """What the process of batches has counted since it opened its folder; the last two are of this moment."""

    num_lines_completed: int
    num_lines_failed: int
    num_webhook_attempts: int
    num_webhooks_delivered: int
    num_webhooks_given_up: int
    num_webhooks_pending: int
    num_paused: int  # batches that wait for their storage
