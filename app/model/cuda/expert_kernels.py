"""Triton kernels of a mixture of experts: one kernel chooses each token's experts, two compute the products.

`experts.py` launches these kernels and imports this module on first use, because the import needs Triton.

An *assignment* is one token at one of its experts, numbered token * num_chosen + the rank of the expert. Each expert
has a list of assignments, and its matrices are multiplied with tiles of that list. The tiles are computed on the
device, so the number and the sizes of launches follow from the number of tokens alone. Programs append to a list in any
order, which only determines a row's place in a tile. All tiles have one size, and sums over the depth run in a fixed
order, so the bits of a row do not depend on the other rows of the step.

Triton evaluates annotations, so this module cannot use `from __future__ import annotations`. `widen` is set for
Triton's interpreter, which cannot multiply matrices of bfloat16.
"""

import triton
import triton.language as tl


@triton.jit
def route_kernel(
    scores,  # [num_tokens, num_routed], with one more column if there is a shared expert
    lists,  # [num_routed + num_shared, num_tokens] int32: each expert's assignments
    lengths,  # [num_routed + num_shared] int32: the lengths of the lists; must be zeros before the launch
    shares,  # [num_tokens, num_chosen] float32: the factor of each expert's output
    num_routed: tl.constexpr,
    num_shared: tl.constexpr,
    experts_padded: tl.constexpr,
    num_chosen: tl.constexpr,
    chosen_padded: tl.constexpr,
    sums_to_one: tl.constexpr,
    rounds: tl.constexpr,
):
    """Choose a token's likeliest experts (ties: lower index first), then the shared ones. Grid: (num_tokens,)."""
    token, num_tokens = tl.program_id(0), tl.num_programs(0).to(tl.int64)
    row = scores + token.to(tl.int64) * (num_routed + (num_shared > 0))
    at = tl.arange(0, experts_padded)
    score = tl.load(row + at, mask=at < num_routed, other=0.0).to(tl.float32)
    # NaN and infinity become 0, so that the token still gets distinct experts: a list has room for each token once.
    score = tl.where(tl.abs(score) < float("inf"), score, 0.0)
    score = tl.where(at < num_routed, score, float("-inf"))
    likely = tl.exp(score - tl.max(score, 0))
    likely = likely / tl.sum(likely, 0)
    likely = tl.where(at < num_routed, likely, -1.0)
    ranks = tl.arange(0, chosen_padded)
    per_token: tl.constexpr = num_chosen - num_shared
    experts = num_routed - per_token + ranks  # the loop overwrites all but the shared experts
    share = tl.zeros([chosen_padded], tl.float32)
    for rank in tl.static_range(per_token):
        best = tl.argmax(likely, 0)
        experts = tl.where(ranks == rank, best, experts)
        share = tl.where(ranks == rank, tl.max(likely, 0), share)
        likely = tl.where(at == best, -1.0, likely)
    if sums_to_one:
        share = share / tl.sum(share, 0)
    if num_shared > 0:
        share = tl.where(ranks < per_token, share, tl.sigmoid(tl.load(row + num_routed).to(tl.float32)))
    if rounds:
        share = share.to(scores.dtype.element_ty).to(tl.float32)
    is_chosen = ranks < num_chosen
    place = tl.atomic_add(lengths + experts, 1, mask=is_chosen)
    assignment = token * num_chosen + ranks
    tl.store(lists + experts * num_tokens + place, assignment, mask=is_chosen)
    tl.store(shares + assignment, share, mask=is_chosen)


@triton.jit
def _place_of_tile(lengths, tile, num_experts: tl.constexpr, experts_padded: tl.constexpr, tile_rows: tl.constexpr):
    """Return a tile's expert, its start in the expert's list, and the list's length. Spare tiles get (…, 0, 0)."""
    at = tl.arange(0, experts_padded)
    length = tl.load(lengths + at, mask=at < num_experts, other=0)
    tiles = (length + tile_rows - 1) // tile_rows
    tiles_so_far = tl.cumsum(tiles, 0)
    expert = tl.sum((tiles_so_far <= tile).to(tl.int32), 0)
    is_own = at == expert
    first = tl.sum(tl.where(is_own, (tile - tiles_so_far + tiles) * tile_rows, 0), 0)
    return expert.to(tl.int64), first, tl.sum(tl.where(is_own, length, 0), 0)


@triton.jit
def product(left, right, total, widen: tl.constexpr):
    """Return total + left * right (a matrix product), in float32."""
    if widen:
        return total + tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tokens"])
def expert_gate_kernel(
    x,  # [num_tokens, depth]
    gate_up,  # [num_experts, 2 * size, depth]
    lists,
    lengths,
    output,  # [num_assignments, size]
    num_tokens,
    size: tl.constexpr,
    depth: tl.constexpr,
    num_experts: tl.constexpr,
    experts_padded: tl.constexpr,
    num_chosen: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_depth: tl.constexpr,
    widen: tl.constexpr,
):
    """Compute SiLU(gate) * up of each assignment. Grid: (the most row tiles possible, column tiles)."""
    expert, first, length = _place_of_tile(lengths, tl.program_id(0), num_experts, experts_padded, tile_rows)
    if first >= length:
        return
    place = first + tl.arange(0, tile_rows)
    is_row = (place < length)[:, None]
    assignment = tl.load(lists + expert * num_tokens + place, mask=place < length, other=0).to(tl.int64)
    token = assignment // num_chosen
    columns = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    is_column = (columns < size)[None, :]
    weight = gate_up + expert * (2 * size * depth)
    gate = tl.zeros([tile_rows, tile_columns], tl.float32)
    up = tl.zeros([tile_rows, tile_columns], tl.float32)
    for start in range(0, depth, tile_depth):
        at = start + tl.arange(0, tile_depth)
        is_at = at < depth
        left = tl.load(x + token[:, None] * depth + at[None, :], mask=is_row & is_at[None, :], other=0.0)
        inner = columns[None, :] * depth + at[:, None]
        inside = is_column & is_at[:, None]
        gate = product(left, tl.load(weight + inner, mask=inside, other=0.0), gate, widen)
        up = product(left, tl.load(weight + size * depth + inner, mask=inside, other=0.0), up, widen)
    dtype = output.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    active = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    out = output + assignment[:, None] * size + columns[None, :]
    tl.store(out, (active * up.to(dtype).to(tl.float32)).to(dtype), mask=is_row & is_column)


@triton.jit(do_not_specialize=["num_tokens"])
def expert_down_kernel(
    x,  # [num_assignments, depth]
    down,  # [num_experts, size, depth]
    lists,
    lengths,
    shares,  # [num_assignments]
    output,  # [num_assignments, size]
    num_tokens,
    size: tl.constexpr,
    depth: tl.constexpr,
    num_experts: tl.constexpr,
    experts_padded: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_depth: tl.constexpr,
    widen: tl.constexpr,
):
    """Compute each assignment's output times its share. Grid: (the most row tiles possible, column tiles)."""
    expert, first, length = _place_of_tile(lengths, tl.program_id(0), num_experts, experts_padded, tile_rows)
    if first >= length:
        return
    place = first + tl.arange(0, tile_rows)
    is_row = (place < length)[:, None]
    assignment = tl.load(lists + expert * num_tokens + place, mask=place < length, other=0).to(tl.int64)
    columns = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    is_column = (columns < size)[None, :]
    weight = down + expert * (size * depth)
    total = tl.zeros([tile_rows, tile_columns], tl.float32)
    for start in range(0, depth, tile_depth):
        at = start + tl.arange(0, tile_depth)
        is_at = at < depth
        left = tl.load(x + assignment[:, None] * depth + at[None, :], mask=is_row & is_at[None, :], other=0.0)
        inner = columns[None, :] * depth + at[:, None]
        total = product(left, tl.load(weight + inner, mask=is_column & is_at[:, None], other=0.0), total, widen)
    dtype = output.dtype.element_ty
    share = tl.load(shares + assignment, mask=place < length, other=0.0)
    out = output + assignment[:, None] * size + columns[None, :]
    tl.store(out, (total.to(dtype).to(tl.float32) * share[:, None]).to(dtype), mask=is_row & is_column)
