"""Row R16: GPUs that break while requests run. The replicas compute on a CPU, which their code takes for a GPU.

Steps with one of two backends raise a CUDA error at random, and afterwards every call of the device raises the error.
A replica ends at its first error, and its replacement leaves out the backend that failed. The steps of all backends are
plain torch here, so no kernel is tried.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.chaos.stage import RECOVERY_TIMEOUT_S, Size, Stage, under_traffic
from benchmarks.chaos.traffic import Traffic
from benchmarks.chaos.verdict import judged
from benchmarks.harness.command import BenchmarkError, tell
from benchmarks.harness.machine import PROJECT
from benchmarks.harness.service import scraped

_FOLDER = "CAROUSEL_BROKEN_CARD"  # environment variable: the folder of the cache and of the file that breaks the GPUs
_SEED = "CAROUSEL_BROKEN_CARD_SEED"
_IS_BROKEN = "broken"
_BREAK = ("graphs", "eager")  # the backends that break
_PROBABILITY = 0.02  # probability of an error in one step
_LOOK_S = 0.2
_BACKEND = re.compile(r'backend="([^"]*)"')


async def lose_cards(size: Size) -> list[dict[str, Any]]:
    """R16: raise CUDA errors in random steps, until every replica computes with a backend that does not break."""
    with tempfile.TemporaryDirectory(prefix="carousel-cards-") as folder:
        variables = {
            "PYTHONPATH": os.pathsep.join([str(PROJECT), str(Path(__file__).parent / "broken_card")]),
            _FOLDER: folder,
            _SEED: str(size.seed),
        }
        # `batch_invariant` would use Triton's kernels. In float32, rounding errors are too small to change tokens.
        with patch.dict(os.environ, variables):
            async with under_traffic(size, lengths=(15, 60), weights=True, is_batch_invariant=False) as made:
                return [await _lose_cards(*made, Path(folder))]


async def _lose_cards(running: Stage, traffic: Traffic, folder: Path) -> dict[str, Any]:
    before = backends_of(running)
    async with traffic.flowing():
        began_at = time.perf_counter()
        (folder / _IS_BROKEN).touch()
        await _all_sound(running)
        sound_after_s = time.perf_counter() - began_at
        await running.is_whole()
    return (
        {"row": "R16", "fault": f"CUDA errors in {_PROBABILITY:.0%} of the steps of {' and '.join(_BREAK)}"}
        | {"backends_before": before, "backends_after": backends_of(running), "sound_after_s": round(sound_after_s, 1)}
        | judged(traffic.answers, traffic.reference)
        | {"left_over": await running.left_over()}
    )


def backends_of(running: Stage) -> dict[str, int]:
    """Return the number of replicas that compute with each backend. Raises OSError if no ingress answers."""
    samples = scraped(running.target)
    found = [match[1] for name, labels, value in samples if name == "carousel_backend" and value
             and (match := _BACKEND.search(labels))]  # fmt: skip
    return {name: found.count(name) for name in sorted(set(found))}


async def _all_sound(running: Stage) -> None:
    deadline = time.perf_counter() + 3 * RECOVERY_TIMEOUT_S
    seen: dict[str, int] = {}
    while True:
        found = backends_of(running)
        if found != seen:
            tell(f"R16: replicas by backend: {found}")
            seen = found
        if sum(number for name, number in found.items() if name not in _BREAK) == running.num_replicas:
            return
        if time.perf_counter() > deadline:
            raise BenchmarkError(f"replicas still compute with backends that break: {found}")
        await asyncio.sleep(_LOOK_S)


def put_in() -> None:
    """Make this process take its CPU for a GPU. The GPU can break once the file `broken` exists."""
    import torch

    import app.model.gpu_backends
    import app.model.implementations.gpu as gpu
    from app.model.cuda.attention import TritonAttention
    from app.model.cuda.graph_runner import GraphModelRunner
    from app.model.implementations.cuda_decoder import CudaModel
    from app.model.sampler import Sampler
    from benchmarks.gpu.graphs import WorkAgain

    folder = Path(os.environ[_FOLDER])
    source = random.Random(f"{os.environ[_SEED]} {os.getpid()}")
    predict = GraphModelRunner._predict
    is_lost = False

    def use(_device: object = None) -> None:
        if is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def predict_or_break(runner: GraphModelRunner, batch: Any) -> Any:
        nonlocal is_lost
        if runner.backend is not None and runner.backend.name in _BREAK and (folder / _IS_BROKEN).exists():
            is_lost = is_lost or source.random() < _PROBABILITY
        use()
        return predict(runner, batch)

    def plain(config: Any, model: Any, *, num_blocks: int, **_: object) -> Any:
        return model.plain_attention(num_blocks, config.cache.block_size)

    replacements: list[tuple[Any, str, object]] = [
        (torch.cuda, "synchronize", use),
        (app.model.gpu_backends, "cache_folder", lambda: folder),
        (TritonAttention, "fits", staticmethod(lambda _device: True)),
        (CudaModel, "why_not_here", staticmethod(lambda _source: "its kernels are not tried here")),
        (GraphModelRunner, "_predict", predict_or_break),
        (gpu, "CudaCapture", WorkAgain),
        (gpu, "TritonSampler", lambda _device: Sampler()),
        (gpu, "_attention", plain),
    ]
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)
