"""Triton kernels of a mixture of experts: which experts a token goes to, and their products.

`experts.py` says when which of them runs. Imported only there, on first use, because importing it needs Triton.

An *assignment* is one token at one of its experts: token * per_token + the rank of the expert. Assignments are put in
the order of their experts, and tiles of rows of one expert are multiplied with its matrices; tiles are found on the
device, so the number of launches and their sizes follow from the number of tokens alone. A row's sums run over tiles
of depth in one order and its products have tiles of one size, so its bits depend on nothing that shares its step.

No `from __future__ import annotations` here: Triton reads the annotations. `widen` is set in Triton's interpreter,
which cannot multiply matrices of bfloat16.
"""

import triton
import triton.language as tl

_NO_EXPERT = tl.constexpr(2**30)


@triton.jit
def route_kernel(
    scores,  # [num_tokens, num_experts]
    chosen,  # [num_tokens, per_token] int32: experts from the likeliest on
    shares,  # [num_tokens, per_token] float32: what is made of each expert's output
    num_experts: tl.constexpr,
    experts_padded: tl.constexpr,
    per_token: tl.constexpr,
    per_token_padded: tl.constexpr,
    sums_to_one: tl.constexpr,
    rounds: tl.constexpr,
):
    """The likeliest experts of a token; of equal ones the first. Grid: (num_tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, experts_padded)
    score = tl.load(scores + token * num_experts + at, mask=at < num_experts, other=float("-inf")).to(tl.float32)
    likely = tl.exp(score - tl.max(score, 0))
    likely = likely / tl.sum(likely, 0)
    likely = tl.where(at < num_experts, likely, -1.0)
    ranks = tl.arange(0, per_token_padded)
    experts = tl.zeros([per_token_padded], tl.int32)
    share = tl.zeros([per_token_padded], tl.float32)
    for rank in tl.static_range(per_token):
        best = tl.argmax(likely, 0)
        experts = tl.where(ranks == rank, best, experts)
        share = tl.where(ranks == rank, tl.max(likely, 0), share)
        likely = tl.where(at == best, -1.0, likely)
    if sums_to_one:
        share = share / tl.sum(share, 0)
    if rounds:
        share = share.to(scores.dtype.element_ty).to(tl.float32)
    tl.store(chosen + token * per_token + ranks, experts, mask=ranks < per_token)
    tl.store(shares + token * per_token + ranks, share, mask=ranks < per_token)


@triton.jit
def order_kernel(
    chosen,  # [num_assignments]
    order,  # [num_assignments] int32: assignments in the order of their experts, then in their own
    starts,  # [num_experts + 1] int32: where each expert's begin in it
    num_assignments,
    tile: tl.constexpr,
):
    """Grid: (num_experts,); each reads all assignments, which are few beside an expert's weights."""
    expert = tl.program_id(0)
    at = tl.arange(0, tile)
    below = tl.zeros([tile], tl.int32)
    for first in range(0, num_assignments, tile):
        of = tl.load(chosen + first + at, mask=first + at < num_assignments, other=_NO_EXPERT)
        below += (of < expert).to(tl.int32)
    place = tl.sum(below, 0)
    tl.store(starts + expert, place)
    for first in range(0, num_assignments, tile):
        of = tl.load(chosen + first + at, mask=first + at < num_assignments, other=_NO_EXPERT)
        own = (of == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(own, 0) - 1, first + at, mask=of == expert)
        place += tl.sum(own, 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts + expert + 1, place)


@triton.jit
def _rows_of_tile(starts, tile, num_experts: tl.constexpr, experts_padded: tl.constexpr, tile_rows: tl.constexpr):
    """The expert of a tile, its first row and where the expert's rows end; no rows for a tile beyond the last."""
    at = tl.arange(0, experts_padded)
    first = tl.load(starts + at, mask=at < num_experts, other=0)
    end = tl.load(starts + at + 1, mask=at < num_experts, other=0)
    tiles = (end - first + tile_rows - 1) // tile_rows
    tiles_so_far = tl.cumsum(tiles, 0)
    expert = tl.sum((tiles_so_far <= tile).to(tl.int32), 0)
    is_own = at == expert
    row = tl.sum(tl.where(is_own, first + (tile - tiles_so_far + tiles) * tile_rows, 0), 0)
    return expert, row, tl.sum(tl.where(is_own, end, 0), 0)


@triton.jit
def _product(left, right, total, widen: tl.constexpr):
    if widen:
        return total + tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def expert_gate_kernel(
    x,  # [num_tokens, depth]
    gate_up,  # [num_experts, 2 * size, depth]
    order,
    starts,
    output,  # [num_assignments, size], in the order of experts
    size: tl.constexpr,
    depth: tl.constexpr,
    num_experts: tl.constexpr,
    experts_padded: tl.constexpr,
    per_token: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_depth: tl.constexpr,
    widen: tl.constexpr,
):
    """SiLU(gate) times up of each assignment. Grid: (tiles of rows, as many as there can be; tiles of columns)."""
    expert, row, end = _rows_of_tile(starts, tl.program_id(0), num_experts, experts_padded, tile_rows)
    if row >= end:
        return
    rows = row + tl.arange(0, tile_rows)
    is_row = (rows < end)[:, None]
    token = tl.load(order + rows, mask=rows < end, other=0).to(tl.int64) // per_token
    columns = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    is_column = (columns < size)[None, :]
    weight = gate_up + expert.to(tl.int64) * (2 * size * depth)
    gate = tl.zeros([tile_rows, tile_columns], tl.float32)
    up = tl.zeros([tile_rows, tile_columns], tl.float32)
    for start in range(0, depth, tile_depth):
        at = start + tl.arange(0, tile_depth)
        is_at = at < depth
        left = tl.load(x + token[:, None] * depth + at[None, :], mask=is_row & is_at[None, :], other=0.0)
        place = columns[None, :] * depth + at[:, None]
        inside = is_column & is_at[:, None]
        gate = _product(left, tl.load(weight + place, mask=inside, other=0.0), gate, widen)
        up = _product(left, tl.load(weight + size * depth + place, mask=inside, other=0.0), up, widen)
    dtype = output.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    active = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    out = output + rows.to(tl.int64)[:, None] * size + columns[None, :]
    tl.store(out, (active * up.to(dtype).to(tl.float32)).to(dtype), mask=is_row & is_column)


@triton.jit
def expert_down_kernel(
    x,  # [num_assignments, depth], in the order of experts
    down,  # [num_experts, size, depth]
    order,
    starts,
    shares,  # [num_assignments], in their own order
    output,  # [num_assignments, size], in their own order
    size: tl.constexpr,
    depth: tl.constexpr,
    num_experts: tl.constexpr,
    experts_padded: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_depth: tl.constexpr,
    widen: tl.constexpr,
):
    """Each assignment's output times its share. Grid: (tiles of rows, as many as there can be; tiles of columns)."""
    expert, row, end = _rows_of_tile(starts, tl.program_id(0), num_experts, experts_padded, tile_rows)
    if row >= end:
        return
    rows = row + tl.arange(0, tile_rows)
    is_row = (rows < end)[:, None]
    assignment = tl.load(order + rows, mask=rows < end, other=0).to(tl.int64)
    columns = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    is_column = (columns < size)[None, :]
    weight = down + expert.to(tl.int64) * (size * depth)
    total = tl.zeros([tile_rows, tile_columns], tl.float32)
    for start in range(0, depth, tile_depth):
        at = start + tl.arange(0, tile_depth)
        is_at = at < depth
        left = tl.load(x + rows.to(tl.int64)[:, None] * depth + at[None, :], mask=is_row & is_at[None, :], other=0.0)
        place = columns[None, :] * depth + at[:, None]
        total = _product(left, tl.load(weight + place, mask=is_column & is_at[:, None], other=0.0), total, widen)
    dtype = output.dtype.element_ty
    share = tl.load(shares + assignment, mask=rows < end, other=0.0)
    out = output + assignment[:, None] * size + columns[None, :]
    tl.store(out, (total.to(dtype).to(tl.float32) * share[:, None]).to(dtype), mask=is_row & is_column)
