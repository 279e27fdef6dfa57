"""Compare decode steps by replay with the measured rate of copies, and prompts with that of matrix products."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from app.engine.batch import StepBatch
from app.engine.model_runner import ModelRunner
from app.model.allocated_bytes import num_bytes_of
from app.model.cuda.fp8 import why_no_fp8
from app.model.implementations.loaded_model import LoadedModel
from app.model.kv_cache import block_bytes
from benchmarks.gpu.bench import BLOCK_SIZE, Bench
from benchmarks.gpu.graphs import Replays
from benchmarks.gpu.models import engine_config, made_model, prepared_runner, prompt_operations
from benchmarks.gpu.rates import copy_rate
from benchmarks.gpu.steps import blocks_needed, step_of

_ROOM = 0.75  # share of the GPU's memory for weights and KV; the rest is for graphs, logits and steps


@torch.inference_mode()
def measure(bench: Bench) -> None:
    types = _TYPES[bench.stage]
    if types != _Types() and (reason := why_no_fp8(bench.device, on_a_cpu="int8")):
        bench.skip(reason)
        return
    contexts = bench.sized((1024, 512, 2048, 8192), (33, 20)) if types == _Types() else bench.sized((1024,), (33,))
    # The sizes with targets come first.
    rows = (64, 256, 1, 8, 32, 128, 512) if types == _Types() else (64, 256, 1, 8)
    _measure_types(bench, types, bench.sized(rows, (2, 1) if types == _Types() else (2,)), contexts)


class _Types(NamedTuple):
    """The values of `model.quantization` and `cache.dtype`."""

    weights: str = "none"
    kv: str = "auto"

    @property
    def suffix(self) -> str:
        """The suffix of the figures' names."""
        return ("" if self.weights == "none" else f"_{self.weights}") + ("" if self.kv == "auto" else f"_kv_{self.kv}")


_TYPES = {"decode": _Types(), "decode-fp8": _Types(weights="fp8"), "decode-kv8": _Types(kv="fp8")}


def _measure_types(bench: Bench, types: _Types, rows: Sequence[int], contexts: Sequence[int]) -> None:
    config = engine_config(
        bench, max_running=max(rows), max_step_tokens=bench.sized(2048, 2), max_model_len=max(contexts) + BLOCK_SIZE,
        quantization=types.weights, device="auto",
    )  # fmt: skip
    config = config.with_setting("cache.dtype", types.kv)
    model = made_model(config)
    read = bytes_of_a_step(model)
    of_block = block_bytes(config.cache, model.in_block, dtype=model.dtype)
    num_blocks = 12 if bench.stands_in else _blocks_with_room(read, of_block)
    config = config.with_setting("cache.num_blocks", num_blocks)
    runner, replays = prepared_runner(config, model)
    rate = copy_rate(bench)
    suffix = types.suffix
    bench.put(**{
        f"weights_read_gb{suffix}": round(read / 1e9, 3), f"kv_bytes_of_a_token{suffix}": of_block // BLOCK_SIZE,
        f"graphs{suffix}": replays.num_graphs,
    })  # fmt: skip
    for length in bench.parts("prompt", bench.sized((2048, 512, 8192), (5,))):
        batch = step_of([(0, length)], num_blocks=num_blocks)
        _put_prompt(bench, length, types, bench.seconds_in_a_row(partial(runner.launch, batch), repeat=5))
    for context, number in bench.parts("decode", product(contexts, rows)):
        pieces = [(context - 1, 1)] * number
        if blocks_needed(pieces) > num_blocks:
            bench.put(**{f"too_large_{number}x{context}{suffix}": f"KV memory has {num_blocks:,} blocks"})
            continue
        cells = _timed(bench, runner, replays, step_of(pieces, num_blocks=num_blocks))
        floor_ms = (read + number * context * of_block // BLOCK_SIZE) / rate * 1e3
        share = round(floor_ms / cells["step_ms"], 3)
        bench.row(
            "decode steps", weights=types.weights, kv=types.kv, sequences=number, context=context,
            floor_ms=round(floor_ms, 5), **cells, share_of_floor=share,
        )  # fmt: skip
        if context == contexts[0]:
            bench.put(**{
                f"step_{number}x{context}{suffix}_ms": cells["step_ms"], f"share_{number}x{context}{suffix}": share
            })  # fmt: skip


def _put_prompt(bench: Bench, length: int, types: _Types, step_s: float) -> None:
    """Store the figures of a step that computes one whole prompt, against the rate of a large product."""
    reached = prompt_operations(bench, length) / step_s / 1e12
    rate = bench.of_earlier("rates", "bf16_tflop_per_s")
    share = round(reached / rate, 3) if rate else None
    bench.row(
        "prompts", weights=types.weights, kv=types.kv, tokens=length, step_ms=round(step_s * 1e3, 3),
        tflop_per_s=round(reached, 1), share_of_rate=share,
    )  # fmt: skip
    bench.put(**{f"prompt_share_{length}{types.suffix}": share})


def _timed(bench: Bench, runner: ModelRunner, replays: Replays, batch: StepBatch) -> dict[str, Any]:
    """Time a step with its greedy draw, its replay alone, and the host's launch of a step."""
    step_s = bench.seconds_in_a_row(lambda: runner.launch(batch))
    replays.last = None
    began_at = time.perf_counter()
    step = runner.launch(batch)
    host_s = time.perf_counter() - began_at
    step.result()
    assert replays.last is not None, "every size of a decode step has a graph"
    replay_s = bench.seconds(replays.last)
    return {
        "step_ms": round(step_s * 1e3, 3),
        "replay_ms": round(replay_s * 1e3, 3),
        "host_ms": round(host_s * 1e3, 3),
    }


def bytes_of_a_step(model: LoadedModel) -> int:
    """Return the bytes of weights that a decode step reads: all weights except the table of embeddings.

    A step reads one row of that table for each sequence. The models of these benchmarks have a separate head.
    """
    assert model.model_info.embedding_size is not None, "a known model gives embeddings"
    table = model.model_info.vocab_size * model.model_info.embedding_size * model.dtype.itemsize
    return num_bytes_of(model.tensors()) - table


def _blocks_with_room(weights: int, of_block: int) -> int:
    _, total = torch.cuda.mem_get_info()
    return int((total * _ROOM - weights) // of_block)
