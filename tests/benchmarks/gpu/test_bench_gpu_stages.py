"""Each stage to its end, standing in on a CPU: the code is tried, its figures say nothing."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from itertools import product
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from app.config import ApplicationConfig
from app.model.cuda.attention import TritonStep
from app.model.gpu_backends import BACKENDS, EAGER, GRAPHS, LIBRARY, TRITON
from benchmarks.gpu import (
    attention,
    contact,
    engine,
    faults,
    kernel_tests,
    kernels,
    profiled,
    round_trip,
    sampler,
    sharing,
)
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.children import Child
from benchmarks.gpu.graphs import standing_in
from benchmarks.gpu.models import LAYERS, engine_config, made_model, prepared_runner
from benchmarks.gpu.results import STAGES
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.http_call import Target
from tests.benchmarks.gpu.quick_half import serve_half

# Of those that are measured in the same way.
DRAWS = ("greedy", sampler.GRAMMAR, sampler.PENALTIES, "20 log-probabilities")
VARIANTS = ("no graphs",)

# What a stage leaves. Figures: those that are known; None: any. Then by table: the cells by which a row is
# known, those of all rows, and the cells that are above 0.
Tables = dict[str, tuple[str, set[tuple[Any, ...]], str]]
KV_BYTES = 2 * 16 * 2  # of one layer: key and value of one head of 16 in bfloat16


def decode_tables(weights: str, kv: str, *sizes: tuple[int, int]) -> Tables:
    return {
        "decode steps": (
            "weights kv sequences context", {(weights, kv, *size) for size in sizes}, "replay_ms floor_ms"
        ),
        "prompts": ("weights kv tokens", {(weights, kv, 5)}, "step_ms"),
    }  # fmt: skip


LEFT: dict[str, tuple[dict[str, Any], Tables]] = {
    "rates": (
        dict.fromkeys(("copy_gb_per_s", "bf16_tflop_per_s", "fp8_tflop_per_s", "fp8_fast_accum_tflop_per_s")), {}
    ),
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
        {"graphs": None, "kv_bytes_of_a_token": KV_BYTES, "share_2x33": None, "prompt_share_5": None},
        decode_tables("none", "auto", *product((1, 2), (20, 33))),
    ),
    "decode-fp8": ({"graphs_fp8": None, "kv_bytes_of_a_token_fp8": KV_BYTES}, decode_tables("fp8", "auto", (2, 33))),
    # An FP8 number for each of bfloat16, and a scale for each key and value.
    "decode-kv8": ({"kv_bytes_of_a_token_kv_fp8": KV_BYTES // 2 + 2 * 4}, decode_tables("none", "fp8", (2, 33))),
    "profile": (
        {},
        {
            "steps": ("step tokens waits", {("decode", 2, 0), ("mixed", 6, 0)}, "kernels"),
            "kernels": ("step", {("decode",), ("mixed",)}, "calls"),
        },
    ),
    "attention": (
        dict.fromkeys(("best_decode", "best_prefill")),
        {
            **{f"launches of {kind}": ("refused", {(None,)}, "us") for kind in ("decode", "prefill")},
            **{kind: ("model", {("tiny",)}, "us torch_us") for kind in ("decode", "prefill")},
        },
    ),
    "experts": ({}, {"experts of a layer": ("tokens", {(1,), (3,)}, "us experts")}),
    "lora": (
        {"ratio_2_of_rank_3": None},
        {"steps with adapters": (
            "step tokens adapters",
            {(*step, number) for step in (("decode", 2), ("prompt", 3)) for number in ("none", "2")}, "step_ms",
        )},
    ),
    "tier": (
        {"fetched_over_computed": None}, {"tier": ("round", {(0,)}, "computed_s fetched_s blocks")}
    ),
    "sampler": ({}, {"draws": ("draw", set(product(DRAWS)), "replay_us")}),
    "engine": (
        {"output_tokens_per_s": None},
        {"engine": ("variant failed", {(engine.AS_SERVED, 0)}, "output_tokens_per_s")},
    ),
    "engine-settings": ({}, {"engine": ("variant failed", {("no graphs", 0)}, "output_tokens_per_s")}),
    "sleep": (dict.fromkeys(("sleep_s", "wake_s")), {}),
    "replicas": ({"mps": None}, {"replicas": ("mps", {("no",)}, "output_tokens_per_s over_one")}),
    "ranks": (
        {"requests": 1, "answered_alike": 1},
        {"ranks": ("ranks failed", {(1, 0), (2, 0)}, "output_tokens_per_s")},
    ),
    "tests": ({"tests": None}, {}),
    "transformers": ({"ours_over_theirs": None}, {"transformers": ("failed", {(0,)}, "output_tokens_per_s")}),
}  # fmt: skip


@pytest.fixture
def quick_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of their own begin with what is imported already, by a server that imports it once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([sharing.__name__, serve_half.__module__])
    monkeypatch.setattr(multiprocessing, "get_context", lambda _method: context)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    earlier = {"engine": {"output_tokens_per_s": 10.0}}
    return Bench(out=tmp_path, file=tmp_path / "figures.json", stands_in=True, earlier=earlier)


@pytest.mark.parametrize(
    "stage",
    [each for each in STAGES if each.name not in ("contact", "faults", "service")],
    ids=lambda stage: stage.name,
)
@pytest.mark.usefixtures("quick_starts")
def test_a_stage_leaves_its_figures_and_tables(stage: Any, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is measured more than once is measured for one case and another.
    monkeypatch.setattr(sampler, "DRAWS", {name: sampler.DRAWS[name] for name in DRAWS})
    monkeypatch.setattr(engine, "VARIANTS", {name: engine.VARIANTS[name] for name in VARIANTS})
    monkeypatch.setattr(sharing, "_serve_half", serve_half)
    bench.stage = stage.name
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
    with standing_in():
        faults.run_case(bench, case)
    figures = bench.figures
    assert (figures["streams"], figures["next_request"]) == (f"2 {stream}", stream)


@pytest.mark.parametrize("is_broken", [False, True])
def test_first_contact_says_of_each_backend_what_works(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    """Here, and not in processes of their own. All that fails is told, and the stage comes to its end."""

    def here(bench: Bench, work: Any, arguments: Any, *, deadline_s: float, verifies: bool) -> list[Child]:
        own = Bench(out=bench.out, file=bench.out / "own.json", stands_in=True, earlier={})
        for given in arguments:
            work(own, *given)
        return [Child(own.figures, "ended with 0")]

    def fails(*_: object) -> None:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr("app.model.gpu_backends.cache_folder", lambda: bench.out)
    monkeypatch.setattr(contact, "in_processes", here)
    if is_broken:
        monkeypatch.setattr(TritonStep, "_attended", fails)
    monkeypatch.setattr(contact, "MODELS", ("tiny Llama", "tiny Qwen3.5", "1B"))
    with standing_in(verifies=True):
        contact.measure(bench)
    rows = {(row["backend"], row["model"]): row for row in bench.tables["contact"]}
    for backend, model in product(BACKENDS, contact.MODELS[:-1]):
        row, expected = rows[backend, model], backend
        if model == "tiny Qwen3.5" and backend == GRAPHS:
            expected = EAGER
        if is_broken and backend in (EAGER, TRITON):
            assert f"model.backend is {backend}" in row["failed"]
            assert "PassManager::run failed" in row["failed"]
            continue
        assert row["equal"] is True, row
        if is_broken and backend == GRAPHS:
            expected = LIBRARY
        assert row["took"] == expected, row
        assert ("PassManager::run failed" in (row["failed"] or "")) == (expected != backend and is_broken), row
        assert row["output_tokens_per_s"] > 0
        assert row["of_copy"] >= 0
    assert all(rows[backend, "1B"]["failed"] == "its process ended with 0 before this model" for backend in BACKENDS)


def test_a_stage_that_was_stopped_goes_on_with_the_part_in_which_it_was(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"

    def measured(is_killed: bool) -> Bench:
        bench = Bench(out=tmp_path, file=file, stands_in=True, earlier={})
        for part in bench.parts("part", (1, 2, 3)):
            bench.row("rows", part=part, is_killed=is_killed)
            if is_killed and part == 2:
                break
            bench.put(last=part)
        return bench

    assert measured(is_killed=True).figures == {"last": 1}
    found = [(row["part"], row["is_killed"]) for row in measured(is_killed=False).tables["rows"]]
    assert found == [(1, True), (2, False), (3, False)]
    again = measured(is_killed=False)
    assert len(again.tables["rows"]) == again.figures["last"] == 3


def test_figures_of_eager_steps_are_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(_function: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    config = engine_config(bench, "sampling", num_blocks=4)
    with standing_in():
        model = made_model(config)
        monkeypatch.setattr("app.model.implementations.gpu.CudaCapture", lambda device: refusing)
        with pytest.raises(BenchmarkError, match="0 of 3 CUDA graphs were captured"):
            prepared_runner(config, model)


def test_failing_tests_fail_their_stage(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"test_wrong.py": "def test_it():\n    assert not 3\n", "test_not_read.py": "import nothing\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(kernel_tests, "_STANDING_IN", tuple(str(tmp_path / name) for name in files))
    with pytest.raises(BenchmarkError, match="pytest ended with status"):
        kernel_tests.measure(bench)
    assert "1 failed" in bench.figures["tests"]
    assert "1 error" in bench.figures["tests"]
    assert len(bench.tables["failed tests"]) == len(files)


@pytest.mark.parametrize(
    ("module", "reason"), [(kernel_tests, "the tests need hypothesis"), (round_trip, "Ray is not installed")]
)
def test_a_stage_says_what_it_lacks(module: Any, reason: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None if name in ("hypothesis", "ray") else object())
    module.measure(bench)
    assert bench.figures == {"skipped": reason}


def test_the_service_is_asked_over_http(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start needs Ray, and is not part of this."""
    said: list[str] = []

    class Answering(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"message": {"content": said.pop()}}]}).encode())

    @contextmanager
    def started(application: dict[str, Any]) -> Iterator[SimpleNamespace]:
        assert ApplicationConfig.model_validate(application).models[0].name == "demo"
        with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
            Thread(target=server.serve_forever).start()
            yield SimpleNamespace(target=Target.parse(f"http://127.0.0.1:{server.server_port}"))
            server.shutdown()

    monkeypatch.setattr("benchmarks.harness.service.service", started)
    said += ["there was"] * 3
    round_trip.measure(bench)
    assert bench.figures.keys() == {"ready_s", "first_request_s", "request_ms"}
    said += ["there was", "there is", "there was"]
    with pytest.raises(BenchmarkError, match="2 different answers"):
        round_trip.measure(bench)


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
