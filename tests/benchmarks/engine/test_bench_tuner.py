"""The benchmark of the tuner: what counts as good, and its table on a fast machine of the imagination."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.engine.request import TokenDelta
from benchmarks.engine import tuner
from benchmarks.engine.tuner import PromiseLog, main
from tests.deployments.plan.measured import measured_replica, step_cost
from tests.fakes import make_request


def noted(*times: float, arrived_at: float = 0.0) -> PromiseLog:
    log = PromiseLog(ttft_s=0.5, itl_s=0.1)
    log.arrived(make_request(request_id="a"), at=arrived_at)
    for at in times:
        log.step_ended([TokenDelta("a", (7,))], at=at)
    return log


def test_a_request_is_good_whose_first_token_and_gaps_are_in_time() -> None:
    assert noted(0.4, 0.5, 0.55).good("a")
    assert not noted(0.6, 0.65).good("a")
    assert not noted(0.4, 0.55).good("a")
    assert not noted().good("a")


def test_one_gap_of_a_hundred_may_be_too_long() -> None:
    in_time = [0.1 + 0.01 * number for number in range(99)]
    assert not noted(*in_time, in_time[-1] + 1).good("a")
    assert noted(*in_time, in_time[-1] + 1, in_time[-1] + 1.01, in_time[-1] + 1.02).good("a")


def test_the_tuner_is_set_beside_every_setting_of_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuner, "_BUDGETS", (256, 2048))
    monkeypatch.setattr(tuner, "_RUNNING", (32,))
    monkeypatch.setattr(tuner, "_CHUNK_PARTS", (1,))
    monkeypatch.setattr(tuner, "PHASES", tuner.PHASES[:2])
    costs = tmp_path / "costs.json"
    measured_replica(step_cost(0.005, 0.0005)).write(costs)
    out = tmp_path / "out.json"
    assert main(["--costs", str(costs), "--itl-ms", "150", "--phase-s", "32", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [each["name"] for each in found["served"]] == ["tuner", "256 / 256 / 32", "2048 / 2048 / 32"]
    assert all(len(each["goodput"]) == 4 for each in found["served"])
    assert found["served"][0]["moves"], "2,048 tokens take a second"
    assert "tuner / best fixed setting" in capsys.readouterr().out
