"""First contact with a card: each backend on a few small models, and on one of a billion parameters.

A row of the table has the backend that was asked for, the backend that serves, the faults and their reasons, and
whether the greedy tokens equal the tokens of plain torch. `of_copy` is an estimate: the rate at which weights are read,
divided by the rate of a copy. Each backend runs in its own process, because a CUDA error may end the process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from app.build import build_sync_engine
from app.config import EngineConfig
from app.engine.engine import Engine
from app.engine.request import Request, SamplingParams
from app.errors import described
from app.model.allocated_bytes import num_bytes_of
from app.model.gpu_backends import BACKENDS, GRAPHS, TORCH
from benchmarks.gpu.bench import BLOCK_SIZE, Bench
from benchmarks.gpu.children import in_processes
from benchmarks.gpu.models import engine_config, made_weights
from benchmarks.gpu.rates import copy_rate

MODELS = ("tiny Llama", "tiny Qwen3-MoE", "tiny Gemma 3", "tiny Qwen3.5", "1B")
_DEADLINE_S = 90.0  # of a backend: its process, the compiler, and all models
_MOST_OF_A_REASON = 300  # characters


def measure(bench: Bench) -> None:
    expected: dict[str, Any] = {}
    for backend in reversed(list(BACKENDS)):  # plain torch first: other backends are compared with it
        [child] = in_processes(bench, try_backend, [(backend,)], deadline_s=_DEADLINE_S, verifies=True)
        found: Mapping[str, Any] = child.figures
        if backend == TORCH:
            expected = {model: found.get(model, {}).get("tokens") for model in MODELS}
        for model in MODELS:
            row = dict(found.get(model, {"failed": f"its process {child.end} before this model"}))
            tokens = row.pop("tokens", None)
            is_equal = None if tokens is None or expected[model] is None else tokens == expected[model]
            bench.row("contact", backend=backend, model=model, equal=is_equal, **row)


def try_backend(bench: Bench, backend: str) -> None:
    """Try all models with one backend, in the backend's own process."""
    rate = copy_rate(bench)
    for model in bench.sized(MODELS, MODELS[:-1]):
        try:
            bench.put(**{model: _contact(bench, model, backend, rate)})
        except Exception as error:
            bench.put(**{model: {"failed": described(error)[:_MOST_OF_A_REASON]}})


def _contact(bench: Bench, model: str, backend: str, copied_bytes_per_s: float) -> dict[str, Any]:
    began_at = time.perf_counter()
    with made_weights():
        engine = build_sync_engine(_config(bench, model, backend))
    engine.prepare()
    ready_s = time.perf_counter() - began_at
    sizes = {"num_prompt_tokens": bench.sized(40, 5), "num_tokens": bench.sized(32, 2)}
    tokens, _ = _generated(engine, num_requests=1, **sizes)  # compiles the kernels
    num_requests = bench.sized(8, 1)
    _, seconds = _generated(engine, num_requests=num_requests, **sizes)
    taken = engine.measurements().backend
    assert taken is not None, "the engine runs on a GPU"
    num_bytes = num_bytes_of(vars(engine.runner)["_model"].tensors())  # as if each step read all weights once
    left = "; ".join(f"{part}: {reason[:_MOST_OF_A_REASON]}" for part, reason in taken.failed.items())
    return {
        "took": taken.name,
        "failed": left or None,
        "ready_s": round(ready_s, 1),
        "output_tokens_per_s": round(num_requests * sizes["num_tokens"] / seconds, 1),
        "of_copy": round(num_bytes * sizes["num_tokens"] / seconds / copied_bytes_per_s, 4),
        "tokens": tokens[0],
    }


def _config(bench: Bench, model: str, backend: str) -> EngineConfig:
    return engine_config(
        bench, model, max_running=bench.sized(8, 2), max_step_tokens=bench.sized(512, 4), max_model_len=128,
        num_blocks=bench.sized(8, 2) * 128 // BLOCK_SIZE, backend="auto" if backend == GRAPHS else backend,
    )  # fmt: skip


def _generated(
    engine: Engine, *, num_prompt_tokens: int, num_requests: int, num_tokens: int
) -> tuple[list[list[int]], float]:
    """Return the tokens of each request, and the seconds of all requests together."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    tokens: dict[str, list[int]] = {f"{number}": [] for number in range(num_requests)}
    began_at = time.perf_counter()
    for request_id in tokens:
        engine.add(
            Request(request_id=request_id, prompt_token_ids=tuple(range(3, 3 + num_prompt_tokens)), sampling=sampling)
        )
    while engine.has_work:
        for delta in engine.step():
            tokens[delta.request_id].extend(delta.token_ids)
    return list(tokens.values()), time.perf_counter() - began_at
