"""The command end to end on the bundled model with a handful of requests, and transformers on the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.build import build_sync_engine
from app.config import EngineConfig, ModelConfig
from benchmarks.engine import throughput
from benchmarks.harness.workload import read_workload
from benchmarks.peers import engines, hf
from tests.benchmarks.conftest import Figures, Refusal, write_workload
from tests.kit.engine import run_to_end


@pytest.fixture(scope="module")
def engine_tokens(demo_path: Path, tiny_workload: Path) -> dict[str, list[int]]:
    """What the engine draws when it is asked directly."""
    engine = build_sync_engine(EngineConfig(model=ModelConfig(path=str(demo_path), device="cpu", dtype="float32")))
    requests = [timed.request for timed in read_workload(str(tiny_workload)).requests]
    return run_to_end(engine, *requests).token_ids


def outputs(path: Path) -> dict[str, list[int]]:
    return {line["id"]: line["token_ids"] for line in map(json.loads, path.read_text().splitlines())}


def test_throughput_prints_its_figures_and_writes_the_engines_tokens(
    tiny_run: list[str], engine_tokens: dict[str, list[int]], tmp_path: Path, figures: Figures
) -> None:
    written, longer = tmp_path / "outputs.jsonl", tmp_path / "longer.jsonl"
    write_workload(longer, {"prompt_token_ids": [3] * 60, "max_tokens": 5})
    options = ["--dtype", "fp32", "--repeat", "2", "--outputs", written, "--also", longer]
    set_to = ["scheduler.max_step_tokens=32", "cache.block_size=8"]
    found = figures(throughput.main, *tiny_run, *options, "--set", *set_to)
    assert outputs(written) == engine_tokens
    assert found["num_output_tokens"] == 3 + 5 + 7 + 9
    assert found["output_tokens_per_s"] == pytest.approx(24 / found["seconds"], rel=0.01)
    assert len(found["all_seconds"]) == 2
    for name in ("ttft", "itl", "latency"):
        assert 0 < found[f"{name}_p50_s"] <= found[f"{name}_p99_s"]
    assert (found["dtype"], found["threads"], found["device"], found["kv_block_size"]) == ("fp32", 1, "cpu", 8)
    assert found["settings"] == set_to
    assert 0 < found["start_to_ready_s"] <= found["start_to_first_token_s"]
    other = found["also"]["longer"]
    assert (other["num_output_tokens"], other["num_prompt_tokens"]) == (5, 60)


def test_rates_of_prompts_and_of_decode_are_of_the_time_before_the_last_first_token_and_after_it(
    tiny_run: list[str], tmp_path: Path, figures: Figures
) -> None:
    one = write_workload(tmp_path / "one.jsonl", {"prompt_token_ids": [3] * 60, "max_tokens": 5})
    found = figures(throughput.main, *tiny_run, "--workload", one, "--repeat", "1")
    assert found["prompt_tokens_per_s"] == pytest.approx(60 / found["ttft_p50_s"], rel=0.01)
    assert found["decode_tokens_per_s"] == pytest.approx(4 / (found["latency_p50_s"] - found["ttft_p50_s"]), rel=0.1)


@pytest.mark.parametrize("name", ["hf-static-8", "hf-continuous"])
def test_a_peer_draws_the_same_tokens(
    name: str, tiny_run: list[str], engine_tokens: dict[str, list[int]], tmp_path: Path, figures: Figures
) -> None:
    written = tmp_path / "outputs.jsonl"
    assert set(engines.HF) == set(hf.PEERS)
    found = figures(engines.main, name, *tiny_run, "--dtype", "fp32", "--repeat", "1", "--outputs", written)
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
    tiny_run: list[str], arguments: list[str], message: str, refusal: Refusal
) -> None:
    assert message in refusal(throughput.main, *tiny_run, *arguments)
