"""Triton kernels of LoRA adapters: two grouped products, first to the rank and then to the outputs of a layer.

`adapters.py` launches these kernels and imports this module on first use, because the import needs Triton.

All rows of a tile use the same adapter. The kernels read tiles, ranks and matrices from the device, and the grid covers
the largest possible number of tiles, so one captured launch serves every mix of adapters. A program without work reads
two numbers and returns. Tiles have a fixed size and are summed in a fixed order, so the bits of a row do not depend on
the other rows.

Triton evaluates annotations, so this module cannot use `from __future__ import annotations`. `widen` is set for
Triton's interpreter, which cannot multiply matrices of bfloat16.
"""

import triton
import triton.language as tl

from app.model.cuda.expert_kernels import product


@triton.jit
def _rows_of_tile(tiles, order, num_tiles, rows: tl.constexpr):
    """Return the rows of this program's tile: their indices in `order`, their tokens, and a mask of the used rows."""
    tile, at = tl.program_id(0), tl.arange(0, rows)
    is_row = at < tl.load(tiles + 2 * num_tiles + tile)
    places = tl.load(tiles + num_tiles + tile) + at
    return places, tl.load(order + places, mask=is_row, other=0), is_row


@triton.jit(do_not_specialize=["num_places"])
def shrink_kernel(
    x,  # [num_tokens, num_inputs]
    scales,  # [num_tokens]; read if x is in FP8
    order,  # [num_places] int64: tokens, grouped by adapter
    tiles,  # [3, num_tiles] int64: slot, first index in `order`, number of rows; the slot of an unused tile is -1
    down,  # [num_slots, num_parts, max_rank, num_inputs]
    ranks,  # [num_parts, num_slots] int32; 0 if the adapter does not change this part
    low,  # [num_splits, num_places, num_parts, max_rank] float32; written up to the rank, rounded up to a tile
    num_places,
    num_slots: tl.constexpr,
    num_parts: tl.constexpr,
    num_inputs: tl.constexpr,
    max_rank: tl.constexpr,
    split: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_ranks: tl.constexpr,
    tile_depth: tl.constexpr,
    in_fp8: tl.constexpr,
    widen: tl.constexpr,
):
    """Multiply one split of the inputs by `down`. Grid: (num_tiles, num_parts * rank tiles, num_splits)."""
    num_tiles = tl.num_programs(0)
    slot = tl.load(tiles + tl.program_id(0))
    rank_tiles: tl.constexpr = max_rank // tile_ranks
    part, rank_tile = tl.program_id(1) // rank_tiles, tl.program_id(1) % rank_tiles
    rank = tl.load(ranks + part * num_slots + slot, mask=slot >= 0, other=0)
    if rank_tile * tile_ranks >= rank:
        return
    places, tokens, is_row = _rows_of_tile(tiles, order, num_tiles, tile_rows)
    ranks_here = rank_tile * tile_ranks + tl.arange(0, tile_ranks)
    matrix = down + (slot * num_parts + part) * (max_rank * num_inputs)
    dtype = down.dtype.element_ty
    total = tl.zeros([tile_rows, tile_ranks], tl.float32)
    for start in range(0, split, tile_depth):
        at = tl.program_id(2) * split + start + tl.arange(0, tile_depth)
        is_at = at < num_inputs
        left = tl.load(x + tokens[:, None] * num_inputs + at[None, :], mask=is_row[:, None] & is_at[None, :], other=0.0)
        if in_fp8:
            scale = tl.load(scales + tokens, mask=is_row, other=0.0)
            left = (left.to(tl.float32) * scale[:, None]).to(dtype)
        right = tl.load(
            matrix + ranks_here[None, :] * num_inputs + at[:, None],
            mask=(ranks_here < rank)[None, :] & is_at[:, None],
            other=0.0,
        )
        total = product(left, right, total, widen)
    row = (tl.program_id(2) * num_places + places) * num_parts + part
    tl.store(low + row[:, None] * max_rank + ranks_here[None, :], total, mask=is_row[:, None])


@triton.jit(do_not_specialize=["num_places"])
def expand_kernel(
    low,  # the output of `shrink_kernel`
    order,
    tiles,
    up,  # [num_slots, num_outputs, max_rank]
    ranks,
    output,  # [num_tokens, num_outputs]: the outputs of all parts, one part after the other; changed in place
    num_places,
    num_slots: tl.constexpr,
    num_parts: tl.constexpr,
    first_size: tl.constexpr,  # the number of outputs of each part; 0 if there is no such part
    second_size: tl.constexpr,
    third_size: tl.constexpr,
    max_rank: tl.constexpr,
    num_splits: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_ranks: tl.constexpr,
    tile_columns: tl.constexpr,
    widen: tl.constexpr,
):
    """Multiply `low` by `up` and add the products to the outputs. Grid: (num_tiles, column tiles of all parts).

    A tile needs at least one number for each thread: two threads that update one number in place could add it twice.
    """
    num_tiles = tl.num_programs(0)
    num_outputs: tl.constexpr = first_size + second_size + third_size
    second_tile: tl.constexpr = (first_size + tile_columns - 1) // tile_columns
    third_tile: tl.constexpr = second_tile + (second_size + tile_columns - 1) // tile_columns
    slot, column_tile = tl.load(tiles + tl.program_id(0)), tl.program_id(1)
    part = (column_tile >= second_tile).to(tl.int32) + (column_tile >= third_tile).to(tl.int32)
    rank = tl.load(ranks + part * num_slots + slot, mask=slot >= 0, other=0)
    if rank == 0:
        return
    first_tile = tl.where(part == 0, 0, tl.where(part == 1, second_tile, third_tile))
    begin = tl.where(part == 0, 0, tl.where(part == 1, first_size, first_size + second_size))
    size = tl.where(part == 0, first_size, tl.where(part == 1, second_size, third_size))
    in_part = (column_tile - first_tile) * tile_columns + tl.arange(0, tile_columns)
    is_column, columns = in_part < size, begin + in_part
    places, tokens, is_row = _rows_of_tile(tiles, order, num_tiles, tile_rows)
    matrix = up + slot * (num_outputs * max_rank)
    dtype = up.dtype.element_ty
    total = tl.zeros([tile_rows, tile_columns], tl.float32)
    for start in range(0, rank, tile_ranks):
        ranks_here = start + tl.arange(0, tile_ranks)
        left = tl.zeros([tile_rows, tile_ranks], tl.float32)
        for number in range(num_splits):
            row = (number * num_places + places) * num_parts + part
            left += tl.load(low + row[:, None] * max_rank + ranks_here[None, :], mask=is_row[:, None], other=0.0)
        right = tl.load(
            matrix + columns[None, :] * max_rank + ranks_here[:, None],
            mask=is_column[None, :] & (ranks_here < rank)[:, None],
            other=0.0,
        )
        total = product(left.to(dtype), right, total, widen)
    out = output + tokens[:, None] * num_outputs + columns[None, :]
    is_own = is_row[:, None] & is_column[None, :]
    total += tl.load(out, mask=is_own, other=0.0).to(tl.float32)
    tl.store(out, total.to(output.dtype.element_ty), mask=is_own)
