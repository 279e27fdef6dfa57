"""A simulated hour of arrivals under rules for the number of replicas."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import ModuleType

import pytest

from deployments.plan.traces import Trace
from tests.deployments.plan.measured import measured_replica, step_cost, trace_of

# Half a minute of work in each second, for ten minutes; then a request a minute.
BUSY = trace_of(*((float(second), 100, 100) for second in range(600) for _ in range(3)))
QUIET = trace_of(*((600.0 + 60 * minute, 100, 20) for minute in range(1, 50)))
HOUR = Trace("hour", (*BUSY.requests, *QUIET.requests))
MEASURED = replace(measured_replica(step_cost(0.050, 0.003), num_blocks=2000), model="models/demo")


@pytest.fixture(scope="module")
def scaling_day() -> ModuleType:
    """Imported when a test runs: tests of deployments first set the environment that Ray reads when it is imported."""
    return importlib.import_module("benchmarks.service.scaling_day")


@pytest.mark.parametrize("rule", ["target_s 4, our delays", "target_ongoing_requests 8, our delays"])
def test_replicas_come_with_the_load_and_go_with_it(rule: str, scaling_day: ModuleType) -> None:
    def figures(max_replicas: int, start_s: float) -> dict[str, float]:
        found = scaling_day.measure(
            MEASURED, HOUR, night=1.0, noon=1.0, hours=[0], max_replicas=max_replicas, start_s=start_s, late_s=10.0,
            seed=1, only=rule,
        )  # fmt: skip
        [(name, values)] = [(name, values) for name, values in found.items() if rule in name]
        assert found["requests"] == len(HOUR.requests), name
        return dict(values)

    alone, quick, slow = figures(1, 30.0), figures(8, 30.0), figures(8, 300.0)
    assert (alone["most"], alone["starts"]) == (1, 0)
    assert alone["replica_hours"] == pytest.approx(1.0, abs=0.1)
    assert quick["most"] > 2, "they came"
    assert quick["replica_hours"] < 0.6 * quick["most"], "they went"
    assert quick["late"] < slow["late"] < alone["late"]


def test_a_day_has_most_of_its_requests_at_noon(scaling_day: ModuleType) -> None:
    day = scaling_day.day_of(trace_of(*((float(second), 1, 1) for second in range(0, 3600, 10))), night=0.1, noon=0.9,
                 hours=range(24), seed=1)  # fmt: skip
    by_hour = [sum(hour * 3600 <= each.arrival_s < (hour + 1) * 3600 for each in day.requests) for hour in range(24)]
    assert [each.arrival_s for each in day.requests] == sorted(each.arrival_s for each in day.requests)
    assert max(by_hour) in by_hour[14:18]
    assert min(by_hour) in by_hour[2:6]
    assert sum(by_hour) == pytest.approx(24 * 360 * 0.5, rel=0.05)
