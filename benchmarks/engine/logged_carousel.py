"""Our engine as a contender that keeps a step log, the times in which it waits included."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from app.engine.engine import Engine
from benchmarks.engine.carousel import Carousel
from benchmarks.engine.run import Run
from benchmarks.engine.step_trace import StepTrace
from benchmarks.harness.clock import Clock, MonotonicClock
from benchmarks.harness.workload import TimedRequest, Workload


class LoggedCarousel(Carousel):
    """Serves one workload; the log's times and the run's count from the same moment."""

    def __init__(self, engine: Engine, log: StepTrace, *, start_clock: Callable[[], Clock] = MonotonicClock) -> None:
        super().__init__(engine, start_clock=start_clock)
        log.stats = engine.stats
        self._log = log

    def serve(self, workload: Workload) -> Run:
        self._log.start()
        return super().serve(workload)

    def _wait(self, clock: Clock, arriving: deque[TimedRequest]) -> None:
        end = self._log.begin()
        super()._wait(clock, arriving)
        end()
