"""The planner's error: one row on one simulated engine behind the real API."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.http_call import Target
from benchmarks.harness.service import Service
from benchmarks.service import plan_error
from tests.benchmarks.conftest import Figures
from tests.benchmarks.servers import simulated_service
from tests.deployments.plan.measured import measured_replica


def test_a_row_is_predicted_and_served(
    demo_path: Path, tmp_path: Path, figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def service(application: Mapping[str, Any]) -> Iterator[Service]:
        [model] = application["models"]
        assert model["engine"]["model"]["simulated"]["step_ms"] == 10
        with simulated_service(demo_path, step_ms=10, name="demo") as url:
            yield Service(Target.parse(url), os.getpid())

    monkeypatch.setattr(plan_error, "service", service)
    monkeypatch.setattr(plan_error, "_NUM_ALONE", 3)
    replica = measured_replica()
    known = replace(replica.model_info, vocab_size=700)  # of the bundled model
    replace(replica, model_info=known).write(tmp_path / "costs.simulated.json")
    options = ["--costs", tmp_path / "costs.json", "--rows", "11", "--seconds", "1"]
    [row] = figures(plan_error.main, *options)["rows"]
    assert (row["name"], row["num_requests"] >= 20) == ("simulated conv continuous x1 0.5", True)
    predicted, measured = row["predicted"], row["measured"]
    assert 0.010 <= predicted["itl_p50"] < 0.020, "by the costs of a step, not by how fast this machine is"
    assert measured["itl_p50"] >= 0.01
    for name, error in row["errors"].items():
        assert predicted[name] == pytest.approx((1 + error) * measured[name])
