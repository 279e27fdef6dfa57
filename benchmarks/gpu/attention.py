"""Attention alone, from a graph: how fast a decode step reads keys and values, how fast a prompt is multiplied."""

from __future__ import annotations

import torch

import app.model.backends
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.head_shapes import ON_GPU, STANDING_IN, HeadShape, attention_of, begun
from benchmarks.gpu.models import BLOCK_SIZE
from benchmarks.gpu.steps import blocks_needed, step_of


@torch.inference_mode()
def measure(bench: Bench) -> None:
    for shape in bench.sized(ON_GPU, STANDING_IN[:1]):
        for number, context in bench.sized(((64, 1024), (256, 1024), (16, 8192)), ((2, 20),)):
            took_s = _attended(bench, shape, [(context - 1, 1)] * number)
            bench.row(
                "decode", model=shape.model, sequences=number, context=context, us=round(took_s * 1e6, 1),
                gb_per_s=round(_bytes(shape, number, context) / took_s / 1e9, 1),
            )  # fmt: skip
        for length in bench.sized((512, 2048, 8192), (5,)):
            took_s = _attended(bench, shape, [(0, length)])
            bench.row(
                "prefill", model=shape.model, tokens=length, us=round(took_s * 1e6, 1),
                tflop_per_s=round(_operations(shape, length) / took_s / 1e12, 1),
            )  # fmt: skip


def _attended(bench: Bench, shape: HeadShape, pieces: list[tuple[int, int]]) -> float:
    """Seconds of one layer's attention, with the write of the new keys and values, replayed from a graph."""
    num_blocks = blocks_needed(pieces, block_size=BLOCK_SIZE)
    attention = attention_of(bench, shape, num_blocks=num_blocks, max_rows=len(pieces))
    batch = step_of(pieces, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    step, tensors, rules = (
        begun(attention, batch),
        shape.tensors(batch.num_tokens, bench.device),
        shape.rules(bench.device),
    )
    capture = vars(app.model.backends)["CudaCapture"](bench.device)
    return bench.seconds(capture(lambda: step.attend(0, *tensors, rules)))


def _bytes(shape: HeadShape, number: int, context: int) -> int:
    """Of keys and values that a decode step has to read."""
    seen = min(context, shape.window or context)
    return number * seen * 2 * shape.num_kv_heads * shape.head_dim * torch.bfloat16.itemsize


def _operations(shape: HeadShape, length: int) -> int:
    """Multiplications and additions of a causal prompt; of a window only what it sees."""
    window = min(length, shape.window or length)
    pairs = window * (window + 1) // 2 + (length - window) * window
    return 4 * shape.num_heads * shape.head_dim * pairs
