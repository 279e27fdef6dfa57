from __future__ import annotations

import pytest
import torch

from app.errors import InvalidSetup
from app.model.memory import (
    GIB,
    GpuMemory,
    MemoryNeeds,
    explaining_out_of_memory,
    graph_bytes,
    is_out_of_memory,
)

NEEDS = MemoryNeeds(weights=15 * GIB, step=3 * GIB, graphs=1 * GIB, workspaces=GIB // 2, context=GIB // 2)


def test_kv_memory_is_what_everything_else_leaves_of_the_granted_share() -> None:
    gpu = GpuMemory(total=80 * GIB, fraction=0.9, used_by_others=GIB // 2)
    assert gpu.left_for_kv(NEEDS) == 72 * GIB - 20 * GIB


def test_memory_of_other_programs_is_not_taken() -> None:
    gpu = GpuMemory(total=80 * GIB, fraction=0.9, used_by_others=10 * GIB + GIB // 2)
    assert gpu.left_for_kv(NEEDS) == 72 * GIB - 20 * GIB - 10 * GIB


def test_two_replicas_on_a_card_get_the_same_share_whichever_starts_first() -> None:
    alone = GpuMemory(total=80 * GIB, fraction=0.9, share=0.5, used_by_others=GIB // 2)
    beside_a_full_sibling = GpuMemory(total=80 * GIB, fraction=0.9, share=0.5, used_by_others=36 * GIB + GIB)
    assert alone.left_for_kv(NEEDS) == beside_a_full_sibling.left_for_kv(NEEDS) == 36 * GIB - 20 * GIB
    used_together = 2 * (NEEDS.total + alone.left_for_kv(NEEDS))
    assert used_together <= 80 * GIB * 0.9


def test_other_programs_beside_a_sibling_are_not_taken_for_it() -> None:
    gpu = GpuMemory(total=80 * GIB, fraction=0.9, share=0.5, used_by_others=40 * GIB + 5 * GIB + GIB // 2)
    assert gpu.left_for_kv(NEEDS) == 36 * GIB - 20 * GIB - 5 * GIB


def test_a_share_that_is_too_small_is_refused_with_the_numbers() -> None:
    gpu = GpuMemory(total=24 * GIB, fraction=0.9, share=0.5)
    with pytest.raises(InvalidSetup) as refused:
        gpu.check(NEEDS, block_bytes=2**20)
    message = refused.value.message
    assert "0.5 of 24.00 GiB) is 10.80 GiB" in message
    assert "weights 15.00, step 3.00, graphs 1.00" in message
    assert "9.20 GiB are missing" in message
    assert "raise replicas.num_gpus" in message


def test_a_card_that_others_use_is_refused_with_what_they_use() -> None:
    gpu = GpuMemory(total=24 * GIB, fraction=0.9, used_by_others=10 * GIB + GIB // 2)
    with pytest.raises(InvalidSetup, match=r"of which other programs use 10\.00 GiB"):
        gpu.check(NEEDS, block_bytes=2**20)


def test_what_fits_is_not_refused() -> None:
    GpuMemory(total=24 * GIB, fraction=0.9).check(NEEDS, block_bytes=GIB)


def test_graphs_take_the_largest_step_and_something_for_each_kernel() -> None:
    one, many = (graph_bytes(step=GIB, num_kernels=2000, num_graphs=number) for number in (1, 35))
    assert GIB < one < many
    assert many - GIB == 35 * (one - GIB)


def test_out_of_memory_at_start_is_refused_and_other_errors_are_not_changed() -> None:
    refused = pytest.raises(InvalidSetup, match=r"too little memory for the weights: CUDA out of memory. Take another")
    with refused, explaining_out_of_memory("the weights", "Take another"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="shapes"), explaining_out_of_memory("the weights", ""):
        raise RuntimeError("shapes differ")
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(ValueError("out of memory"))
