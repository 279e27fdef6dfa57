"""The trace of steps: the requests computed, those that waited, the use of the slots."""

from __future__ import annotations

from typing import Any

import pytest

from app.engine.batch import StepBatch, StepResult
from benchmarks.engine.carousel import LoggedCarousel
from benchmarks.engine.run import Run
from benchmarks.engine.step_trace import LoggedRunner, Step, StepTrace
from benchmarks.harness.workload import TimedRequest, Workload
from tests.fakes import CountingRunner, FakeClock, TimedRunner, build_fake_engine, make_request

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
    log = StepTrace(clock)
    runner = LoggedRunner(TimedRunner(clock, step_s=STEP_S), log)
    engine = build_fake_engine(runner=runner, clock=clock, **scheduler)
    return LoggedCarousel(engine, log, start_clock=lambda: ToldClock(clock)).serve(work), log


def test_every_step_is_logged_with_its_tokens_and_its_time() -> None:
    run, log = serve(workload(3, 2))
    assert [dict(step.num_tokens) for step in log.steps] == [{"r0": 3, "r1": 3}, {"r0": 1, "r1": 1}, {"r0": 1}]
    assert [step.seconds for step in log.steps] == pytest.approx([STEP_S] * 3)
    assert run.num_steps == 3
    assert log.mean_running() == pytest.approx(5 / 3)


def test_static_batches_leave_slots_empty_while_others_wait_and_continuous_does_not() -> None:
    work = workload(1, 4, 1, 1)
    _, static = serve(work, strategy={"name": "static", "batch_size": 2}, max_running=2)
    _, continuous = serve(work, max_running=2)
    # Static: for three of five steps one of two slots is empty and two requests wait.
    assert static.bubble_share(2) == pytest.approx(3 / 10)
    assert continuous.bubble_share(2) == 0


def test_waiting_for_a_timer_counts_as_empty_slots_and_waiting_for_an_arrival_does_not() -> None:
    strategy = {"name": "static", "batch_size": 2, "max_wait_ms": 30}
    _, timer = serve(workload(1), strategy=strategy)
    assert [step.seconds for step in timer.steps] == pytest.approx([0.03, STEP_S])
    assert timer.bubble_share(8) == pytest.approx(0.75)
    _, arrival = serve(workload(1, 1, arrivals_s=(0, 1)))
    assert arrival.bubble_share(8) == 0


def test_a_request_joins_in_its_first_step() -> None:
    _, log = serve(workload(2, 2), max_running=1)
    assert log.joined_s() == pytest.approx({"r0": 0, "r1": 2 * STEP_S})


def test_a_log_without_steps_has_no_shares() -> None:
    log = StepTrace(FakeClock())
    assert log.bubble_share(4) is None
    assert log.mean_running() is None


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

    def launch(self, batch: StepBatch) -> _Launched:
        return _Launched(self._clock, StepResult([2] * len(batch.sampled)))


def test_steps_that_are_launched_ahead_follow_each_other_without_overlap() -> None:
    clock = FakeClock()
    log = StepTrace(clock)
    engine = build_fake_engine(runner=LoggedRunner(LaunchingRunner(clock), log), clock=clock)
    LoggedCarousel(engine, log, start_clock=lambda: ToldClock(clock)).serve(workload(3))
    assert [(step.began_s, step.ended_s) for step in log.steps] == [
        pytest.approx((number * STEP_S, (number + 1) * STEP_S)) for number in range(3)
    ]


def test_a_step_knows_its_length() -> None:
    step = Step(began_s=1, ended_s=1.5, num_tokens={}, num_running=0, num_waiting=0)
    assert step.seconds == 0.5
