"""Compare two replicas on one card, with and without NVIDIA's MPS, and a model on two cards with one on one card.

All serve the same requests. Without MPS, the processes of a card take turns.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from threading import Barrier
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig

from app.build import build_sync_engine
from app.config import ReplicasConfig
from benchmarks.engine.carousel import Carousel
from benchmarks.gpu.bench import BLOCK_SIZE, Bench
from benchmarks.gpu.children import in_processes
from benchmarks.gpu.engine import requests_for, served
from benchmarks.gpu.graphs import Replays
from benchmarks.gpu.models import engine_config, made_weights, random_module
from benchmarks.harness.command import BenchmarkError, ran
from benchmarks.harness.workload import Workload

_DEADLINE_S = 120.0  # for their start and all requests
_CONTROL = "nvidia-cuda-mps-control"
_TIMEOUT_S = 20.0  # for the daemon's answers


def measure(bench: Bench) -> None:
    (_measure_ranks if bench.stage == "ranks" else _measure_replicas)(bench)


def _measure_replicas(bench: Bench) -> None:
    alone = bench.of_earlier("engine", "output_tokens_per_s")
    for has_mps in bench.parts("with MPS", (False, True)):
        with _mps() if has_mps else nullcontext() as refused:
            if refused is not None:
                bench.put(mps=refused)
                continue
            barrier = multiprocessing.get_context("spawn").Barrier(2)
            both = _figures_of(bench, _serve_half, [(number, barrier) for number in range(2)])
            servers = ran([_CONTROL], input="get_server_list\n", timeout_s=_TIMEOUT_S) if has_mps else None
        rate = sum(each["num_output_tokens"] for each in both) / max(each["seconds"] for each in both)
        bench.row(
            "replicas", mps="no" if not has_mps else "yes" if servers else "was not used",
            output_tokens_per_s=round(rate, 1), over_one=round(rate / alone, 3) if alone else None,
            itl_p99_ms=max(each["itl_p99_ms"] or 0.0 for each in both),
        )  # fmt: skip


def _measure_ranks(bench: Bench) -> None:
    num_cards = 2 if bench.stands_in else torch.cuda.device_count()
    if num_cards < 2:
        bench.skip(f"this stage needs 2 cards, and this machine has {num_cards}")
        return
    # The other ranks read the weights from files, as always.
    path = engine_config(bench, "ranks").model.path
    found = AutoConfig.from_pretrained(path)
    random_module(found, torch.bfloat16, bench.device, attention="sdpa").save_pretrained(path)
    answers = []
    for size in (1, 2):
        [figures] = _figures_of(bench, _serve_on_cards, [(size,)], takes_cpu_for_gpu=False)
        answers.append(figures.pop("answers"))
        bench.row("ranks", ranks=size, **figures)
    bench.put(requests=len(answers[0]), answered_alike=sum(map(list.__eq__, *answers)))


def _figures_of(
    bench: Bench, work: Callable[..., None], arguments: list[tuple[Any, ...]], **options: bool
) -> list[dict[str, Any]]:
    children = in_processes(bench, work, arguments, deadline_s=_DEADLINE_S, **options)
    if any("seconds" not in child.figures for child in children):
        raise BenchmarkError(f"some processes did not finish: {', '.join(child.end for child in children)}")
    return [dict(child.figures) for child in children]


def _serve_half(bench: Bench, number: int, barrier: Barrier) -> None:
    """Serve every second request, once both replicas are ready."""
    workload, longest = _part_of(bench, number, 2)
    config = engine_config(bench, max_running=bench.sized(128, 1), max_model_len=longest)
    with Replays().watched() as replays, made_weights():
        engine = build_sync_engine(config, ReplicasConfig(num_replicas=2, num_gpus=0.5))
    bench.put(kv_blocks=engine.stats().num_blocks)
    figures = served(engine, workload, begin=lambda: barrier.wait(_DEADLINE_S))
    replays.check(config, engine.runner)
    bench.put(**figures)


def _serve_on_cards(bench: Bench, size: int) -> None:
    workload, longest = _part_of(bench, 0, 8)
    config = engine_config(bench, "ranks", max_running=bench.sized(64, 2), max_model_len=longest)
    with closing(build_sync_engine(config, ReplicasConfig(tensor_parallel=size))) as engine:
        figures = served(engine, workload)
        answers = Carousel(engine).serve(workload).token_ids
        bench.put(**figures, answers=list(answers.values()))


def _part_of(bench: Bench, number: int, num_parts: int) -> tuple[Workload, int]:
    """Return every `num_parts`-th request, and their largest number of tokens plus a block."""
    workload = Workload(requests_for(bench).requests[number::num_parts])
    return workload, BLOCK_SIZE + max(timed.max_total_tokens for timed in workload.requests)


@contextmanager
def _mps() -> Iterator[str | None]:
    """Let processes that start in this context share the card through MPS. Yields the reason if they cannot."""
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        with patch.dict(os.environ, own):
            nothing = subprocess.DEVNULL  # the daemon keeps its streams open
            try:
                subprocess.run([_CONTROL, "-d"], stdout=nothing, stderr=nothing, check=True, timeout=_TIMEOUT_S)
            except (OSError, subprocess.SubprocessError) as error:
                yield f"MPS cannot be started: {error}"
                return
            try:
                yield None
            finally:
                with suppress(BenchmarkError):
                    ran([_CONTROL], input="quit\n", timeout_s=_TIMEOUT_S)
