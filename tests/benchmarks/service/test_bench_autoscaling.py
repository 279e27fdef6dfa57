"""Autoscaling in simulation, on loads for which the answer is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.service import autoscaling
from benchmarks.service.autoscaling import TICK_S, Fleet, Load, forecasts, outcome

FLEET = Fleet(num_slots=4, start_s=20.0, ttft_s=1.0)


def steady(rate: float, *, seconds: float, begin_s: float = 0.0) -> Load:
    """Requests that hold a slot for two seconds, 50 tokens each."""
    at_s = np.arange(begin_s, seconds, 1 / rate)
    ones = np.ones(len(at_s))
    return Load(at_s, 2 * ones, 0.1 * ones, 50 * ones, seconds)


def step() -> Load:
    """Ten times the requests from 1,800 s on."""
    low, high = steady(1, seconds=1800), steady(10, begin_s=1800, seconds=3600)
    columns = (np.concatenate(pair) for pair in zip(
        (low.at_s, low.held_s, low.prompt_s, low.num_tokens), (high.at_s, high.held_s, high.prompt_s, high.num_tokens),
        strict=True,
    ))  # fmt: skip
    return Load(*columns, seconds=3600)


def test_little_work_keeps_one_replica_and_none_is_late() -> None:
    found = outcome(steady(1, seconds=600), FLEET, fill=1.0, predicted=None, utilisation=1.0)
    assert (found.replica_s, found.late_share) == (600, 0)


def test_steady_work_gets_the_replicas_that_littles_law_asks_for() -> None:
    # 10 requests a second for 2 s each fill 20 slots: 5 replicas; filled to 0.8 they are 6.25, rounded up.
    load = steady(10, seconds=3600)
    found = outcome(load, FLEET, fill=1.0, predicted=[20.0] * 1800, utilisation=0.8)
    assert found.replica_s / 3600 == pytest.approx(7, abs=0.2)
    assert found.late_share == 0


def test_what_is_known_in_advance_makes_fewer_late() -> None:
    load = step()
    forecast = forecasts(load, horizon_s=30.0)["perfect"]
    assert forecast is not None
    predicted = [forecast(TICK_S * (number + 1)) for number in range(1800)]
    reactive, perfect = (outcome(load, FLEET, fill=0.8, predicted=each, utilisation=0.8) for each in (None, predicted))
    assert perfect.late_share < 0.3 * reactive.late_share


def test_forecasts_look_ahead_as_far_as_they_are_told() -> None:
    rising = np.sort(3600 * np.sqrt(np.random.default_rng(1).random(40_000)))  # 40,000 · 2 t / 3600² arrive a second
    ones = np.ones(len(rising))
    found = forecasts(Load(rising, ones, ones, ones, 3600.0), horizon_s=100.0)
    expected = 40_000 * 2 * 2100 / 3600**2
    for name in ("trend", "perfect"):
        forecast = found[name]
        assert forecast is not None
        assert forecast(2000.0) == pytest.approx(expected, rel=0.15), name


def test_a_seasonal_forecast_repeats_yesterday_at_todays_level() -> None:
    rng = np.random.default_rng(2)
    yesterday = np.sort(rng.uniform(-86_400, 0, 86_400))
    lunch = rng.uniform(-86_400 + 7200, -86_400 + 7500, 600)  # 3 requests a second instead of one
    today = np.sort(rng.uniform(0, 7000, 14_000))  # two a second
    at_s = np.sort(np.concatenate([yesterday, lunch, today]))
    ones = np.ones(len(at_s))
    seasonal = forecasts(Load(at_s, ones, ones, ones, 7000.0), horizon_s=350.0)["seasonal"]
    assert seasonal is not None
    assert seasonal(7000.0) == pytest.approx(2 * (1 + 600 / 600), rel=0.2)


def write_trace(path: Path, *, num_requests: int) -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"{2 * number},200,{100 + number % 50}" for number in range(num_requests)]
    path.write_text("\n".join(lines) + "\n")


def run(path: Path, *options: str) -> int:
    return autoscaling.main(["--trace", str(path), "--ttft-s", "60", *options])


def test_the_command_compares_the_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "t.csv", num_requests=100)
    assert run(tmp_path / "t.csv", "--shape", "hour") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["rule"] for row in found["rows"]] == ["reactive", "naive", "trend", "perfect"]
    assert {row["late_share"] for row in found["rows"]} == {0.0}
    assert found["num_requests"] == 100


def test_a_promise_that_no_setting_keeps_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "t.csv", num_requests=20)
    assert run(tmp_path / "t.csv", "--ttft-s", "0.001") == 2
    assert "reactive: at least 100.00% of the requests are late; --late 0.01 is not reached" in capsys.readouterr().err
