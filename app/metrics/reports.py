"""What other processes report for /metrics. A process's last report is kept when it stops, so that no sum falls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from app.engine.stats import EngineMeasurements, EngineStats
from app.metrics.event_loop import LoopSnapshot

ReportT = TypeVar("ReportT")

# Processes of one kind. Beyond that the oldest report is dropped, which Prometheus takes for a restart.
MAX_KNOWN = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What one replica reports of its engine."""

    replica_id: str
    stats: EngineStats
    measurements: EngineMeasurements
    group: str = ""  # of an A/B trial that the replica belongs to
    loop: LoopSnapshot | None = None  # the replica's, beside the engine's thread


class KnownReports(Generic[ReportT]):
    """The last report of every process of one kind. Instances that learn from each other end up with the same."""

    def __init__(self, num_counted: Callable[[ReportT], int]) -> None:
        """`num_counted` tells the later of two reports of one process: it only ever grows."""
        self._num_counted = num_counted
        self._last: dict[str, ReportT] = {}

    def counts(self) -> dict[str, int]:
        """How much each report counts, by the process's id."""
        return {name: self._num_counted(report) for name, report in self._last.items()}

    def beyond(self, counts: Mapping[str, int]) -> dict[str, ReportT]:
        """The reports that count more than these, for another instance to learn."""
        return {name: each for name, each in self._last.items() if self._num_counted(each) > counts.get(name, -1)}

    def learn(self, reports: Mapping[str, ReportT]) -> None:
        """Keep the later of two reports of the same process."""
        for name, report in reports.items():
            known = self._last.get(name)
            if known is None or self._num_counted(known) <= self._num_counted(report):
                self._last[name] = report
        while len(self._last) > MAX_KNOWN:
            del self._last[next(iter(self._last))]

    def gone(self, present: Collection[str]) -> list[ReportT]:
        """The reports of processes that are not among these ids."""
        return [report for name, report in self._last.items() if name not in present]
