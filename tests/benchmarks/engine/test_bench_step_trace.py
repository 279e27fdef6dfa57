"""The trace of steps: the requests computed, those that waited, the use of the slots."""

from __future__ import annotations

from typing import Any

import pytest

from app.engine.batch import StepBatch, StepResult
from benchmarks.engine.carousel import Carousel
from benchmarks.engine.run import Run
from benchmarks.engine.step_trace import StepTrace
from benchmarks.harness.workload import TimedRequest, Workload
from tests.kit.engine import CountingRunner, FakeClock, TimedRunner, build_fake_engine, make_request

STEP_S = 0.01


class ToldClock:
    """A benchmark's clock on the time of a FakeClock."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self._start = clock.at

    def now(self) -> float:
        return self._clock.at - self._start

    def wait_until(self, at_s: float) -> None:
        self._clock.at = max(self._clock.at, self._start + at_s)


def workload(*max_tokens: int, arrivals_s: tuple[float, ...] = ()) -> Workload:
    times = arrivals_s or (0.0,) * len(max_tokens)
    return Workload(
        tuple(
            TimedRequest(request=make_request(request_id=f"r{number}", max_tokens=length), arrival_s=at_s)
            for number, (length, at_s) in enumerate(zip(max_tokens, times, strict=True))
        )
    )


def serve(work: Workload, **scheduler: Any) -> tuple[Run, StepTrace]:
    clock = FakeClock()
    trace = StepTrace()
    engine = build_fake_engine(runner=TimedRunner(clock, step_s=STEP_S), clock=clock, recorder=trace, **scheduler)
    return Carousel(engine, trace=trace, start_clock=lambda: ToldClock(clock)).serve(work), trace


def test_static_batches_leave_slots_empty_while_others_wait_and_continuous_does_not() -> None:
    work = workload(1, 4, 1, 1)
    _, static = serve(work, strategy={"name": "static", "batch_size": 2}, max_running=2)
    _, continuous = serve(work, max_running=2)
    # Static: for three of five steps one of two slots is empty and two requests wait.
    assert static.bubble_share(2) == pytest.approx(3 / 10)
    assert continuous.bubble_share(2) == 0


class _Launched:
    def __init__(self, clock: FakeClock, result: StepResult) -> None:
        self._clock, self._result = clock, result

    def draw(self, batch: StepBatch) -> None:
        raise AssertionError("no draw here looks back")

    def result(self) -> StepResult:
        self._clock.advance(STEP_S)
        return self._result


class LaunchingRunner(CountingRunner):
    """Launches steps, and computes each when its result is asked for."""

    launches = True

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def prepare(self) -> None:
        pass

    def launch(self, batch: StepBatch) -> _Launched:
        return _Launched(self._clock, StepResult([2] * len(batch.sampled)))


def test_steps_that_are_launched_ahead_follow_each_other_without_overlap() -> None:
    clock = FakeClock()
    trace = StepTrace()
    engine = build_fake_engine(runner=LaunchingRunner(clock), clock=clock, recorder=trace)
    Carousel(engine, trace=trace, start_clock=lambda: ToldClock(clock)).serve(workload(3))
    assert [(step.began_s, step.ended_s) for step in trace.steps] == [
        pytest.approx((number * STEP_S, (number + 1) * STEP_S)) for number in range(3)
    ]
