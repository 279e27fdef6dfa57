"""Triton kernels of the decoder for CUDA: everything between its matrix products and its attention.

`decoder.py` launches these kernels and imports this module on first use, because the import needs Triton.

Each program computes a token or a part of it, in an order that follows from the model's sizes alone, so the bits of a
row do not depend on the other rows of the step. Everything that differs between steps is read from the device, so
launches can be captured. The kernels compute in float32 and round to the model's type where transformers' code rounds,
except for products with cosines and sines.

Triton evaluates annotations, so this module cannot use `from __future__ import annotations`.
"""

import triton
import triton.language as tl

from app.model.cuda.fp8_kernels import key_scales, scale_of, scaled


@triton.jit
def _store_row(
    x,  # [padded] float32, already rounded to the model's type; 0 after the end of the row
    inside,  # [padded]: whether the number belongs to the row
    at,  # [padded]
    row,
    size: tl.constexpr,
    values,  # [num_rows, size]
    scales,  # [num_rows]; written if the values are in FP8
    in_fp8: tl.constexpr,
):
    """Store a row unchanged, or in FP8 with its scale, with the same rounding as `in_fp8` in `fp8.py`."""
    if in_fp8:
        scale = scale_of(tl.max(tl.abs(x), 0))
        tl.store(scales + row, scale)
        x = scaled(x, scale)
    tl.store(values + row * size + at, x.to(values.dtype.element_ty), mask=inside)


@triton.jit
def quantise_kernel(
    rows,  # [num_rows, size]
    values,  # [num_rows, size] FP8
    scales,  # [num_rows]
    size: tl.constexpr,
    padded: tl.constexpr,
):
    """Convert rows to FP8. Grid: (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, padded)
    x = tl.load(rows + row * size + at, mask=at < size, other=0.0).to(tl.float32)
    _store_row(x, at < size, at, row, size, values, scales, True)


@triton.jit
def _weighted_norm(x, scale, weight, dtype: tl.constexpr):
    """Return x * scale * weight in float32, rounded to `dtype` after each product, as transformers' norms round."""
    return ((x * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def add_norm_kernel(
    addends,  # [num_tokens, num_addends, size]
    residual,  # [num_tokens, size]; overwritten with the sum
    weight,  # [size]
    normed,  # [num_tokens, size]
    scales,  # [num_tokens]; written if the norm is in FP8
    epsilon,
    size: tl.constexpr,
    padded: tl.constexpr,
    num_addends: tl.constexpr,
    in_fp8: tl.constexpr,
):
    """Add the addends to the residual and compute the RMSNorm of the sum. Grid: (num_tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, padded)
    inside = at < size
    dtype = residual.dtype.element_ty
    x = tl.load(residual + token * size + at, mask=inside, other=0.0).to(tl.float32)
    if num_addends > 0:
        added = tl.zeros([padded], tl.float32)
        for index in range(num_addends):
            added += tl.load(addends + (token * num_addends + index) * size + at, mask=inside, other=0.0).to(tl.float32)
        total = (x + added.to(dtype).to(tl.float32)).to(dtype)
        tl.store(residual + token * size + at, total, mask=inside)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + epsilon)
    gain = tl.load(weight + at, mask=inside, other=0.0)
    _store_row(_weighted_norm(x, scale, gain, dtype), inside, at, token, size, normed, scales, in_fp8)


@triton.jit
def _rotated(
    heads,  # pointers to the first halves, [num_rows, half_padded]
    inside,  # [num_rows, half_padded]
    norm,  # [head_dim]
    cosine,  # [half_padded]
    sine,
    epsilon,
    half: tl.constexpr,
    half_padded: tl.constexpr,
    has_norm: tl.constexpr,
):
    """Norm heads (with `has_norm`) and rotate them. Return their first and second halves, in float32."""
    dtype = heads.dtype.element_ty
    first = tl.load(heads, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(heads + half, mask=inside, other=0.0).to(tl.float32)
    if has_norm:
        at = tl.arange(0, half_padded)
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * half) + epsilon)[:, None]
        gain = tl.load(norm + at, mask=at < half, other=0.0)
        first = _weighted_norm(first, scale, gain[None, :], dtype)
        gain = tl.load(norm + half + at, mask=at < half, other=0.0)
        second = _weighted_norm(second, scale, gain[None, :], dtype)
    turned_first = first * cosine[None, :] - second * sine[None, :]
    turned_second = second * cosine[None, :] + first * sine[None, :]
    return turned_first, turned_second


@triton.jit
def rotate_write_kernel(
    heads,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values; queries change in place
    query_norm,  # [head_dim]
    key_norm,
    rotary,  # [num_positions, head_dim]: the cosines of half a head, then the sines
    positions,  # [num_tokens]
    slots,  # [num_tokens]
    keys,  # [num_blocks, block_size, num_kv_heads, head_dim]
    values,
    scales,  # [num_blocks, num_kv_heads, 2, block_size]; written if keys and values are in FP8
    epsilon,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    half: tl.constexpr,
    group_padded: tl.constexpr,
    half_padded: tl.constexpr,
    block_size: tl.constexpr,
    has_norm: tl.constexpr,
    in_fp8: tl.constexpr,
):
    """Norm queries and keys, rotate them by their positions, and store keys and values at their slots.

    Grid: (num_tokens, num_kv_heads). A tile of queries needs at least one number for each thread: if two threads shared
    a number, one could read it after the other has already replaced it with its result.
    """
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head_dim: tl.constexpr = 2 * half
    dtype = heads.dtype.element_ty
    position, slot = tl.load(positions + token), tl.load(slots + token)
    at = tl.arange(0, half_padded)
    is_half = (at < half)[None, :]
    cosine = tl.load(rotary + position * head_dim + at, mask=at < half, other=0.0).to(tl.float32)
    sine = tl.load(rotary + position * head_dim + half + at, mask=at < half, other=0.0).to(tl.float32)
    row = heads + token * ((group + 2) * num_kv_heads * head_dim)

    in_group = tl.arange(0, group_padded)[:, None]
    queries = row + (kv_head * group + in_group) * head_dim + at[None, :]
    is_query = (in_group < group) & is_half
    first, second = _rotated(queries, is_query, query_norm, cosine, sine, epsilon, half, half_padded, has_norm)
    tl.store(queries, first.to(dtype), mask=is_query)
    tl.store(queries + half, second.to(dtype), mask=is_query)

    key = row + (group * num_kv_heads + kv_head) * head_dim + at[None, :]
    first, second = _rotated(key, is_half, key_norm, cosine, sine, epsilon, half, half_padded, has_norm)
    out = slot * (num_kv_heads * head_dim) + kv_head * head_dim + at[None, :]
    scale = key_scales(scales, slot // block_size, slot % block_size, kv_head, num_kv_heads, block_size)
    _store_head(first.to(dtype), second.to(dtype), is_half, half, keys + out, scale, in_fp8)

    value = key + num_kv_heads * head_dim
    first = tl.load(value, mask=is_half, other=0.0)
    second = tl.load(value + half, mask=is_half, other=0.0)
    _store_head(first, second, is_half, half, values + out, scale + block_size, in_fp8)


@triton.jit
def _store_head(
    first,  # [1, half_padded]: the first half of a head, in the model's type
    second,
    is_half,
    half: tl.constexpr,
    numbers,  # pointers to the first half
    scale,  # pointer; written if the numbers are in FP8
    in_fp8: tl.constexpr,
):
    """Store a key or a value unchanged, or in FP8 with its scale."""
    if in_fp8:
        first, second = first.to(tl.float32), second.to(tl.float32)
        own = scale_of(tl.maximum(tl.max(tl.abs(first)), tl.max(tl.abs(second))))
        tl.store(scale, own)
        first = scaled(first, own).to(numbers.dtype.element_ty)
        second = scaled(second, own).to(numbers.dtype.element_ty)
    tl.store(numbers, first, mask=is_half)
    tl.store(numbers + half, second, mask=is_half)


@triton.jit
def gate_kernel(
    gate_up,  # [num_tokens, 2 * size]
    output,  # [num_tokens, size]
    scales,  # [num_tokens]; written if the output is in FP8
    size: tl.constexpr,
    tile: tl.constexpr,
    in_fp8: tl.constexpr,
):
    """Compute SiLU(gate) * up. Grid: (num_tokens, tiles of a row). An FP8 row has one scale, so a tile is a row."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = at < size
    dtype = gate_up.dtype.element_ty
    gate = tl.load(gate_up + token * (2 * size) + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * (2 * size) + size + at, mask=inside, other=0.0).to(tl.float32)
    active = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    _store_row((active * up).to(dtype).to(tl.float32), inside, at, token, size, output, scales, in_fp8)
