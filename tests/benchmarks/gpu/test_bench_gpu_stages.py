"""Each stage to its end, standing in on a CPU: the code is tried, its figures say nothing."""

from __future__ import annotations

import json
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from benchmarks.gpu import attention, engine, faults, kernels, profiled, sampler
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.graphs import standing_in
from benchmarks.gpu.models import LAYERS, engine_config, made_model
from benchmarks.gpu.results import STAGES

# Of those that are measured in the same way.
DRAWS = ("greedy", sampler.GRAMMAR, sampler.PENALTIES, "20 log-probabilities")
VARIANTS = ("graphs, overlap", "no graphs")

# What a stage leaves. Figures: those that are known; None: any. Then by table: the cells by which a row is
# known, those of all rows, and the cells that are above 0.
Tables = dict[str, tuple[str, set[tuple[Any, ...]], str]]
LEFT: dict[str, tuple[dict[str, Any], Tables]] = {
    "rates": (dict.fromkeys(("torch_version", "copy_gb_per_s", "bf16_tflop_per_s", "fp8_tflop_per_s")), {}),
    "kernels": (
        {},
        {
            "largest relative error against fp64": (
                "kernel", set(product(("prefill", "decode", "batch-invariant product", "batch-invariant mean"))),
                "error",
            ),
            "log-probabilities of one layer against fp64": (
                "model step", set(product(LAYERS, ("prompt", "decode"))), "error"
            ),
        },
    ),
    "memory": (
        dict.fromkeys(("graphs", "worst_step_s", "kv_gib", "predicted_gib")),
        {"memory beside KV, GiB": (
            "part", set(product(("weights", "step", "graphs", "workspaces", "context", "adapters"))), ""
        )},
    ),
    "decode": (
        # One layer, key and value of one head of 16 in bfloat16, and in FP8 with a scale each.
        {"graphs": None, "kv_bytes_of_a_token": 2 * 16 * 2, "kv_bytes_of_a_token_kv_fp8": 2 * (16 + 4)},
        {
            "decode steps": (
                "weights kv sequences context",
                {*product(("none",), ("auto",), (1, 2), (20, 33)), ("fp8", "auto", 2, 33), ("none", "fp8", 2, 33)},
                "replay_ms floor_ms",
            ),
            "prompts": (
                "weights kv tokens", {("none", "auto", 5), ("fp8", "auto", 5), ("none", "fp8", 5)}, "step_ms"
            ),
        },
    ),
    "profile": (
        {},
        {
            "steps": ("step tokens waits", {("decode", 2, 0), ("mixed", 6, 0)}, "kernels"),
            "kernels": ("step", {("decode",), ("mixed",)}, "calls"),
        },
    ),
    "attention": (
        dict.fromkeys(("best_decode", "best_prefill")),
        {f"launches of {kind}": ("refused", {(None,)}, "us") for kind in ("decode", "prefill")},
    ),
    "experts": ({}, {"experts of a layer": ("tokens", {(1,), (3,)}, "us experts")}),
    "lora": (
        {"ratio_2_of_rank_3": None},
        {"steps with adapters": (
            "step tokens adapters",
            {(*step, number) for step in (("decode", 2), ("prompt", 3)) for number in ("none", "2")}, "step_ms",
        )},
    ),
    "sampler": ({}, {"draws": ("draw", set(product(DRAWS)), "replay_us")}),
    "engine": (
        {"output_tokens_per_s": None},
        {"engine": ("variant failed", set(product(VARIANTS, (0,))), "output_tokens_per_s")},
    ),
    "transformers": ({"ours_over_theirs": None}, {"transformers": ("failed", {(0,)}, "output_tokens_per_s")}),
}  # fmt: skip


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    earlier = {"engine": {"output_tokens_per_s": 10.0}}
    return Bench(out=tmp_path, file=tmp_path / "figures.json", stands_in=True, earlier=earlier)


@pytest.mark.parametrize("stage", [each for each in STAGES if each.name != "faults"], ids=lambda stage: stage.name)
def test_a_stage_leaves_its_figures_and_tables(stage: Any, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is measured more than once is measured for one case and another; the tests of kernels run by themselves.
    monkeypatch.setattr(kernels, "_run_tests", lambda *_: None)
    monkeypatch.setattr(sampler, "DRAWS", {name: sampler.DRAWS[name] for name in DRAWS})
    monkeypatch.setattr(engine, "VARIANTS", {name: engine.VARIANTS[name] for name in VARIANTS})
    with standing_in():
        import_module(stage.module).measure(bench)
    figures, tables = LEFT[stage.name]
    for name, expected in figures.items():
        assert bench.figures[name] == expected or expected is None, name
    for name, (heads, expected_rows, above_zero) in tables.items():
        rows = bench.tables[name]
        assert {tuple(row[head] for head in heads.split()) for row in rows} == expected_rows, name
        assert all(row[head] > 0 for row in rows for head in above_zero.split()), name
    if stage.name == "kernels":
        assert all(row["error"] < 0.1 for table in tables for row in bench.tables[table])


@pytest.mark.parametrize(("case", "stream"), [("illegal address", "EngineStopped"), ("out of memory", "answered")])
def test_streams_end_or_go_on_after_a_fault(case: str, stream: str, bench: Bench) -> None:
    """Here, and not in a process of its own, which a CPU does not need."""
    file = bench.out / "fault.json"
    faults._run_case(case, str(bench.out), str(file), True)
    figures = json.loads(file.read_text())["figures"]
    assert (figures["streams"], figures["next_request"]) == (f"2 {stream}", stream)


def test_a_wrong_kernel_shows_in_its_error() -> None:
    exact = torch.randn(4, 8, dtype=torch.float64)
    wrong = exact.clone()
    wrong[2, 3] += 3 * exact.square().mean().sqrt()
    assert kernels._largest_error(exact, exact) == 0
    assert kernels._largest_error(wrong, exact) == pytest.approx(3.0)


def test_idle_time_is_what_no_kernel_covers() -> None:
    events = [SimpleNamespace(time_range=SimpleNamespace(start=a, end=b)) for a, b in ((0, 4), (1, 2), (6, 9), (9, 10))]
    assert profiled._idle_us(events) == 2


def test_another_launch_reaches_the_kernels() -> None:
    seen: list[dict[str, object]] = []
    kernel = SimpleNamespace(write_kernel={1: lambda *_, **options: seen.append(options)})
    attention._Launched(kernel, {"tile": 32, "num_warps": 8}).write_kernel[1](0, tile=16, num_rows=4)
    assert seen == [{"tile": 32, "num_rows": 4}]


def test_a_made_model_is_the_same_each_time(bench: Bench) -> None:
    config = engine_config(bench, num_blocks=4)
    with standing_in():
        first, second = (list(made_model(config).tensors()) for _ in range(2))
    assert len(first) == len(second) > 5
    assert all(map(torch.equal, first, second))
