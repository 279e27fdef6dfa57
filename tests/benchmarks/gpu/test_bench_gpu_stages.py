"""Each stage to its end, standing in on a CPU: the code is tried, its figures say nothing."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from benchmarks.gpu import attention, kernels, profiled
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.graphs import standing_in
from benchmarks.gpu.models import LAYERS, engine_config, made_model
from benchmarks.gpu.results import STAGES

Measured = Callable[[str], tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(out=tmp_path, file=tmp_path / "figures.json", stands_in=True, earlier={})


@pytest.fixture
def measured(bench: Bench) -> Measured:
    """The name of a stage → its figures and its tables."""

    def run(name: str) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
        [module] = [stage.module for stage in STAGES if stage.name == name]
        with standing_in():
            import_module(module).measure(bench)
        return bench.figures, bench.tables

    return run


def test_rates(measured: Measured) -> None:
    figures, _ = measured("rates")
    assert figures["torch_version"]
    assert {"copy_gb_per_s", "bf16_tflop_per_s", "fp8_tflop_per_s"} <= set(figures)


def test_kernels_are_compared_with_fp64_and_their_tests_are_run(measured: Measured) -> None:
    figures, tables = measured("kernels")
    errors = tables["largest relative error against fp64"]
    assert {row["kernel"] for row in errors} >= {"prefill", "decode", "batch-invariant product", "batch-invariant mean"}
    assert all(0 < row["error"] < 0.1 for row in errors)
    layers = tables["log-probabilities of one layer against fp64"]
    assert {(row["model"], row["step"]) for row in layers} == set(product(LAYERS, ("prompt", "decode")))
    assert all(0 < row["error"] < 0.1 for row in layers)
    assert " passed" in figures["tests"]
    assert "failed" not in figures["tests"]


def test_a_wrong_kernel_shows_in_its_error() -> None:
    exact = torch.randn(4, 8, dtype=torch.float64)
    wrong = exact.clone()
    wrong[2, 3] += 3 * exact.square().mean().sqrt()
    assert kernels._largest_error(exact, exact) == 0
    assert kernels._largest_error(wrong, exact) == pytest.approx(3.0)


def test_memory_that_was_predicted_stands_beside_what_a_start_finds(measured: Measured) -> None:
    figures, tables = measured("memory")
    parts = {row["part"]: row for row in tables["memory beside KV, GiB"]}
    assert set(parts) == {"weights", "step", "graphs", "workspaces", "context", "adapters"}
    assert figures["graphs"] > 0
    assert figures["worst_step_s"] > 0
    assert figures["predicted_gib"] > figures["kv_gib"] > 0


def test_decode_steps_are_replayed(measured: Measured) -> None:
    figures, tables = measured("decode")
    assert figures["graphs"] >= 2
    steps = tables["decode steps"]
    assert [(row["weights"], row["kv"], row["sequences"], row["context"]) for row in steps] == [
        *(("none", "auto", *size) for size in product((1, 2), (20, 33))),
        ("fp8", "auto", 2, 33), ("none", "fp8", 2, 33),
    ]  # fmt: skip
    prompts = [(row["weights"], row["kv"], row["tokens"]) for row in tables["prompts"]]
    assert prompts == [("none", "auto", 5), ("fp8", "auto", 5), ("none", "fp8", 5)]
    assert figures["weights_read_gb_fp8"] <= figures["weights_read_gb"]
    assert figures["kv_bytes_of_a_token"] == 2 * 16 * 2  # one layer, key and value of one head of 16 in bfloat16
    assert figures["kv_bytes_of_a_token_kv_fp8"] == 2 * (16 + 4)
    assert all(row["replay_ms"] > 0 and row["floor_ms"] > 0 for row in steps)


def test_the_engine_answers_every_request_in_every_variant(measured: Measured) -> None:
    _, tables = measured("engine")
    assert [row["variant"] for row in tables["engine"]] == [
        "graphs, overlap", "no overlap", "no graphs", "batch_invariant",
    ]  # fmt: skip
    assert not any(row["failed"] for row in tables["engine"])


def test_a_profile_has_the_launches_and_waits_of_a_decode_step_and_of_a_mixed_one(measured: Measured) -> None:
    _, tables = measured("profile")
    assert [(row["step"], row["tokens"], row["waits"]) for row in tables["steps"]] == [
        ("decode", 2, 0),
        ("mixed", 6, 0),
    ]
    assert {row["step"] for row in tables["kernels"]} == {"decode", "mixed"}


def test_idle_time_is_what_no_kernel_covers() -> None:
    events = [SimpleNamespace(time_range=SimpleNamespace(start=a, end=b)) for a, b in ((0, 4), (1, 2), (6, 9), (9, 10))]
    assert profiled._idle_us(events) == 2


def test_attention_is_measured_and_other_launches_of_it_are_tried(measured: Measured) -> None:
    figures, tables = measured("attention")
    assert figures["best_decode"]
    assert figures["best_prefill"]
    for kind in ("decode", "prefill"):
        assert tables[kind]
        assert [row["refused"] for row in tables[f"launches of {kind}"]] == [None, None]


def test_experts_are_measured_against_the_bytes_of_those_that_are_chosen(measured: Measured) -> None:
    _, tables = measured("experts")
    rows = tables["experts of a layer"]
    assert [row["tokens"] for row in rows] == [1, 3]
    assert rows[0]["experts"] == 2
    assert all(row["us"] > 0 for row in rows)


def test_steps_with_adapters_stand_beside_those_without(measured: Measured) -> None:
    figures, tables = measured("lora")
    rows = tables["steps with adapters"]
    assert [(row["step"], row["tokens"], row["adapters"]) for row in rows] == [
        ("decode", 2, "none"), ("decode", 2, "2"), ("prompt", 3, "none"), ("prompt", 3, "2"),
    ]  # fmt: skip
    assert all(row["step_ms"] > 0 for row in rows)
    assert figures["ratio_2_of_rank_3"] > 0


def test_another_launch_reaches_the_kernels() -> None:
    seen: list[dict[str, object]] = []
    kernel = SimpleNamespace(write_kernel={1: lambda *_, **options: seen.append(options)})
    attention._Launched(kernel, {"tile": 32, "num_warps": 8}).write_kernel[1](0, tile=16, num_rows=4)
    assert seen == [{"tile": 32, "num_rows": 4}]


def test_draws_are_measured_through_the_runner(measured: Measured) -> None:
    _, tables = measured("sampler")
    assert {row["draw"] for row in tables["draws"]} == {
        "greedy", "T = 1", "top-p 0.9", "top-k 50, top-p 0.9", "top-p 0.9, grammar", "top-p 0.9, penalties",
        "20 log-probabilities",
    }  # fmt: skip
    assert all(row["replay_us"] > 0 for row in tables["draws"])


def test_transformers_answers_the_same_requests(measured: Measured, bench: Bench) -> None:
    bench.earlier = {"engine": {"output_tokens_per_s": 10.0}}
    figures, tables = measured("transformers")
    assert tables["transformers"][0]["failed"] == 0
    assert figures["ours_over_theirs"] > 0


def test_after_a_fault_streams_end_and_after_a_lack_of_memory_they_go_on(measured: Measured) -> None:
    _, tables = measured("faults")
    illegal, memory = tables["faults"]
    assert (illegal["streams"], illegal["next_request"]) == ("2 EngineStopped", "EngineStopped")
    assert (memory["streams"], memory["next_request"]) == ("2 answered", "answered")
    assert {illegal["process"], memory["process"]} == {"ended with 0"}


def test_every_stage_has_its_test() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert all(f'measured("{stage.name}")' in source for stage in STAGES)


def test_a_made_model_is_the_same_each_time(bench: Bench) -> None:
    config = engine_config(bench, num_blocks=4)
    with standing_in():
        first, second = (list(made_model(config).tensors()) for _ in range(2))
    assert len(first) == len(second) > 5
    assert all(map(torch.equal, first, second))
