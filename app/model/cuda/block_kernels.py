"""A Triton kernel that copies a block of KV, which is spread over many tensors, to or from one buffer.

Triton evaluates annotations, so this module cannot use `from __future__ import annotations`.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["block_id"])
def copy_block_kernel(
    tensors,  # [3, num_tensors] int64: each tensor's address, its words per block, and their offset in the buffer
    buffer,  # int32 words in pinned host memory
    block_id,
    num_tensors: tl.constexpr,
    takes: tl.constexpr,  # whether to copy the block to the buffer; otherwise the buffer is copied to the block
    tile: tl.constexpr,  # words per program
):
    """Copy one block between the tensors and the buffer. Grid: (num_tensors, tiles of the largest part)."""
    number = tl.program_id(0)
    size = tl.load(tensors + num_tensors + number)
    at = tl.program_id(1) * tile + tl.arange(0, tile)
    of_block = tl.load(tensors + number).to(tl.pointer_type(tl.int32)) + block_id * size + at
    in_buffer = buffer + tl.load(tensors + 2 * num_tensors + number) + at
    if takes:
        tl.store(in_buffer, tl.load(of_block, mask=at < size), mask=at < size)
    else:
        tl.store(of_block, tl.load(in_buffer, mask=at < size), mask=at < size)
