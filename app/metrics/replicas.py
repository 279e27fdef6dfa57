"""What replicas have reported, kept when they are gone: a sum over replicas must not fall because one has left."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from app.engine.stats import EngineMeasurements, EngineStats

# Of one model. Beyond that the oldest is forgotten, which to Prometheus looks like a restart.
MAX_KNOWN = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What one replica says of its engine."""

    replica_id: str
    stats: EngineStats
    measurements: EngineMeasurements
    group: str = ""  # of replicas, where there are several kinds for one model


class KnownReplicas:
    """The last report of every replica of one model. Several of these that tell each other come to know the same."""

    def __init__(self) -> None:
        self._last: dict[str, EngineReport] = {}

    @property
    def last(self) -> Mapping[str, EngineReport]:
        """By the replica's id, for others to learn."""
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
        """Those that are not among these ids."""
        return [report for replica_id, report in self._last.items() if replica_id not in present]
