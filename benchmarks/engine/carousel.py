"""Our engine as a contender, stepped in the calling thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from app.engine.engine import Engine
from benchmarks.engine.run import Clock, MonotonicClock, Run, Timeline
from benchmarks.engine.service_figures import StepTrace
from benchmarks.harness.workload import TimedRequest, Workload


class Carousel:
    """Add requests when they arrive (open loop: even if the engine cannot keep up) and step while there is work."""

    def __init__(
        self, engine: Engine, *, trace: StepTrace | None = None, start_clock: Callable[[], Clock] = MonotonicClock
    ) -> None:
        """`trace`: an observer of the engine. The times of the trace and of the run count from one moment."""
        self._engine = engine
        self._trace = trace
        self._start_clock = start_clock

    def serve(self, workload: Workload) -> Run:
        engine = self._engine
        before = engine.stats()
        timelines = {timed.request.request_id: Timeline(timed.arrival_s) for timed in workload.requests}
        arriving = deque(workload.requests)
        clock = self._start_clock()
        if self._trace is not None:
            self._trace.start(engine)
        while arriving or engine.has_work:
            now_s = clock.now()
            while arriving and arriving[0].arrival_s <= now_s:
                timed = arriving.popleft()
                # The deadline counts from the arrival, not from the moment of this loop.
                engine.add(timed.request, arrived_at=engine.now() - (now_s - timed.arrival_s))
            if engine.idle_s != 0.0:  # nothing to do until the next arrival or the strategy's timer
                self._wait(clock, arriving)
                continue
            deltas = engine.step()
            at_s = clock.now()
            for delta in deltas:
                timelines[delta.request_id].deliver(delta.token_ids, at_s=at_s)
                timelines[delta.request_id].has_failed |= delta.error is not None
        seconds = clock.now()
        after = engine.stats()
        return Run(
            seconds=seconds,
            timelines=timelines,
            num_steps=after.total_steps - before.total_steps,
            num_preemptions=after.total_preemptions - before.total_preemptions,
            num_cached_prompt_tokens=after.total_cached_tokens - before.total_cached_tokens,
        )

    def _wait(self, clock: Clock, arriving: deque[TimedRequest]) -> None:
        idle_s, began_at, stats = self._engine.idle_s, self._engine.now(), self._engine.stats()
        due_s = [] if idle_s is None else [clock.now() + idle_s]
        clock.wait_until(min([*due_s, *(timed.arrival_s for timed in list(arriving)[:1])]))
        if self._trace is not None:
            self._trace.waited(began_at, self._engine.now(), stats)

    def forget(self) -> None:
        self._engine.clear_prefix_cache()
