"""The planner's error: one row on a real engine, and the word of queueing theory."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.service import plan_error
from tests.deployments.plan.measured import measured_replica, trace_of


def test_a_row_is_predicted_and_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_error, "_NUM_ALONE", 3)
    measured_replica().write(tmp_path / "costs.json")
    assert plan_error.main(["--costs", str(tmp_path / "costs.json"), "--rows", "1", "--seconds", "1"]) == 0
    shown = capsys.readouterr().out
    assert "1 engine conv continuous x1 0.3" in shown
    [row] = json.loads(shown.splitlines()[-1])["rows"]
    assert row["num_requests"] >= 20
    assert set(row["errors"]) == {"tokens_per_s", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99"}
    predicted, measured = row["predicted"], row["measured"]
    assert 0.010 <= predicted["itl_p50"] < 0.020, "by the costs of a step, not by how fast this machine is"
    assert 0 < measured["itl_p50"] != predicted["itl_p50"]
    for name, error in row["errors"].items():
        assert predicted[name] == pytest.approx((1 + error) * measured[name])


def test_theory_says_the_service_time_at_low_loads_and_never_when_overloaded() -> None:
    trace = trace_of(*((0.1 * number, 10, 20) for number in range(100)))
    assert plan_error.latency_by_theory(trace, num_slots=32, full_rate=1000.0) == pytest.approx(0.032, rel=0.01)
    assert plan_error.latency_by_theory(trace, num_slots=1, full_rate=11.0) > 5 / 11
    assert math.isinf(plan_error.latency_by_theory(trace, num_slots=32, full_rate=9.0))
