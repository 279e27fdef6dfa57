"""The page end to end on the bundled model, with a handful of requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine import strategies
from benchmarks.engine.strategies import POLICIES, STRATEGIES


@pytest.fixture(scope="module")
def workload_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = [
        {"id": f"r{number}", "prompt_token_ids": [3, *range(20, 22 + 5 * number)], "max_tokens": 3 + 2 * number,
         "ignore_eos": True, "arrival_s": 0.01 * number, "tenant": f"tenant-{number % 2}"}
        for number in range(4)
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("workload") / "tiny.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def common(demo_path: Path, workload_path: Path) -> list[str]:
    arguments = ["--model", str(demo_path), "--workload", str(workload_path), "--threads", "1", "--device", "cpu"]
    return [*arguments, "--set", "scheduler.max_running=2", "scheduler.strategy.max_wait_ms=5"]


def test_every_strategy_and_policy_serves_the_same_arrivals_with_the_same_tokens(
    common: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "out.json"
    assert strategies.main([*common, "--arrival", "burst:4", "--slo-latency-s", "60", "--json", str(written)]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out.splitlines()[-1])
    assert json.loads(written.read_text()) == found
    names = [f"{name} fcfs" for name in STRATEGIES] + [f"continuous {name}" for name in POLICIES[1:]]
    assert [trial["name"] for trial in found["trials"]] == names
    assert all(name in err for name in names)
    for trial in found["trials"]:
        assert trial["num_equal_outputs"] == trial["num_requests"] == 4
        assert (trial["num_output_tokens"], trial["num_failed"], trial["slo_share"]) == (24, 0, 1)
        assert 0 < trial["ttft_p50_s"] <= trial["latency_p50_s"] <= trial["latency_p95_s"] <= trial["latency_p99_s"]
        assert 0 <= trial["bubble_share"] < 1
    by_name = {trial["name"]: trial for trial in found["trials"]}
    assert by_name["static fcfs"]["bubble_share"] > by_name["continuous fcfs"]["bubble_share"]
    assert by_name["static fcfs"]["settings"]["strategy"]["batch_size"] == 2
    assert found["num_slots"] == 2
    assert found["settings"] == ["scheduler.max_running=2", "scheduler.strategy.max_wait_ms=5"]
    assert found["capacity_requests_per_s"] is None


def test_every_load_is_a_multiple_of_the_capacity_that_was_measured(
    common: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert strategies.main([*common, "--policies", "fcfs", "--load", "2,4"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["capacity_requests_per_s"] > 0
    assert [trial["load"] for trial in found["trials"]] == [2, 4]
    for trial in found["trials"]:
        assert trial["rate"] == pytest.approx(trial["load"] * found["capacity_requests_per_s"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "statik"], "did you mean static"),
        (["--arrival", "uniform"], "write poisson"),
        (["--load", "0"], "--load 0: write numbers above 0"),
        (["--workload", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--set", "scheduler.policy=sjf"], "here they are chosen by --policies"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(
    common: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert strategies.main([*common, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err.splitlines()[-1]
