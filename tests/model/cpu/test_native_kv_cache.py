from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from app.model.cpu import kv_cache
from app.model.cpu.kv_cache import NativeKVCache
from app.model.cpu.library import ThreadPool, advise, library
from app.model.kv_cache import LayerShape

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
NUM_BYTES = 64 * 2**20


PAGE = 4096


@pytest.fixture
def cache() -> NativeKVCache:
    """Nothing of it is in memory, also where the allocator gave what had been used before."""
    layers = dict.fromkeys(range(2), LayerShape(num_kv_heads=2, key_dim=64, value_dim=64))
    num_blocks = NUM_BYTES // (2 * 16 * 2 * 128 * 2)
    empty = NativeKVCache(layers, num_blocks=num_blocks, block_size=16, dtype=torch.bfloat16)
    for tensor in empty.tensors:
        advise(tensor, mmap.MADV_DONTNEED)
    assert share_in_memory(empty) < 0.05
    return empty


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_its_bytes_are_those_that_the_pool_is_sized_by(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    layers = dict.fromkeys(range(2), LayerShape(num_kv_heads=3, key_dim=24, value_dim=48))
    own = NativeKVCache(layers, num_blocks=5, block_size=32, dtype=dtype, in_int8=kv_dtype is torch.int8)
    expected = 5 * 32 * sum(layer.bytes_per_token(kv_dtype or dtype) for layer in layers.values())
    assert sum(tensor.nbytes for tensor in own.tensors) == expected


def share_in_memory(cache: NativeKVCache) -> float:
    """Of its whole pages, as Linux tells it: the greatest bit of each entry."""
    num_pages = num_present = 0
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        for tensor in cache.tensors:
            first, end = -(-tensor.data_ptr() // PAGE), (tensor.data_ptr() + tensor.nbytes) // PAGE
            pages.seek(first * 8)
            entries = torch.frombuffer(bytearray(pages.read((end - first) * 8)), dtype=torch.int64)
            num_present += int((entries < 0).sum())
            num_pages += len(entries)
    return num_present / num_pages


@pytest.mark.parametrize("num_threads", [1, 3])
def test_all_of_it_is_provided_at_once(num_threads: int, cache: NativeKVCache) -> None:
    cache.provide(ThreadPool(num_threads))
    assert share_in_memory(cache) == 1


def test_more_than_the_machine_has_is_left_to_be_used(cache: NativeKVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_memory", lambda: NUM_BYTES // 4)
    cache.provide(ThreadPool(1))
    assert share_in_memory(cache) < 0.05
