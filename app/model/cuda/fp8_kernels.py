"""Functions for Triton kernels that store or load FP8 numbers with scales, in the format of `in_fp8` in `fp8.py`.

Triton evaluates annotations, so this module cannot use `from __future__ import annotations`.
"""

import triton
import triton.language as tl

from app.model.cuda.fp8 import LARGEST, SMALLEST_SCALE

_LARGEST, _SMALLEST_SCALE = tl.constexpr(LARGEST), tl.constexpr(SMALLEST_SCALE)
_KEEPS_NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def scale_of(largest):
    """Return the scale of a row. largest: the row's largest absolute value, in float32."""
    return tl.maximum(largest / _LARGEST, _SMALLEST_SCALE)


@triton.jit
def scaled(x, scale):
    """Divide float32 numbers by their scale and clamp them to the range of FP8. NaN stays NaN."""
    return tl.clamp(x / scale, -_LARGEST, _LARGEST, propagate_nan=_KEEPS_NAN)


@triton.jit
def key_scales(
    scales,  # [num_blocks, num_kv_heads, 2, block_size]
    blocks,
    at,  # offsets inside the blocks
    heads,
    num_kv_heads: tl.constexpr,
    block_size: tl.constexpr,
):
    """Return pointers to the scales of keys. The scales of values follow `block_size` numbers later."""
    return scales + (blocks.to(tl.int64) * num_kv_heads + heads) * (2 * block_size) + at
