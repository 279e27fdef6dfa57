"""How long a process took from its start to its first token."""

from __future__ import annotations

from benchmarks.engine.contender import Contender
from benchmarks.engine.run import Run
from benchmarks.harness.machine import seconds_since_start
from benchmarks.harness.workload import Workload


class FirstTokenWatch:
    """A contender that notes when its first run, the warm-up, delivered its first token."""

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self._has_served = False
        self.start_to_first_token_s: float | None = None

    def serve(self, workload: Workload) -> Run:
        age_s = None if self._has_served else seconds_since_start()
        run = self._contender.serve(workload)
        if age_s is not None:
            first_s = min(timeline.delivered_s[0] for timeline in run.timelines.values() if timeline.delivered_s)
            self.start_to_first_token_s = age_s + first_s
        self._has_served = True
        return run

    def forget(self) -> None:
        self._contender.forget()
