"""The tensors that store blocks, and the number of blocks that fit into memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import torch

from app.config import GIB, CacheConfig
from app.errors import InvalidSetup

# The 8-bit types, by `cache.dtype`. The key and the value of each token and KV head have one float32 scale each.
_SCALED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


# A model with only recurrent layers stores nothing in its blocks. Blocks still count its tokens and find its
# prefixes, and the Python objects of a block take about this much memory.
BOOKKEEPING_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The sizes that one attention layer stores for a token. In latent attention, `key_dim` excludes the latent."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def times(self, number: int) -> LayerShape:
        """Return the shape of `number` adjacent layers of this shape."""
        return replace(self, num_kv_heads=number * self.num_kv_heads)

    def number_in(self, larger: LayerShape) -> int:
        """Return the number of layers of this shape that fill exactly one larger layer's memory, or 0 if none does."""
        keys, values = larger.num_kv_heads * larger.key_dim, larger.num_kv_heads * larger.value_dim
        number = max(1, keys // (self.num_kv_heads * self.key_dim))
        whole = self.times(number).num_kv_heads
        return number if (keys, values) == (whole * self.key_dim, whole * self.value_dim) else 0

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token, including the scales of 8-bit keys and values."""
        scales = 2 * torch.float32.itemsize if dtype in _SCALED.values() else 0
        return self.num_kv_heads * ((self.key_dim + self.value_dim) * dtype.itemsize + scales)


class Place(NamedTuple):
    """The place of a layer's keys and values in the blocks of its group."""

    group: int
    place: int  # in a block
    part: int = 0  # several small layers of a group share a place
    num_parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroups:
    """The groups of blocks that store the layers' keys and values.

    Without windows, all layers are in one group, and a block has a place for each layer. With windows, the first group
    has the layers without a window, and a block has places for these layers. Each other group fills a block with layers
    that have a window. So one pool has blocks for all groups (`block_pool.py`). The two kinds of layers may have
    different shapes: a place has room for one layer of the larger shape, or for several of the smaller shape.
    """

    num_groups: int = 1
    window: int = 0  # the window in tokens of the layers outside the first group
    places: Mapping[int, Place] = field(default_factory=dict)  # by layer
    # By layer: the earlier layer whose keys and values it reads. Layers that store their own are missing.
    stored_by: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        layers: Mapping[int, LayerShape],
        windows: Mapping[int, int | None],
        *,
        max_model_len: int,
        stored_by: Mapping[int, int] = MappingProxyType({}),
        is_of_one_shape: bool = False,
    ) -> LayerGroups:
        """Return the groups, or one group if the two kinds of layers cannot share blocks or groups save no memory.

        All windows must have one size. The layers with a window must have one shape, and those without one as well.
        A number of layers of one kind must take exactly the memory of one layer of the other. The layers with a window
        must fill at least one block, and the context must be longer than the window.

        windows: by layer, in tokens. stored_by: as the field. is_of_one_shape: whether all layers must have one shape.
        """
        one_group = cls(stored_by=stored_by)
        looking_back = {layer for layer in windows if not windows[layer]}
        looking_back |= {stored_by[layer] for layer in looking_back if layer in stored_by}
        all_back = [layer for layer in layers if layer in looking_back]
        in_window = [layer for layer in layers if layer not in looking_back]
        sizes = {windows[layer] or 0 for layer in windows if layer not in looking_back}
        parts = _parts_of_a_place({layers[layer] for layer in all_back}, {layers[layer] for layer in in_window})
        if len(sizes) != 1 or parts is None or (is_of_one_shape and len(set(layers.values())) > 1):
            return one_group
        (window,), (of_all_back, of_window) = sizes, parts
        num_places = -(-len(all_back) // of_all_back)
        in_block = num_places * of_window  # layers with a window in one block
        if in_block > len(in_window) or window >= max_model_len:
            return one_group
        places = {layer: Place(0, *divmod(at, of_all_back), of_all_back) for at, layer in enumerate(all_back)}
        for at, layer in enumerate(in_window):
            group, within = divmod(at, in_block)
            places[layer] = Place(1 + group, *divmod(within, of_window), of_window)
        return cls(num_groups=1 - -len(in_window) // in_block, window=window, places=places, stored_by=stored_by)

    def place_of(self, layer: int) -> Place:
        """Return a layer's place. A layer that reads another layer's keys and values has that layer's place."""
        layer = self.stored_by.get(layer, layer)
        return self.places.get(layer, Place(0, layer))

    def in_block(self, layers: Mapping[int, LayerShape]) -> dict[int, LayerShape]:
        """Return the shape of each place of a block.

        If both kinds of layers fill a place, its shape is the one with more heads, because each head has its own scales
        in 8-bit types.
        """
        found: dict[int, LayerShape] = {}
        for layer, shape in layers.items():
            own = self.place_of(layer)
            whole = shape.times(own.num_parts)
            found[own.place] = max(found.get(own.place, whole), whole, key=lambda each: each.num_kv_heads)
        return found


def _parts_of_a_place(all_back: set[LayerShape], in_window: set[LayerShape]) -> tuple[int, int] | None:
    """Return how many layers without a window and how many with a window fill one place. One of the numbers is 1.

    Returns None if no number of layers of one shape takes exactly the memory of a layer of the other shape.
    """
    if len(all_back) != 1 or len(in_window) != 1:
        return None
    (one,), (other,) = all_back, in_window
    parts = (one.number_in(other), other.number_in(one))
    return (max(1, parts[0]), max(1, parts[1])) if any(parts) else None


ONE_GROUP = LayerGroups()


class KVCache:
    """Paged keys and values of every layer. A token's slot is `block_id * block_size + offset`.

    Only kernels write and read keys and values in FP8, with their scales.
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
        self._keys: dict[int, torch.Tensor] = {}  # by place: [num_blocks, block_size, num_kv_heads, key_dim]
        self._values: dict[int, torch.Tensor] = {}  # by place: [num_blocks, block_size, num_kv_heads, value_dim]
        self.scales: dict[int, torch.Tensor] = {}  # in FP8: [num_blocks, num_kv_heads, 2, block_size], float32
        for place, layer in layers.items():
            shape = (num_blocks, block_size, layer.num_kv_heads)
            self._keys[place] = torch.zeros(*shape, layer.key_dim, dtype=dtype, device=device)
            self._values[place] = torch.zeros(*shape, layer.value_dim, dtype=dtype, device=device)
            if dtype is _SCALED["fp8"]:
                self.scales[place] = torch.zeros(num_blocks, layer.num_kv_heads, 2, block_size, device=device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of all layers."""
        return [*self._keys.values(), *self._values.values(), *self.scales.values()]

    @property
    def in_fp8(self) -> bool:
        """Whether keys and values are stored in FP8."""
        return bool(self.scales)

    def layer(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the contiguous keys and values [num_blocks, block_size, num_kv_heads, dim] of a layer, for a kernel.

        The layer must be the only one in its place.
        """
        return self._keys[place], self._values[place]

    def write(
        self, place: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, part: int = 0
    ) -> None:
        """Store the keys and values of new tokens. slots: [num_tokens]; keys, values: [num_tokens, num_kv_heads, dim].

        part: the layer's part of a shared place, see `LayerGroups`.
        """
        at = slots // self.block_size, slots % self.block_size
        for memory, new in ((self._keys[place], keys), (self._values[place], values)):
            self._part(memory, part, new)[at] = new

    def read(
        self,
        place: int,
        block_tables: torch.Tensor,
        *,
        part: int = 0,
        like: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of whole blocks in token order.

        block_tables: [..., num_blocks] → keys and values [..., num_blocks * block_size, num_kv_heads, dim].
        part: as in `write`. like: keys and values of new tokens, needed if a place has room for layers of other shapes.
        """
        assert like is not None or part == 0, "without a shape there is no part of a place"
        keys, values = self._keys[place], self._values[place]
        if like is not None:
            keys, values = self._part(keys, part, like[0]), self._part(values, part, like[1])
        start = block_tables.dim() - 1
        return keys[block_tables].flatten(start, start + 1), values[block_tables].flatten(start, start + 1)

    def read_tokens(
        self, place: int, slots: torch.Tensor, *, part: int, like: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the keys and values of tokens, [num_tokens, num_kv_heads, dim]. slots: [num_tokens]."""
        at = slots // self.block_size, slots % self.block_size
        keys, values = self._keys[place], self._values[place]
        return self._part(keys, part, like[0])[at], self._part(values, part, like[1])[at]

    def _part(self, memory: torch.Tensor, part: int, new: torch.Tensor) -> torch.Tensor:
        """Return one layer's part of a place: [num_blocks, block_size, num_kv_heads, dim].

        new: [num_tokens, num_kv_heads, dim], keys or values of the layer.
        """
        return memory.view(self.num_blocks, -1, self.block_size, *new.shape[1:])[:, part]


def stored_dtype(config: CacheConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the type of stored keys and values. dtype: the model's type."""
    return _SCALED.get(config.dtype, dtype)


def block_bytes(config: CacheConfig, layers: dict[int, LayerShape], *, dtype: torch.dtype) -> int:
    """Return the bytes of one block in all layers. dtype: the model's type.

    Without attention layers, return the bytes of the block's bookkeeping.
    """
    stored = stored_dtype(config, dtype)
    num_bytes = config.block_size * sum(layer.bytes_per_token(stored) for layer in layers.values())
    return num_bytes if layers else BOOKKEEPING_BYTES


def _given(config: CacheConfig, gpu_bytes: int | None) -> tuple[str, int]:
    """Return the setting for the memory of blocks and slots, and its bytes. gpu_bytes: None on a CPU."""
    if gpu_bytes is None:
        return f"memory_gib={config.memory_gib:g}", int(config.memory_gib * GIB)
    return f"gpu_memory_fraction={config.gpu_memory_fraction:g}", gpu_bytes


def num_state_slots(state_bytes: int, *, max_running: int, memory_bytes: int) -> int:
    """Return the number of slots for recurrent states. The slots may not fit.

    A running sequence needs two slots, and each other slot stores a prefix that can be resumed. Two sequences can run
    and be resumed with eight slots. Half of the memory is left for keys and values.

    state_bytes: bytes of one slot. memory_bytes: for the slots and the KV memory together.
    """
    return min(4 * max_running, max(memory_bytes // 2 // state_bytes, 8))


def num_state_slots_that_fit(
    config: CacheConfig, state_bytes: int, *, max_running: int, gpu_bytes: int | None = None
) -> int:
    """Return the number of slots for recurrent states.

    state_bytes: bytes of one slot. gpu_bytes: as in `num_blocks_that_fit`.

    Raises:
        InvalidSetup: the slots of one sequence do not fit.
    """
    given, memory_bytes = _given(config, gpu_bytes)
    number = num_state_slots(state_bytes, max_running=max_running, memory_bytes=memory_bytes)
    if number * state_bytes >= memory_bytes:
        left = "" if gpu_bytes is None else f" leaves {gpu_bytes / GIB:.3f} GiB"
        raise InvalidSetup(
            f"cache.{given}{left}: {number} slots of {state_bytes / 2**20:.1f} MiB for the states "
            f"of recurrent layers need {number * state_bytes / GIB:.3f} GiB, and keys and values need memory beside "
            f"them. Raise it"
        )
    return number


def num_blocks_that_fit(
    config: CacheConfig,
    layers: dict[int, LayerShape],
    *,
    dtype: torch.dtype,
    num_groups: int = 1,
    gpu_bytes: int | None = None,
    draft_bytes: int = 0,
    taken_bytes: int = 0,
) -> int:
    """Return the number of blocks in the pool, as configured or by the memory settings.

    layers, dtype: the shapes in a block, and the model's type. num_groups: groups of layers, each with its own blocks.

    gpu_bytes: bytes that a GPU has left for KV memory (`memory.py`); None on a CPU.
    draft_bytes: bytes of one block in a draft model's KV memory.
    taken_bytes: bytes that the states of recurrent layers take from the memory.

    Raises:
        InvalidSetup: not even one block of each group fits.
    """
    if config.num_blocks is not None:
        if config.num_blocks < num_groups:
            raise InvalidSetup(
                f"cache.num_blocks={config.num_blocks}: this model's layers take blocks in {num_groups} groups, so the "
                f"first token needs {num_groups}. Raise it"
            )
        return config.num_blocks
    if (
        gpu_bytes is not None and not layers
    ):  # blocks without layers take only host memory, and the states are on the GPU
        gpu_bytes, taken_bytes = None, 0
    given, memory_bytes = _given(config, gpu_bytes)
    memory_bytes -= taken_bytes
    of_block = block_bytes(config, layers, dtype=dtype) + draft_bytes
    num_blocks = memory_bytes // of_block
    if num_blocks < num_groups:
        beside = f" beside {taken_bytes / GIB:.3f} GiB for states" if taken_bytes else ""
        raise InvalidSetup(
            f"cache.{given} leaves {memory_bytes / GIB:.3f} GiB for KV memory{beside}; one block of "
            f"{config.block_size} tokens needs {num_groups * of_block / GIB:.6f} GiB. Raise it, or serve a smaller "
            f"model"
        )
    return num_blocks
