"""What a run comes to: the use of the slots, goodput, fairness between tenants."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engine.carousel import Carousel
from benchmarks.engine.run import Run, Timeline
from benchmarks.engine.service_figures import Served, Step, StepTrace, jain, jain_over_tenants, service_figures
from benchmarks.harness.timeline import Slo
from benchmarks.harness.workload import TimedRequest, Workload
from tests.engine.test_steps_in_flight import LateRunner
from tests.kit.engine import FakeClock, TimedRunner, build_fake_engine, make_request

STEP_S = 0.01  # of these runners


def timeline(arrival_s: float, *delivered_s: float, has_failed: bool = False) -> Timeline:
    made = Timeline(arrival_s, has_failed=has_failed)
    for at_s in delivered_s:
        made.deliver((7,), at_s=at_s)
    return made


def workload(**tenants: str) -> Workload:
    return Workload(
        tuple(TimedRequest(request=make_request(request_id=name, tenant=tenant)) for name, tenant in tenants.items())
    )


WORKLOAD = workload(a="", b="", c="")
SERVED = Served(
    run=Run(
        seconds=10,
        timelines={"a": timeline(0, 1, 2), "b": timeline(0, 4, 9), "c": timeline(0, has_failed=True)},
        num_steps=5,
        num_preemptions=1,
    ),
    joined_s={"a": 0.5, "b": 3.0},
    bubble_share=0.25,
)


@pytest.mark.parametrize(
    ("promise", "share"),
    [
        (Slo(latency_s=9), 0.6667),
        (Slo(latency_s=8.9), 0.3333),
        (Slo(ttft_s=1), 0.3333),
        (Slo(ttft_s=0.9, latency_s=100), 0),
    ],
)
def test_goodput_counts_every_request_and_a_failed_one_as_a_broken_promise(promise: Slo, share: float) -> None:
    found = service_figures(WORKLOAD, SERVED, promise)
    assert found["slo_share"] == share
    assert found["slo_requests_per_s"] == pytest.approx(share * 3 / 10, abs=1e-4)


def step(began_s: float, **num_tokens: int) -> Step:
    return Step(began_s, began_s + 1, num_tokens, num_running=1, num_waiting=1)


def test_fairness_is_looked_at_only_while_every_tenant_waits() -> None:
    work = workload(a="x", b="x", c="y", d="y")
    steps = [step(0, a=30, c=10), step(1, a=30, c=10), step(2, b=500)]
    run = Run(seconds=9, timelines={name: timeline(0, 9) for name in "abcd"})
    served = Served(run=run, joined_s={"a": 0, "b": 2, "c": 0, "d": 5}, steps=steps)
    assert jain_over_tenants(work, served, min_steps=2) == pytest.approx(jain([60, 20]))
    assert jain_over_tenants(work, served, min_steps=3) is None
    assert jain_over_tenants(workload(a="x", b="x"), served, min_steps=0) is None


@given(st.lists(st.integers(0, 1000), min_size=1))
def test_jains_index_lies_between_one_taker_and_equal_shares(shares: list[int]) -> None:
    found = jain(shares)
    if not any(shares):
        assert found is None
    else:
        assert found is not None
        assert 1 / len(shares) - 1e-9 <= found <= 1 + 1e-9


class ToldClock:
    """A benchmark's clock on the time of a FakeClock."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self._start = clock.at

    def now(self) -> float:
        return self._clock.at - self._start

    def wait_until(self, at_s: float) -> None:
        self._clock.at = max(self._clock.at, self._start + at_s)


def traced(*max_tokens: int, runner_class: type[TimedRunner] = TimedRunner, **scheduler: Any) -> StepTrace:
    """Of requests that all come at once."""
    clock, trace = FakeClock(), StepTrace()
    engine = build_fake_engine(runner=runner_class(clock), clock=clock, recorder=trace, **scheduler)
    work = Workload(tuple(TimedRequest(request=make_request(max_tokens=length)) for length in max_tokens))
    Carousel(engine, trace=trace, start_clock=lambda: ToldClock(clock)).serve(work)
    return trace


def test_static_batches_leave_slots_empty_while_others_wait_and_continuous_does_not() -> None:
    # Static: for three of five steps one of two slots is empty and two requests wait.
    static = traced(1, 4, 1, 1, strategy="static", max_running=2)
    assert static.bubble_share(2) == pytest.approx(3 / 10)
    assert traced(1, 4, 1, 1, max_running=2).bubble_share(2) == 0


def test_steps_that_are_launched_ahead_follow_each_other_without_overlap() -> None:
    assert [(step.began_s, step.ended_s) for step in traced(3, runner_class=LateRunner).steps] == [
        pytest.approx((number * STEP_S, (number + 1) * STEP_S)) for number in range(3)
    ]
