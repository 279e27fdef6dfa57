"""KV memory in the layout of the C++ attention."""

from __future__ import annotations

from typing import NamedTuple

import torch

from app.config import CacheConfig
from app.cores import available_memory
from app.model.cpu.library import DTYPES, LANES, ThreadPool, in_large_pages, library
from app.model.kv_cache import LayerShape, Place


class LayerMemory(NamedTuple):
    """Where the C++ code finds a layer's keys and values: their addresses, and the heads from one block to the next."""

    keys: int
    values: int
    scales: int | None
    heads_in_block: int  # heads of this layer's shape in one block
    scales_in_block: int  # heads that have scales in one block


class NativeKVCache:
    """The blocks of all layers, in units of 32 bits.

    In bfloat16, a unit stores two dimensions of a key, or one dimension of two tokens' values. In int8, a unit stores
    as many numbers in 8 bits each, and each token has a scale per KV head for its key and one for its value. Memory is
    not zeroed, because a slot is read only after its sequence has written it.
    """

    def __init__(
        self,
        layers: dict[int, LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        in_int8: bool = False,
    ) -> None:
        """Reserve memory, whose pages are allocated by `provide` or on first use.

        `why_not` must return None for the arguments. dtype: the model's type.
        """
        self.block_size = block_size
        self.dtype = dtype
        self.keys: dict[int, torch.Tensor] = {}  # by place: [num_blocks, num_kv_heads, key_units, block_size] units
        self.values: dict[int, torch.Tensor] = {}  # [num_blocks, num_kv_heads, token_units, value_dim] units
        self.scales: dict[int, torch.Tensor] = {}  # only in int8: [num_blocks, num_kv_heads, 2, block_size] float32
        per_unit = 4 // dtype.itemsize
        unit, width = (torch.int8, per_unit) if in_int8 else (torch.int32, 1)
        for index, layer in layers.items():
            blocks = (num_blocks, layer.num_kv_heads)
            self.keys[index] = in_large_pages(*blocks, layer.key_dim // per_unit, block_size * width, dtype=unit)
            self.values[index] = in_large_pages(*blocks, block_size // per_unit, layer.value_dim * width, dtype=unit)
            if in_int8:
                self.scales[index] = in_large_pages(*blocks, 2, block_size, dtype=torch.float32)

    @classmethod
    def provided(
        cls,
        config: CacheConfig,
        layers: dict[int, LayerShape],
        threads: ThreadPool,
        *,
        num_blocks: int,
        dtype: torch.dtype,
    ) -> NativeKVCache:
        """Create KV memory as configured, with all its pages allocated by the threads."""
        in_int8 = config.dtype == "int8"
        pages = cls(layers, num_blocks=num_blocks, block_size=config.block_size, dtype=dtype, in_int8=in_int8)
        pages.provide(threads)
        return pages

    def of_layer(self, place: Place, shape: LayerShape) -> LayerMemory:
        """Return a layer's memory. Layers of different shapes may share one place, see `LayerGroups`."""
        keys, values, scales = self.keys[place.place], self.values[place.place], self.scales.get(place.place)
        num_blocks, heads, key_units, width = keys.shape
        per_unit = 4 // self.dtype.itemsize
        of_shape = heads * key_units * per_unit // shape.key_dim
        first = place.part * shape.num_kv_heads
        return LayerMemory(
            keys=keys.view(num_blocks, of_shape, -1, width)[0, first].data_ptr(),
            values=values.view(num_blocks, of_shape, values.shape[2], -1)[0, first].data_ptr(),
            scales=None if scales is None else scales[0, first].data_ptr(),
            heads_in_block=of_shape,
            scales_in_block=heads,
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the KV memory, including scales."""
        return [*self.keys.values(), *self.values.values(), *self.scales.values()]

    def provide(self, threads: ThreadPool) -> None:
        """Make the system allocate all pages now, so that the process cannot exceed a memory limit later.

        Does nothing if too little memory is available; `allocating_host_memory` has then logged a warning, and pages
        are allocated on first use.
        """
        num_bytes, available = sum(tensor.nbytes for tensor in self.tensors), available_memory()
        if available is not None and num_bytes > available:
            return
        for tensor in self.tensors:
            threads.code.carousel_touch(threads.handle, tensor.data_ptr(), tensor.nbytes)

    @staticmethod
    def why_not(
        layers: dict[int, LayerShape], *, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> str | None:
        """Return the reason why this KV memory does not support a machine or these shapes, or None if it does."""
        if device.type != "cpu":
            return f"it runs on {device.type}"
        if dtype not in DTYPES:
            return f"its type is {dtype}"
        if block_size % LANES:
            return f"cache.block_size is {block_size}, which is not a multiple of {LANES}"
        odd = {layer for layer in layers.values() if layer.value_dim % LANES or layer.key_dim % 2}
        if odd:
            sizes = " and ".join(sorted(f"{layer.key_dim} (keys), {layer.value_dim} (values)" for layer in odd))
            return f"its heads have {sizes} numbers, but keys need a multiple of 2, and values a multiple of {LANES}"
        return "the native code could not be built (no C++ compiler?)" if library() is None else None
