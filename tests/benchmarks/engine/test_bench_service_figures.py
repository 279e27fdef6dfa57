"""What a run comes to: waits, promises, fairness between tenants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engine.run import Run, Timeline
from benchmarks.engine.service_figures import Promise, Served, jain, jain_over_tenants, service_figures
from benchmarks.engine.step_trace import Step
from benchmarks.harness.workload import TimedRequest, Workload
from tests.fakes import make_request


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


def test_times_are_those_of_the_answered_and_waits_end_with_the_first_step() -> None:
    found = service_figures(WORKLOAD, SERVED, None)
    assert (found["num_requests"], found["num_failed"]) == (3, 1)
    assert (found["requests_per_s"], found["output_tokens_per_s"]) == (0.2, 0.4)
    assert (found["latency_mean_s"], found["latency_p50_s"]) == (5.5, 5.5)
    assert (found["queue_wait_mean_s"], found["queue_wait_longest_s"]) == (1.75, 3.0)
    assert found["itl_p50_s"] == 3
    assert (found["bubble_share"], found["preemptions"]) == (0.25, 1)
    assert (found["slo_share"], found["jain_index"]) == (None, None)


@pytest.mark.parametrize(
    ("promise", "share"),
    [
        (Promise(latency_s=9), 0.6667),
        (Promise(latency_s=8.9), 0.3333),
        (Promise(ttft_s=1), 0.3333),
        (Promise(ttft_s=0.9, latency_s=100), 0),
    ],
)
def test_goodput_counts_every_request_and_a_failed_one_as_a_broken_promise(promise: Promise, share: float) -> None:
    found = service_figures(WORKLOAD, SERVED, promise)
    assert found["slo_share"] == share
    assert found["slo_requests_per_s"] == pytest.approx(share * 3 / 10, abs=1e-4)


def test_an_engine_that_does_not_stream_has_no_first_token_but_a_latency() -> None:
    run = Run(seconds=2, timelines={"a": timeline(0, 2)}, streams=False)
    found = service_figures(workload(a=""), Served(run=run, joined_s={"a": 0}), None)
    assert (found["ttft_p50_s"], found["itl_p50_s"], found["latency_p50_s"]) == (None, None, 2)


def step(began_s: float, **num_tokens: int) -> Step:
    return Step(began_s=began_s, ended_s=began_s + 1, num_tokens=num_tokens, num_running=1, num_waiting=1)


def test_fairness_is_looked_at_only_while_every_tenant_waits() -> None:
    work = workload(a="x", b="x", c="y", d="y")
    steps = [step(0, a=30, c=10), step(1, a=30, c=10), step(2, b=500)]
    run = Run(seconds=9, timelines={name: timeline(0, 9) for name in "abcd"})
    served = Served(run=run, joined_s={"a": 0, "b": 2, "c": 0, "d": 5}, steps=steps)
    assert jain_over_tenants(work, served, min_steps=2) == pytest.approx(jain([60, 20]))
    assert jain_over_tenants(work, served, min_steps=3) is None
    assert jain_over_tenants(workload(a="x", b="x"), served, min_steps=0) is None


def test_without_contention_there_is_no_index() -> None:
    run = Run(seconds=1, timelines={"a": timeline(0, 1), "b": timeline(0, 1)})
    served = Served(run=run, joined_s={"a": 0, "b": 0}, steps=[step(0, a=1, b=1)])
    assert jain_over_tenants(workload(a="x", b="y"), served, min_steps=0) is None


@given(st.lists(st.integers(0, 1000), min_size=1))
def test_jains_index_lies_between_one_taker_and_equal_shares(shares: list[int]) -> None:
    found = jain(shares)
    if not any(shares):
        assert found is None
    else:
        assert found is not None
        assert 1 / len(shares) - 1e-9 <= found <= 1 + 1e-9


def test_jains_index_of_equal_shares_is_one() -> None:
    assert jain([3, 3, 3]) == pytest.approx(1)
    assert jain([5, 0]) == pytest.approx(0.5)
