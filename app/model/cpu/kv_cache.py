"""KV memory in the layout of the C++ attention."""

from __future__ import annotations

import torch

from app.model.cpu.library import DTYPES, LANES, in_large_pages, library
from app.model.kv_cache import LayerShape


class NativeKVCache:
    """Blocks of every layer, in units of 32 bits: two neighbouring dimensions of bfloat16 keys, two tokens' values.

    Not zeroed, so that the system provides only pages in use: a slot is read only after its sequence has written it.
    """

    def __init__(self, layers: dict[int, LayerShape], *, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        """`fits` must hold."""
        self.block_size = block_size
        self.dtype = dtype
        self.keys: dict[int, torch.Tensor] = {}  # by layer: [num_blocks, num_kv_heads, key_units, block_size] units
        self.values: dict[int, torch.Tensor] = {}  # [num_blocks, num_kv_heads, token_units, value_dim] units
        per_unit = 4 // dtype.itemsize
        for index, layer in layers.items():
            blocks = (num_blocks, layer.num_kv_heads)
            self.keys[index] = in_large_pages(*blocks, layer.key_dim // per_unit, block_size, dtype=torch.int32)
            self.values[index] = in_large_pages(*blocks, block_size // per_unit, layer.value_dim, dtype=torch.int32)

    @staticmethod
    def fits(layers: dict[int, LayerShape], *, block_size: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether this machine and these shapes can use it."""
        shapes_fit = block_size % LANES == 0 and all(
            layer.value_dim % LANES == 0 and layer.key_dim % 2 == 0 for layer in layers.values()
        )
        return device.type == "cpu" and dtype in DTYPES and shapes_fit and library() is not None
