"""Triton kernels of paged attention. `attention.py` imports them on first use, because the import needs Triton.

The keys and values of a layer are contiguous, [num_blocks, block_size, num_kv_heads, dim]. FP8 keys and values each
have a float32 scale, [num_blocks, num_kv_heads, 2, block_size]. They are converted to the queries' type, which is
exact. Scores are then multiplied by the keys' scales, and weights by the values' scales. A program computes a
*segment*: consecutive new tokens of one sequence. A segment is a column of an integer matrix with four rows,

    [first token in the packed row, number of tokens, position of the first token, row of the block table]

A spare segment gets a position before 0, so it sees no key. The prefill kernel writes zeros for its tokens, and the
decode kernel skips it.

All kernels read segments from the device, and their grids follow from padded sizes, so a launch can be captured in a
CUDA graph and replayed for other sequences. Tiles of keys start at fixed positions and are summed in the order of
positions, so the result of a row does not depend on the other rows of the step. The running softmax comes from
FlashAttention (Dao et al., 2022), and the split over keys from Flash-Decoding (Dao, Haziza, Massa & Sizov, 2023).

Triton evaluates annotations, so this module cannot use `from __future__ import annotations`. `widen` is set for
Triton's interpreter, which cannot multiply matrices of bfloat16.
"""

import triton
import triton.language as tl

from app.model.cuda.fp8_kernels import key_scales, scale_of, scaled

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def write_kernel(
    new_keys,  # [num_tokens, num_kv_heads, key_dim]
    new_values,  # [num_tokens, num_kv_heads, value_dim]
    slots,  # [num_tokens]
    keys,  # [num_blocks, block_size, num_kv_heads, key_dim]
    values,  # [num_blocks, block_size, num_kv_heads, value_dim]
    scales,  # [num_blocks, num_kv_heads, 2, block_size]; written if keys and values are in FP8
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    num_kv_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    heads_padded: tl.constexpr,
    key_padded: tl.constexpr,
    value_padded: tl.constexpr,
    block_size: tl.constexpr,
    in_fp8: tl.constexpr,
):
    """Store the keys and values of a new token at its slot. Grid: (num_tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    heads = tl.arange(0, heads_padded)[:, None]
    is_head = heads < num_kv_heads
    key_at = tl.arange(0, key_padded)[None, :]
    value_at = tl.arange(0, value_padded)[None, :]
    is_key, is_value = is_head & (key_at < key_dim), is_head & (value_at < value_dim)
    key = tl.load(new_keys + token * key_token_stride + heads * key_head_stride + key_at, mask=is_key, other=0.0)
    value = tl.load(
        new_values + token * value_token_stride + heads * value_head_stride + value_at, mask=is_value, other=0.0
    )
    if in_fp8:
        places = key_scales(scales, slot // block_size, slot % block_size, heads, num_kv_heads, block_size)
        key = _heads_in_fp8(key, places, is_head).to(keys.dtype.element_ty)
        value = _heads_in_fp8(value, places + block_size, is_head).to(values.dtype.element_ty)
    tl.store(keys + slot * (num_kv_heads * key_dim) + heads * key_dim + key_at, key, mask=is_key)
    tl.store(values + slot * (num_kv_heads * value_dim) + heads * value_dim + value_at, value, mask=is_value)


@triton.jit
def _heads_in_fp8(x, scales, is_head):
    """Store the scales of heads, and return the heads divided by their scales, ready for FP8: [num_heads, dim]."""
    x = x.to(tl.float32)
    scale = scale_of(tl.max(tl.abs(x), 1))[:, None]
    tl.store(scales, scale, mask=is_head)
    return scaled(x, scale)


@triton.jit
def _first_tile(position, window, has_window: tl.constexpr, tile: tl.constexpr):
    """Return the start of the tile that contains the first key visible to a token at `position`."""
    first = position * 0
    if has_window:
        first = tl.maximum(position + 1 - window, 0) // tile * tile
    return first


@triton.jit
def _split_size(span, min_split: tl.constexpr, max_splits: tl.constexpr, tile: tl.constexpr):
    """Return the keys per split: whole tiles, for at most `max_splits` splits. Depends on the span of keys alone."""
    return tl.maximum(tl.cdiv(span, max_splits * tile) * tile, min_split)


@triton.jit
def _attend(
    query,  # [num_rows, key_padded]
    positions,  # [num_rows], the position of each row's token
    highest,  # [num_rows], the highest score so far, as an exponent of 2
    total,  # [num_rows], the sum of the weights so far
    weighted,  # [num_rows, value_padded], the weighted sum of the values so far
    keys,  # pointer to the keys of this KV head at slot 0
    values,
    scales,  # pointer to the scales of this KV head at block 0; read if keys and values are in FP8
    table,  # the block table of this sequence
    first,  # keys at positions first, …, last - 1 are read; must be a multiple of tile
    last,  # must be a multiple of tile unless `masked`
    scale,
    cap,
    window,
    num_kv_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_padded: tl.constexpr,
    value_padded: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
    widen: tl.constexpr,
    in_fp8: tl.constexpr,
    masked: tl.constexpr,
):
    """Add a range of keys to the running softmax. Without `masked`, every row must see all of these keys."""
    key_at = tl.arange(0, key_padded)
    value_at = tl.arange(0, value_padded)
    in_tile = tl.arange(0, tile)
    dtype = query.dtype
    blocks = _blocks(table, first, last, block_size, tile)
    for start in range(first, last, tile):
        at = start + in_tile
        is_own = at < last
        slots = blocks.to(tl.int64) * block_size + at % block_size
        scale_places = key_scales(scales, blocks, at % block_size, 0, num_kv_heads, block_size)
        # Load the next tile's blocks a tile ahead, so that the loads of its keys do not wait for their addresses.
        blocks = _blocks(table, start + tile, last, block_size, tile)
        key_places = keys + slots[None, :] * (num_kv_heads * key_dim) + key_at[:, None]
        value_places = values + slots[:, None] * (num_kv_heads * value_dim) + value_at[None, :]
        # Slots from `last` on may contain anything. Load zeros, because NaN stays NaN even with a weight of zero.
        if masked:
            key = tl.load(key_places, mask=is_own[None, :] & (key_at[:, None] < key_dim), other=0.0)
            value = tl.load(value_places, mask=is_own[:, None] & (value_at[None, :] < value_dim), other=0.0)
        elif key_dim == key_padded and value_dim == value_padded:
            key, value = tl.load(key_places), tl.load(value_places)
        else:
            key = tl.load(key_places, mask=key_at[:, None] < key_dim, other=0.0)
            value = tl.load(value_places, mask=value_at[None, :] < value_dim, other=0.0)
        if widen:
            scores = tl.dot(query.to(tl.float32), key.to(tl.float32), input_precision="ieee") * scale
        else:
            scores = tl.dot(query, key.to(dtype), input_precision="ieee") * scale
        if in_fp8:
            if masked:
                key_scale = tl.load(scale_places, mask=is_own, other=0.0)
                value_scale = tl.load(scale_places + block_size, mask=is_own, other=0.0)
            else:
                key_scale, value_scale = tl.load(scale_places), tl.load(scale_places + block_size)
            scores *= key_scale[None, :]
        if has_cap:
            scores = (2.0 * tl.sigmoid(2.0 * scores) - 1.0) * cap  # tanh
        if masked:
            visible = at[None, :] <= positions[:, None]
            if has_window:
                visible = visible & (at[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        subtract = higher
        if masked:
            # A row that has seen no key yet has -inf as its highest score, and -inf - -inf would be NaN.
            subtract = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - subtract[:, None])
        shrink = tl.exp2(highest - subtract)
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None]
        if in_fp8:
            weights *= value_scale[None, :]
        if widen:
            weighted += tl.dot(weights.to(dtype).to(tl.float32), value.to(tl.float32), input_precision="ieee")
        else:
            weighted = tl.dot(weights.to(dtype), value.to(dtype), weighted, input_precision="ieee")
        highest = higher
    return highest, total, weighted


@triton.jit
def _blocks(table, start, last, block_size: tl.constexpr, tile: tl.constexpr):
    """Return the block of each key in a tile, or one block if the tile is in one. Keys from `last` on get any block."""
    at = start if block_size % tile == 0 else start + tl.arange(0, tile)
    return tl.load(table + tl.maximum(tl.minimum(at, last - 1), 0) // block_size)


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    query,  # [num_tokens, num_heads, key_dim]
    keys,
    values,
    scales,  # [num_blocks, num_kv_heads, 2, block_size]; read if keys and values are in FP8
    tables,  # [num_table_rows, table_stride]
    segments,  # [4, num_segments], of one token each
    sinks,  # [num_heads]
    output,  # [num_tokens, num_heads, value_dim]
    highest_out,  # [num_segments, num_heads, max_splits]
    total_out,  # [num_segments, num_heads, max_splits]
    weighted_out,  # [num_segments, num_heads, max_splits, value_dim]
    query_token_stride,
    query_head_stride,
    scale,
    cap,
    window,
    table_stride,
    group: tl.constexpr,
    num_rows: tl.constexpr,
    num_kv_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_padded: tl.constexpr,
    value_padded: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    min_split: tl.constexpr,
    max_splits: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
    has_sinks: tl.constexpr,
    widen: tl.constexpr,
    in_fp8: tl.constexpr,
):
    """Attend from single tokens to splits of their keys in parallel. A tile's rows are the query heads of a KV head.

    Writes the final output of tokens with a single split; `reduce_kernel` joins several splits. Grid: (num_segments,
    num_kv_heads, num_lanes). Each lane computes every num_lanes-th split, so the number of programs does not affect
    the splits.
    """
    segment, kv_head, lane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_segments = tl.num_programs(0)
    position = tl.load(segments + 2 * num_segments + segment).to(tl.int32)
    first = _first_tile(position, window, has_window, tile)
    split = _split_size(position + 1 - first, min_split, max_splits, tile)
    num_splits = tl.cdiv(position + 1 - first, split)
    if lane >= num_splits:
        return
    token = tl.load(segments + segment).to(tl.int64)
    table = tables + tl.load(segments + 3 * num_segments + segment).to(tl.int64) * table_stride
    rows = tl.arange(0, num_rows)
    heads = kv_head * group + rows
    key_at = tl.arange(0, key_padded)
    value_at = tl.arange(0, value_padded)
    queries = tl.load(
        query + token * query_token_stride + heads[:, None] * query_head_stride + key_at[None, :],
        mask=(rows[:, None] < group) & (key_at[None, :] < key_dim),
        other=0.0,
    )
    positions = tl.zeros([num_rows], tl.int32) + position
    is_row = rows < group
    out_mask = is_row[:, None] & (value_at[None, :] < value_dim)
    parts = (segment.to(tl.int64) * (num_kv_heads * group) + heads) * max_splits
    for index in range(lane, num_splits, tl.num_programs(2)):
        start = first + index * split
        highest, total, weighted = _attend(
            queries, positions, tl.full([num_rows], float("-inf"), tl.float32), tl.zeros([num_rows], tl.float32),
            tl.zeros([num_rows, value_padded], tl.float32),
            keys + kv_head * key_dim, values + kv_head * value_dim, scales + kv_head * (2 * block_size), table,
            start, tl.minimum(start + split, position + 1), scale, cap, window,
            num_kv_heads, key_dim, value_dim, key_padded, value_padded, block_size, tile,
            has_window, has_cap, widen, in_fp8, True,
        )  # fmt: skip
        if num_splits == 1:
            if has_sinks:
                total, weighted = _with_sink(sinks + heads, is_row, highest, total, weighted)
            out = (token * (num_kv_heads * group) + heads)[:, None] * value_dim + value_at[None, :]
            tl.store(output + out, (weighted / total[:, None]).to(output.dtype.element_ty), mask=out_mask)
        else:
            tl.store(highest_out + parts + index, highest, mask=is_row)
            tl.store(total_out + parts + index, total, mask=is_row)
            tl.store(weighted_out + (parts + index)[:, None] * value_dim + value_at[None, :], weighted, mask=out_mask)


@triton.jit
def _with_sink(sinks, is_row, highest, total, weighted):
    """Rescale `total` and `weighted` to include each row's sink, add its weight to `total`, and return both."""
    sink = tl.load(sinks, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
    above = tl.maximum(highest, sink)
    shrink = tl.exp2(highest - above)
    return total * shrink + tl.exp2(sink - above), weighted * shrink[:, None]


@triton.jit
def reduce_kernel(
    highest_in,  # [num_segments, num_heads, max_splits]
    total_in,
    weighted_in,  # [num_segments, num_heads, max_splits, value_dim]
    segments,  # [4, num_segments]
    sinks,  # [num_heads]
    output,  # [num_tokens, num_heads, value_dim]
    window,
    value_dim: tl.constexpr,
    value_padded: tl.constexpr,
    tile: tl.constexpr,
    min_split: tl.constexpr,
    max_splits: tl.constexpr,
    has_window: tl.constexpr,
    has_sinks: tl.constexpr,
):
    """Join the splits of one head and token; does nothing for a single split. Grid: (num_segments, num_heads)."""
    segment, head = tl.program_id(0), tl.program_id(1)
    num_segments, num_heads = tl.num_programs(0), tl.num_programs(1)
    position = tl.load(segments + 2 * num_segments + segment).to(tl.int32)
    span = position + 1 - _first_tile(position, window, has_window, tile)
    num_splits = tl.cdiv(span, _split_size(span, min_split, max_splits, tile))
    if num_splits <= 1:
        return
    splits = tl.arange(0, max_splits)
    value_at = tl.arange(0, value_padded)
    row = (segment.to(tl.int64) * num_heads + head) * max_splits
    highest = tl.load(highest_in + row + splits, mask=splits < num_splits, other=float("-inf"))
    total = tl.load(total_in + row + splits, mask=splits < num_splits, other=0.0)
    weighted = tl.load(
        weighted_in + (row + splits)[:, None] * value_dim + value_at[None, :],
        mask=(splits[:, None] < num_splits) & (value_at[None, :] < value_dim),
        other=0.0,
    )
    above = tl.max(highest, 0)
    if has_sinks:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        above = tl.maximum(above, sink)
    shares = tl.exp2(highest - above)
    denominator = tl.sum(shares * total, 0)
    if has_sinks:
        denominator += tl.exp2(sink - above)
    result = tl.sum(weighted * shares[:, None], 0) / denominator
    token = tl.load(segments + segment).to(tl.int64)
    out = output + (token * num_heads + head) * value_dim + value_at
    tl.store(out, result.to(output.dtype.element_ty), mask=value_at < value_dim)


@triton.jit(do_not_specialize=["table_stride"])
def prefill_kernel(
    query,  # [num_tokens, num_heads, key_dim]
    keys,
    values,
    scales,  # [num_blocks, num_kv_heads, 2, block_size]; read if keys and values are in FP8
    tables,  # [num_table_rows, table_stride]
    segments,  # [4, num_segments], of at most num_rows // group tokens each
    sinks,  # [num_heads]
    output,  # [num_tokens, num_heads, value_dim]
    query_token_stride,
    query_head_stride,
    scale,
    cap,
    window,
    table_stride,
    group: tl.constexpr,
    num_rows: tl.constexpr,
    num_kv_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_padded: tl.constexpr,
    value_padded: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    has_window: tl.constexpr,
    has_cap: tl.constexpr,
    has_sinks: tl.constexpr,
    widen: tl.constexpr,
    in_fp8: tl.constexpr,
    masks_all: tl.constexpr,
):
    """Attend from several new tokens of a sequence to the keys in its blocks. Grid: (num_segments, num_kv_heads).

    The rows of a tile are tokens times the query heads of one KV head, so each key is loaded once for all rows. Most
    tiles of keys are visible to all rows and need no mask. With `masks_all`, every tile is masked, because the compiler
    may round differently without a mask.
    """
    num_segments = tl.num_programs(0)
    # Start with the last pieces of a prompt: they see the most keys, and should not run alone at the end.
    segment, kv_head = num_segments - 1 - tl.program_id(0), tl.program_id(1)
    token = tl.load(segments + segment).to(tl.int64)
    num_tokens = tl.load(segments + num_segments + segment).to(tl.int32)
    start = tl.load(segments + 2 * num_segments + segment).to(tl.int32)
    table = tables + tl.load(segments + 3 * num_segments + segment).to(tl.int64) * table_stride
    rows = tl.arange(0, num_rows)
    in_segment = rows // group
    is_row = in_segment < num_tokens
    heads = kv_head * group + rows % group
    key_at = tl.arange(0, key_padded)
    value_at = tl.arange(0, value_padded)
    queries = tl.load(
        query
        + (token + in_segment)[:, None] * query_token_stride
        + heads[:, None] * query_head_stride
        + key_at[None, :],
        mask=is_row[:, None] & (key_at[None, :] < key_dim),
        other=0.0,
    )
    # Rows after the last token repeat its position, and their results are discarded.
    positions = start + tl.minimum(in_segment, num_tokens - 1)
    highest = tl.full([num_rows], float("-inf"), tl.float32)
    total = tl.zeros([num_rows], tl.float32)
    weighted = tl.zeros([num_rows, value_padded], tl.float32)
    first, last = _first_tile(start, window, has_window, tile), start + num_tokens
    if not masks_all:
        # Every row sees the keys between the start of the last row's window and the position of the first row.
        seen_first = first
        if has_window:
            seen_first = tl.minimum(tl.cdiv(tl.maximum(last - window, 0), tile) * tile, last)
            highest, total, weighted = _attend(
                queries, positions, highest, total, weighted,
                keys + kv_head * key_dim, values + kv_head * value_dim, scales + kv_head * (2 * block_size), table,
                first, seen_first, scale, cap, window,
                num_kv_heads, key_dim, value_dim, key_padded, value_padded, block_size, tile,
                has_window, has_cap, widen, in_fp8, True,
            )  # fmt: skip
        first = tl.maximum((start + 1) // tile * tile, seen_first)
        highest, total, weighted = _attend(
            queries, positions, highest, total, weighted,
            keys + kv_head * key_dim, values + kv_head * value_dim, scales + kv_head * (2 * block_size), table,
            seen_first, first, scale, cap, window,
            num_kv_heads, key_dim, value_dim, key_padded, value_padded, block_size, tile,
            has_window, has_cap, widen, in_fp8, False,
        )  # fmt: skip
    highest, total, weighted = _attend(
        queries, positions, highest, total, weighted,
        keys + kv_head * key_dim, values + kv_head * value_dim, scales + kv_head * (2 * block_size), table,
        first, last, scale, cap, window,
        num_kv_heads, key_dim, value_dim, key_padded, value_padded, block_size, tile,
        has_window, has_cap, widen, in_fp8, True,
    )  # fmt: skip
    if has_sinks:
        total, weighted = _with_sink(sinks + heads, is_row, highest, total, weighted)
    result = weighted / tl.where(total == 0.0, 1.0, total)[:, None]  # spare segments get zeros
    out = (token + in_segment)[:, None] * (num_kv_heads * group) + heads[:, None]
    tl.store(
        output + out * value_dim + value_at[None, :],
        result.to(output.dtype.element_ty),
        mask=is_row[:, None] & (value_at[None, :] < value_dim),
    )
