"""Parts of Triton kernels that write or read numbers in FP8 with their scales, as `in_fp8` of `fp8.py` has them.

No `from __future__ import annotations` here: Triton reads the annotations.
"""

import triton
import triton.language as tl

from app.model.cuda.fp8 import LARGEST, SMALLEST_SCALE

_LARGEST, _SMALLEST_SCALE = tl.constexpr(LARGEST), tl.constexpr(SMALLEST_SCALE)
_KEEPS_NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def scale_of(largest):
    """The scale of rows, by the largest size of their numbers in float32."""
    return tl.maximum(largest / _LARGEST, _SMALLEST_SCALE)


@triton.jit
def scaled(x, scale):
    """Numbers in float32 as they are rounded to FP8. What is not a number stays so."""
    return tl.clamp(x / scale, -_LARGEST, _LARGEST, propagate_nan=_KEEPS_NAN)


@triton.jit
def key_scales(
    scales,  # [num_blocks, num_kv_heads, 2, block_size]
    blocks,
    at,  # places in their blocks
    heads,
    num_kv_heads: tl.constexpr,
    block_size: tl.constexpr,
):
    """Where the scales of keys lie in KV memory; those of the same tokens' values are `block_size` further on."""
    return scales + (blocks.to(tl.int64) * num_kv_heads + heads) * (2 * block_size) + at
