"""The pages end to end on the bundled model, with a handful of requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.build import build_sync_engine
from app.config import EngineConfig, ModelConfig
from benchmarks.engine import throughput
from benchmarks.harness.workload import read_workload
from benchmarks.peers import engines, hf
from tests.kit.engine import run_to_end


@pytest.fixture(scope="module")
def workload_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = [
        {"id": f"r{number}", "prompt_token_ids": [3, *range(20, 22 + 9 * number)], "max_tokens": 3 + 2 * number,
         "ignore_eos": True, "arrival_s": 0.02 * number, "tenant": "a-tenant"}
        for number in range(4)
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("workload") / "tiny.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def engine_tokens(demo_path: Path, workload_path: Path) -> dict[str, list[int]]:
    """What the engine draws when it is asked directly."""
    engine = build_sync_engine(EngineConfig(model=ModelConfig(path=str(demo_path), device="cpu", dtype="float32")))
    requests = [timed.request for timed in read_workload(str(workload_path)).requests]
    return run_to_end(engine, *requests).token_ids


def common(demo_path: Path, workload_path: Path) -> list[str]:
    # One thread: a second one would wait for whatever else this machine is doing.
    arguments = ["--model", str(demo_path), "--workload", str(workload_path), "--threads", "1"]
    return [*arguments, "--device", "cpu", "--dtype", "fp32"]


def outputs(path: Path) -> dict[str, list[int]]:
    return {line["id"]: line["token_ids"] for line in map(json.loads, path.read_text().splitlines())}


def test_throughput_prints_its_figures_and_writes_the_engines_tokens(
    demo_path: Path,
    workload_path: Path,
    engine_tokens: dict[str, list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    written = tmp_path / "outputs.jsonl"
    arguments = [*common(demo_path, workload_path), "--repeat", "2", "--outputs", str(written)]
    assert throughput.main([*arguments, "--set", "scheduler.max_step_tokens=32", "cache.block_size=8"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert outputs(written) == engine_tokens
    assert found["num_output_tokens"] == 3 + 5 + 7 + 9
    assert found["output_tokens_per_s"] == pytest.approx(24 / found["seconds"], rel=0.01)
    assert len(found["all_seconds"]) == 2
    for name in ("ttft", "itl", "latency"):
        assert 0 < found[f"{name}_p50_s"] <= found[f"{name}_p99_s"]
    assert (found["dtype"], found["threads"], found["device"], found["kv_block_size"]) == ("fp32", 1, "cpu", 8)
    assert found["settings"] == ["scheduler.max_step_tokens=32", "cache.block_size=8"]


def test_further_workloads_are_served_by_the_same_engine(
    demo_path: Path, workload_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = tmp_path / "longer.jsonl"
    longer.write_text(json.dumps({"id": "a", "prompt_token_ids": [3] * 60, "max_tokens": 5, "ignore_eos": True}) + "\n")
    assert throughput.main([*common(demo_path, workload_path), "--repeat", "1", "--also", str(longer)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    other = found["also"]["longer"]
    assert (found["num_output_tokens"], other["num_output_tokens"], other["num_prompt_tokens"]) == (24, 5, 60)
    assert other["prompt_tokens_per_s"] == pytest.approx(60 / other["ttft_p50_s"], rel=0.01)
    assert other["decode_tokens_per_s"] == pytest.approx(4 / (other["latency_p50_s"] - other["ttft_p50_s"]), rel=0.1)
    assert 0 < found["start_to_ready_s"] <= found["start_to_first_token_s"]


@pytest.mark.parametrize("name", ["hf-static-8", "hf-continuous"])
def test_a_peer_draws_the_same_tokens(
    name: str,
    demo_path: Path,
    workload_path: Path,
    engine_tokens: dict[str, list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    written = tmp_path / "outputs.jsonl"
    arguments = [*common(demo_path, workload_path), "--repeat", "1", "--outputs", str(written)]
    assert set(engines.HF) == set(hf.PEERS)
    assert engines.main([name, *arguments]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert outputs(written) == engine_tokens
    assert (found["engine"], found["num_output_tokens"]) == (name, 24)
    assert (found["ttft_p50_s"] is None) == (name == "hf-static-8")  # it delivers only at the end
    assert found["num_steps"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "scheduler.max_runing=3"], "did you mean scheduler.max_running"),
        (["--set", "cache.num_blocks=1"], "the workload does not fit: request 'r3'"),
        (["--workload", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(
    demo_path: Path, workload_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert throughput.main([*common(demo_path, workload_path), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err.splitlines()[-1]
