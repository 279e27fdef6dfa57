"""The tensors that blocks index, and how many blocks fit into memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.config import GIB, CacheConfig
from app.errors import InvalidSetup

# By `cache.dtype`; each has a float32 scale for each token and KV head, of its key and of its value.
_SCALED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What one attention layer stores for one token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """In 8 bits with the scales of each head's key and value."""
        scales = 2 * torch.float32.itemsize if dtype in _SCALED.values() else 0
        return self.num_kv_heads * ((self.key_dim + self.value_dim) * dtype.itemsize + scales)


class KVCache:
    """Paged keys and values of every layer. A token's slot is `block_id * block_size + offset`.

    In FP8 only kernels write and read them, with their scales.
    """

    def __init__(
        self,
        layers: dict[int, LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._keys: dict[int, torch.Tensor] = {}  # by layer: [num_blocks, block_size, num_kv_heads, key_dim]
        self._values: dict[int, torch.Tensor] = {}  # by layer: [num_blocks, block_size, num_kv_heads, value_dim]
        self.scales: dict[int, torch.Tensor] = {}  # in FP8: [num_blocks, num_kv_heads, 2, block_size], float32
        for index, layer in layers.items():
            shape = (num_blocks, block_size, layer.num_kv_heads)
            self._keys[index] = torch.zeros(*shape, layer.key_dim, dtype=dtype, device=device)
            self._values[index] = torch.zeros(*shape, layer.value_dim, dtype=dtype, device=device)
            if dtype is _SCALED["fp8"]:
                self.scales[index] = torch.zeros(num_blocks, layer.num_kv_heads, 2, block_size, device=device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of its memory."""
        return [*self._keys.values(), *self._values.values(), *self.scales.values()]

    @property
    def in_fp8(self) -> bool:
        """Whether keys and values are."""
        return bool(self.scales)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's own keys and values [num_blocks, block_size, num_kv_heads, dim], contiguous, for a kernel."""
        return self._keys[layer], self._values[layer]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new tokens. slots: [num_tokens]; keys, values: [num_tokens, num_kv_heads, dim]."""
        self._keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self._values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def read(self, layer: int, block_tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of whole blocks in token order.

        block_tables: [..., num_blocks] → keys and values [..., num_blocks * block_size, num_kv_heads, dim].
        """
        keys, values = self._keys[layer][block_tables], self._values[layer][block_tables]
        start = block_tables.dim() - 1
        return keys.flatten(start, start + 1), values.flatten(start, start + 1)


def stored_dtype(config: CacheConfig, dtype: torch.dtype) -> torch.dtype:
    """Of keys and values. dtype: of the model."""
    return _SCALED.get(config.dtype, dtype)


def block_bytes(config: CacheConfig, layers: dict[int, LayerShape], *, dtype: torch.dtype) -> int:
    """What one block takes in all layers together. dtype: of the model."""
    stored = stored_dtype(config, dtype)
    return config.block_size * sum(layer.bytes_per_token(stored) for layer in layers.values())


def num_blocks_that_fit(
    config: CacheConfig,
    layers: dict[int, LayerShape],
    *,
    dtype: torch.dtype,
    gpu_bytes: int | None = None,
    draft_bytes: int = 0,
) -> int:
    """The pool's size: as configured, or what the memory settings leave room for. dtype: of the model.

    gpu_bytes: what a GPU has left for KV memory (`memory.py`); None on a CPU.
    draft_bytes: what one block takes of a draft model's KV memory.

    Raises:
        InvalidSetup: not even one block fits.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    memory_bytes = int(config.memory_gib * GIB) if gpu_bytes is None else gpu_bytes
    of_block = block_bytes(config, layers, dtype=dtype) + draft_bytes
    num_blocks = memory_bytes // of_block
    if num_blocks < 1:
        raise InvalidSetup(
            f"cache.memory_gib={config.memory_gib} leaves {memory_bytes / GIB:.3f} GiB for KV memory; one block of "
            f"{config.block_size} tokens needs {of_block / GIB:.6f} GiB. Raise it, or serve a smaller model"
        )
    return num_blocks
