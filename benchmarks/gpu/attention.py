"""Measure attention alone, from a graph, beside torch's own attention: the rate of bytes in decode, of products in
prefill. Also measures other launches of the same kernels: stages of the pipeline, warps, keys in a tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.nn import functional

from app.errors import described
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.graphs import captured
from benchmarks.gpu.head_shapes import ON_GPU, STANDING_IN, HeadShape, attention_of, begun
from benchmarks.gpu.steps import blocks_needed, step_of
from benchmarks.harness.command import tell

Pieces = list[tuple[int, int]]


@torch.inference_mode()
def measure(bench: Bench) -> None:
    shapes = bench.sized(ON_GPU, STANDING_IN[:1])
    decode = bench.sized(((64, 1024), (256, 1024), (16, 8192)), ((2, 20),))
    for shape, (number, context) in bench.parts("decode", product(shapes, decode)):
        took_s, theirs_s = _attended(bench, shape, [(context - 1, 1)] * number), _torchs(bench, shape, number, context)
        bench.row(
            "decode", model=shape.model, sequences=number, context=context, us=_us(took_s),
            gb_per_s=round(_bytes(shape, number, context) / took_s / 1e9, 1), torch_us=_us(theirs_s),
        )  # fmt: skip
    for shape, length in bench.parts("prefill", product(shapes, bench.sized((512, 2048, 8192), (5,)))):
        took_s, theirs_s = _attended(bench, shape, [(0, length)]), _torchs(bench, shape, 1, length, is_prompt=True)
        bench.row(
            "prefill", model=shape.model, tokens=length, us=_us(took_s),
            tflop_per_s=round(_operations(shape, length) / took_s / 1e12, 1), torch_us=_us(theirs_s),
        )  # fmt: skip
    _sweep(bench, "decode", shapes[0], bench.sized([(1023, 1)] * 64, [(19, 1)] * 2))
    _sweep(bench, "prefill", shapes[0], bench.sized([(0, 4096)], [(0, 5)]))


def _torchs(bench: Bench, shape: HeadShape, number: int, context: int, *, is_prompt: bool = False) -> float | None:
    """Return the seconds of torch's own attention on equal sizes, with contiguous keys and values instead of blocks.

    Returns None if torch has no such attention or refuses the call.
    """
    if shape.window or shape.softcap or shape.has_sinks:
        return None
    sizes = ((shape.num_heads, context if is_prompt else 1), *[(shape.num_kv_heads, context)] * 2)
    query, key, value = (torch.randn(number, *size, shape.head_dim, device=bench.device).bfloat16() for size in sizes)
    attend = partial(
        functional.scaled_dot_product_attention, query, key, value, is_causal=is_prompt, enable_gqa=True
    )  # fmt: skip
    try:
        return bench.seconds(captured(attend, bench.device))
    except RuntimeError as error:
        tell(f"torch's attention: {described(error)}")
        return None


def _sweep(bench: Bench, kind: str, shape: HeadShape, pieces: Pieces) -> None:
    """Measure other launches of the kernels. The first launch is the one in use."""
    stages, warps, tiles = bench.sized(((2, 3, 4), (4, 8), (32, 64)), ((2,), (4,), (16,)))
    options = (
        {"num_stages": stage, "num_warps": warp, "tile": tile} for stage, warp, tile in product(stages, warps, tiles)
    )
    name = f"launches of {kind}"
    for launch in bench.parts(name, ({}, *options)):
        said = ", ".join(f"{key} {value}" for key, value in launch.items()) or "as it is"
        try:
            took_us, refused = _us(_attended(bench, shape, pieces, launch)), None
        except Exception as error:  # too much shared memory, or a tile that a kernel refuses
            took_us, refused = None, described(error)[:120]
        bench.row(name, launch=said, us=took_us, refused=refused)
    found = [(row["us"], row["launch"]) for row in bench.tables[name] if row["us"] is not None]
    bench.put(**{f"best_{kind}": min(found)[1] if found else "none"})


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 1)


def _attended(bench: Bench, shape: HeadShape, pieces: Pieces, launch: Mapping[str, int] | None = None) -> float:
    """Return the seconds of one layer's attention with the write of new keys and values, replayed from a graph."""
    num_blocks = blocks_needed(pieces)
    attention = attention_of(bench, shape, num_blocks=num_blocks, max_rows=len(pieces))
    if launch:
        attention.kernels = _Launched(attention.kernels, launch)
    batch = step_of(pieces, num_blocks=num_blocks)
    step, tensors = begun(attention, batch), shape.tensors(batch.num_tokens, bench.device)
    rules = shape.rules(bench.device)
    return bench.seconds(captured(lambda: step.attend(0, *tensors, rules), bench.device))


class _Launched:
    """The kernels' module. `options` replace the options of a launch that have the same names."""

    def __init__(self, kernels: Any, options: Mapping[str, int]) -> None:
        self._kernels = kernels
        self._options = options

    def __getattr__(self, name: str) -> Any:
        return _Kernel(getattr(self._kernels, name), self._options)


class _Kernel:
    def __init__(self, kernel: Any, options: Mapping[str, int]) -> None:
        self._kernel = kernel
        self._options = options

    def __getitem__(self, grid: object) -> Any:
        launch = self._kernel[grid]

        def changed(*arguments: object, **given: object) -> Any:
            return launch(*arguments, **given | {key: own for key, own in self._options.items() if key in given})

        return changed


def _bytes(shape: HeadShape, number: int, context: int) -> int:
    """Return the bytes of keys and values that a decode step has to read."""
    seen = min(context, shape.window or context)
    return number * seen * 2 * shape.num_kv_heads * shape.head_dim * torch.bfloat16.itemsize


def _operations(shape: HeadShape, length: int) -> int:
    """Return the multiplications and additions of a causal prompt. With a window, only visible keys count."""
    window = min(length, shape.window or length)
    pairs = window * (window + 1) // 2 + (length - window) * window
    return 4 * shape.num_heads * shape.head_dim * pairs
