import pytest
import torch

from app.config import CacheConfig
from app.errors import InvalidSetup
from app.model.kv_cache import KVCache, LayerShape, block_bytes, num_blocks_that_fit, stored_dtype

CPU = torch.device("cpu")


def test_fp8_takes_the_bytes_that_are_counted() -> None:
    layer = LayerShape(num_kv_heads=2, key_dim=16, value_dim=8)
    kind = stored_dtype(CacheConfig(dtype="fp8"), torch.bfloat16)
    cache = KVCache({0: layer}, num_blocks=3, block_size=4, dtype=kind, device=torch.device("cpu"))
    counted = 3 * block_bytes(CacheConfig(dtype="fp8", block_size=4), {0: layer}, dtype=torch.bfloat16)
    assert sum(tensor.nbytes for tensor in (*cache.layer(0), cache.scales[0])) == counted
    assert stored_dtype(CacheConfig(), torch.bfloat16) is torch.bfloat16


def test_int8_counts_its_scales() -> None:
    layer = LayerShape(num_kv_heads=3, key_dim=64, value_dim=64)
    assert layer.bytes_per_token(torch.int8) == 3 * (64 + 64 + 2 * 4)
    one_block = CacheConfig(memory_gib=16 * 30 * 408 * 10 / 2**30, dtype="int8")
    for dtype in (torch.bfloat16, torch.float32):
        assert num_blocks_that_fit(one_block, dict.fromkeys(range(30), layer), dtype=dtype) == 10


def test_memory_becomes_blocks() -> None:
    layers = dict.fromkeys(range(32), LayerShape(num_kv_heads=32, key_dim=128, value_dim=128))
    config = CacheConfig(memory_gib=1, block_size=16)  # of a Llama of 7 billion weights half a megabyte for a token
    assert num_blocks_that_fit(config, layers, dtype=torch.float16) == 128
    assert num_blocks_that_fit(config, layers, dtype=torch.float16, gpu_bytes=2**31) == 256
    assert num_blocks_that_fit(CacheConfig(num_blocks=7), layers, dtype=torch.float16) == 7


def test_memory_for_less_than_a_block_is_refused_with_the_numbers() -> None:
    layers = dict.fromkeys(range(32), LayerShape(num_kv_heads=32, key_dim=128, value_dim=128))
    with pytest.raises(InvalidSetup, match=r"memory_gib=0.001 leaves 0.001 GiB .* one block of 16 tokens needs 0.0078"):
        num_blocks_that_fit(CacheConfig(memory_gib=0.001), layers, dtype=torch.float16)


def test_what_was_written_is_read_in_token_order() -> None:
    cache = KVCache(
        {3: LayerShape(num_kv_heads=1, key_dim=2, value_dim=1)},
        num_blocks=5,
        block_size=2,
        dtype=torch.float32,
        device=CPU,
    )
    keys, values = torch.arange(8.0).view(4, 1, 2), torch.arange(4.0).view(4, 1, 1)
    cache.write(3, torch.tensor([8, 9, 2, 3]), keys, values)
    read_keys, read_values = cache.read(3, torch.tensor([[4, 1]]))
    assert torch.equal(read_keys, keys[None])
    assert torch.equal(read_values, values[None])
