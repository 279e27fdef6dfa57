"""What a run comes to: waits, promises, fairness between tenants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engine.run import Run, Timeline
from benchmarks.engine.service_figures import Served, jain, jain_over_tenants, service_figures
from benchmarks.engine.step_trace import Step
from benchmarks.harness.timeline import Slo
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
