"""Triton kernels of the operators with a recurrent state, which `Recurrence` in `app/model/recurrence.py` defines.

`recurrence.py` next to this file launches the kernels and imports them on first use, because the import needs Triton.

A program computes some channels, or some values of one head, for one *chain*: a list of pieces that must run one after
the other, such as all pieces of a sequence. Within a piece, tokens run one after the other as well, as in the recurrent
kernels of fla (flash-linear-attention). The bits of a token therefore depend only on the earlier tokens of its own
sequence.

A table on the device contains a row of four numbers for each chain, followed by a row for each piece: [first token in
the packed row, number of tokens, slot to read, slot to write]. The first two numbers in a chain's row are the table
rows of its first piece and of the end of its pieces.

All kernels read the chains from the device, and their grids follow from sizes, so a launch can be captured in a CUDA
graph and replayed for other sequences. A chain without pieces does nothing.

Triton evaluates annotations, so this module cannot use `from __future__ import annotations`.
"""

import triton
import triton.language as tl


@triton.jit
def _piece(chains, row):
    """Load a piece and return its first token, the end of its tokens, the slot to read, and the slot to write."""
    first = tl.load(chains + row * 4).to(tl.int64)
    end = first + tl.load(chains + row * 4 + 1)
    # Wait for the program's other threads, which may still read or write the same slots for the previous piece.
    tl.debug_barrier()
    return first, end, tl.load(chains + row * 4 + 2).to(tl.int64), tl.load(chains + row * 4 + 3).to(tl.int64)


@triton.jit
def convolution_kernel(
    inputs,  # [num_tokens, num_channels]
    weight,  # [num_channels, kernel_size], contiguous
    bias,  # [num_channels]; read with `has_bias`
    states,  # [num_slots, kernel_size - 1, num_channels]
    chains,  # [num_chains + num_pieces, 4] int32
    outputs,  # [num_tokens, num_channels], contiguous
    input_stride,  # the stride of a token
    slot_stride,
    num_channels: tl.constexpr,
    kernel_size: tl.constexpr,
    kept_padded: tl.constexpr,  # the kernel_size - 1 inputs in a state, padded
    tile_tokens: tl.constexpr,
    tile_channels: tl.constexpr,
    has_bias: tl.constexpr,
    has_silu: tl.constexpr,
):
    """Run the short convolution. Grid: (channel tiles, num_chains)."""
    kept: tl.constexpr = kernel_size - 1
    channels = tl.program_id(0) * tile_channels + tl.arange(0, tile_channels)
    inside = (channels < num_channels)[None, :]
    in_tile, in_state = tl.arange(0, tile_tokens)[:, None], tl.arange(0, kept_padded)[:, None]
    chain = chains + tl.program_id(1) * 4
    for row in range(tl.load(chain), tl.load(chain + 1)):
        first, end, read, written = _piece(chains, row)
        before = states + read * slot_stride + channels[None, :]  # the last inputs before the piece
        has_state = read >= 0
        for start in range(first, end, tile_tokens):
            tokens = start + in_tile
            is_own = (tokens < end) & inside
            total = tl.zeros([tile_tokens, tile_channels], tl.float32)
            for tap in tl.static_range(kernel_size):
                at = tokens - (kept - tap)
                is_seen = at < first
                seen = tl.load(
                    before + (at - first + kept) * num_channels, mask=is_own & is_seen & has_state, other=0.0
                ).to(tl.float32)
                new = tl.load(
                    inputs + at * input_stride + channels[None, :], mask=is_own & (at >= first), other=0.0
                ).to(tl.float32)
                factor = tl.load(weight + channels * kernel_size + tap, mask=channels < num_channels, other=0.0)
                total += tl.where(is_seen, seen, new) * factor.to(tl.float32)[None, :]
            if has_bias:
                total += tl.load(bias + channels, mask=channels < num_channels, other=0.0).to(tl.float32)[None, :]
            if has_silu:
                total = total * tl.sigmoid(total)
            tl.store(
                outputs + tokens * num_channels + channels[None, :], total.to(outputs.dtype.element_ty), mask=is_own
            )
        at = end - kept + in_state
        is_kept = (in_state < kept) & inside
        is_seen = at < first
        seen = tl.load(before + (at - first + kept) * num_channels, mask=is_kept & is_seen & has_state, other=0.0)
        new = tl.load(inputs + at * input_stride + channels[None, :], mask=is_kept & (at >= first), other=0.0)
        last = states + written * slot_stride + in_state * num_channels + channels[None, :]
        tl.store(last, tl.where(is_seen, seen, new), mask=is_kept)


@triton.jit
def delta_rule_kernel(
    query,  # [num_tokens, num_key_heads, key_dim]
    key,  # [num_tokens, num_key_heads, key_dim]
    value,  # [num_tokens, num_value_heads, value_dim]
    decay,  # [num_tokens, num_value_heads], as a logarithm
    beta,  # [num_tokens, num_value_heads]
    states,  # [num_slots, num_value_heads, key_dim, value_dim] float32
    chains,  # [num_chains + num_pieces, 4] int32
    outputs,  # [num_tokens, num_value_heads, value_dim], contiguous
    query_stride,  # the stride of a token, like the other strides without "head" or "slot"
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    decay_stride,
    beta_stride,
    slot_stride,
    scale,
    epsilon,  # added to the squared length of a query or a key
    num_heads: tl.constexpr,  # value heads
    group: tl.constexpr,  # value heads for each key head
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_padded: tl.constexpr,
    tile: tl.constexpr,
    normalises: tl.constexpr,
):
    """Run the gated delta rule. Grid: (value tiles, num_heads, num_chains)."""
    columns = tl.program_id(0) * tile + tl.arange(0, tile)
    head = tl.program_id(1)
    key_at = tl.arange(0, key_padded)
    is_key, is_column = key_at < key_dim, columns < value_dim
    in_slot = head * (key_dim * value_dim) + key_at[:, None] * value_dim + columns[None, :]
    is_state = is_key[:, None] & is_column[None, :]
    queries = query + (head // group) * query_head_stride + key_at
    keys = key + (head // group) * key_head_stride + key_at
    values = value + head * value_head_stride + columns
    chain = chains + tl.program_id(2) * 4
    for row in range(tl.load(chain), tl.load(chain + 1)):
        first, end, read, written = _piece(chains, row)
        state = tl.load(states + read * slot_stride + in_slot, mask=is_state & (read >= 0), other=0.0)
        for token in range(first, end):
            own_query = tl.load(queries + token * query_stride, mask=is_key, other=0.0).to(tl.float32)
            own_key = tl.load(keys + token * key_stride, mask=is_key, other=0.0).to(tl.float32)
            own_value = tl.load(values + token * value_stride, mask=is_column, other=0.0).to(tl.float32)
            if normalises:
                own_query *= tl.rsqrt(tl.sum(own_query * own_query, 0) + epsilon)
                own_key *= tl.rsqrt(tl.sum(own_key * own_key, 0) + epsilon)
            state *= tl.exp(tl.load(decay + token * decay_stride + head).to(tl.float32))
            found = tl.sum(state * own_key[:, None], 0)
            change = (own_value - found) * tl.load(beta + token * beta_stride + head).to(tl.float32)
            state += own_key[:, None] * change[None, :]
            output = tl.sum(state * (own_query * scale)[:, None], 0)
            out = outputs + (token * num_heads + head) * value_dim + columns
            tl.store(out, output.to(outputs.dtype.element_ty), mask=is_column)
        tl.store(states + written * slot_stride + in_slot, state, mask=is_state)


@triton.jit
def mamba_kernel(
    inputs,  # [num_tokens, num_heads, head_dim]
    time_steps,  # [num_tokens, num_heads]; for Mamba 1 [num_tokens, head_dim]
    decay,  # [num_heads] float32; for Mamba 1 [head_dim, state_size], contiguous
    inputs_to_state,  # [num_tokens, num_groups, state_size]
    state_to_outputs,  # [num_tokens, num_groups, state_size]
    skip,  # [num_heads] float32; for Mamba 1 [head_dim]
    states,  # [num_slots, num_heads, head_dim, state_size] float32
    chains,  # [num_chains + num_pieces, 4] int32
    outputs,  # [num_tokens, num_heads, head_dim], contiguous
    input_stride,  # the stride of a token, like the other strides without "head", "group" or "slot"
    input_head_stride,
    time_step_stride,
    into_stride,
    into_group_stride,
    out_stride,
    out_group_stride,
    slot_stride,
    num_heads: tl.constexpr,
    group: tl.constexpr,  # heads in a group
    head_dim: tl.constexpr,
    state_size: tl.constexpr,
    state_padded: tl.constexpr,
    tile: tl.constexpr,
    by_channel: tl.constexpr,
):
    """Run Mamba 2, or Mamba 1 with `by_channel`, which treats the channels as the numbers of one head.

    Grid: (tiles of a head, num_heads, num_chains).
    """
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    head = tl.program_id(1)
    state_at = tl.arange(0, state_padded)
    is_row, is_number = rows < head_dim, state_at < state_size
    in_slot = head * (head_dim * state_size) + rows[:, None] * state_size + state_at[None, :]
    is_state = is_row[:, None] & is_number[None, :]
    own_inputs = inputs + head * input_head_stride + rows
    into = inputs_to_state + (head // group) * into_group_stride + state_at
    out = state_to_outputs + (head // group) * out_group_stride + state_at
    if by_channel:
        steps, own_skip = time_steps + rows, tl.load(skip + rows, mask=is_row, other=0.0)
        own_decay = tl.load(decay + in_slot, mask=is_state, other=0.0)
    else:
        steps, own_skip, own_decay = time_steps + head, tl.load(skip + head), tl.load(decay + head)
    chain = chains + tl.program_id(2) * 4
    for row in range(tl.load(chain), tl.load(chain + 1)):
        first, end, read, written = _piece(chains, row)
        state = tl.load(states + read * slot_stride + in_slot, mask=is_state & (read >= 0), other=0.0)
        for token in range(first, end):
            own = tl.load(own_inputs + token * input_stride, mask=is_row, other=0.0).to(tl.float32)
            own_into = tl.load(into + token * into_stride, mask=is_number, other=0.0).to(tl.float32)
            own_out = tl.load(out + token * out_stride, mask=is_number, other=0.0).to(tl.float32)
            if by_channel:
                time_step = tl.load(steps + token * time_step_stride, mask=is_row, other=0.0).to(tl.float32)
                kept = tl.exp(time_step[:, None] * own_decay)
            else:
                time_step = tl.load(steps + token * time_step_stride).to(tl.float32)
                kept = tl.exp(time_step * own_decay)
            state = state * kept + (own * time_step)[:, None] * own_into[None, :]
            output = tl.sum(state * own_out[None, :], 1) + own * own_skip
            place = outputs + (token * num_heads + head) * head_dim + rows
            tl.store(place, output.to(outputs.dtype.element_ty), mask=is_row)
        tl.store(states + written * slot_stride + in_slot, state, mask=is_state)
