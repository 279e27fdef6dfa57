"""Triton kernels that compute the same bits for a row, regardless of the number of rows (see `batch_invariant.py`).

Tiles have the same size for all shapes, and each sum is a single loop in a fixed order, whereas cuBLAS and torch's
reductions choose both by the number of rows. Triton evaluates annotations, so this module cannot use `from __future__
import annotations`. `widen` is set for Triton's interpreter, which cannot multiply matrices of bfloat16.
"""

import triton
import triton.language as tl


# Without this option, Triton would specialise the code for 1 row and for multiples of 16 rows, and bits could change.
@triton.jit(do_not_specialize=["num_rows", "left_batch_stride"])
def matmul_kernel(
    left,  # [num_batches, num_rows, depth]
    right,  # [num_batches, depth, num_columns]
    bias,  # [num_columns]
    row_scales,  # [num_rows] float32; read if left and right are in FP8
    column_scales,  # [num_columns] float32
    output,  # [num_batches, num_rows, num_columns], contiguous
    num_rows,
    num_columns,
    depth,
    left_batch_stride,
    left_row_stride,
    left_depth_stride,
    right_batch_stride,
    right_depth_stride,
    right_column_stride,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_depth: tl.constexpr,
    has_bias: tl.constexpr,
    has_scales: tl.constexpr,
    widen: tl.constexpr,
):
    """Multiply matrices. Grid: (row tiles, column tiles, num_batches): neighbouring programs share their weights."""
    batch = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    columns = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    in_depth = tl.arange(0, tile_depth)
    left += batch * left_batch_stride
    right += batch * right_batch_stride
    total = tl.zeros([tile_rows, tile_columns], tl.float32)
    for start in range(0, depth, tile_depth):
        at = start + in_depth
        a = tl.load(
            left + rows[:, None].to(tl.int64) * left_row_stride + at[None, :] * left_depth_stride,
            mask=(rows[:, None] < num_rows) & (at[None, :] < depth),
            other=0.0,
        )
        b = tl.load(
            right + at[:, None].to(tl.int64) * right_depth_stride + columns[None, :].to(tl.int64) * right_column_stride,
            mask=(at[:, None] < depth) & (columns[None, :] < num_columns),
            other=0.0,
        )
        if has_scales:  # convert from FP8, which is exact: Hopper would sum FP8 products in fewer bits
            a, b = a.to(tl.float32).to(output.dtype.element_ty), b.to(tl.float32).to(output.dtype.element_ty)
        if widen:
            total += tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
        else:
            total = tl.dot(a, b, total, input_precision="ieee")
    if has_scales:
        total *= tl.load(row_scales + rows, mask=rows < num_rows, other=0.0)[:, None]
        total *= tl.load(column_scales + columns, mask=columns < num_columns, other=0.0)[None, :]
    if has_bias:
        total += tl.load(bias + columns, mask=columns < num_columns, other=0.0).to(tl.float32)[None, :]
    out = (batch * num_rows + rows[:, None]) * num_columns + columns[None, :]
    tl.store(
        output + out,
        total.to(output.dtype.element_ty),
        mask=(rows[:, None] < num_rows) & (columns[None, :] < num_columns),
    )


@triton.jit
def mean_kernel(
    values,  # [num_rows, size], contiguous
    output,  # [num_rows]
    size,
    tile: tl.constexpr,
):
    """Compute the mean of each row. Grid: (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    in_tile = tl.arange(0, tile)
    total = tl.zeros([tile], tl.float32)
    for start in range(0, size, tile):
        at = start + in_tile
        total += tl.load(values + row * size + at, mask=at < size, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / size
    tl.store(output + row, mean.to(output.dtype.element_ty))
