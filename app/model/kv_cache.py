"""Stores keys and values in blocks, and computes how many blocks and state slots fit into memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import torch

from app.config import GIB, CacheConfig
from app.errors import InvalidSetup

# The 8-bit types, by `cache.dtype`. Every key and every value of a KV head has its own float32 scale.
_SCALED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


# A model with only recurrent layers stores nothing in its blocks. The blocks still count tokens and identify prefixes,
# and the Python objects of a block use about this many bytes.
BOOKKEEPING_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The shape of the keys and values of one attention layer. In latent attention, `key_dim` excludes the latent."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def times(self, number: int) -> LayerShape:
        """Return the shape of `number` layers of this shape side by side."""
        return replace(self, num_kv_heads=number * self.num_kv_heads)

    def number_in(self, larger: LayerShape) -> int:
        """Return how many layers of this shape fill the memory of a larger one exactly, or 0 if no number does."""
        keys, values = larger.num_kv_heads * larger.key_dim, larger.num_kv_heads * larger.value_dim
        number = max(1, keys // (self.num_kv_heads * self.key_dim))
        whole = self.times(number).num_kv_heads
        return number if (keys, values) == (whole * self.key_dim, whole * self.value_dim) else 0

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes that the layer stores for a token, including the scales of 8-bit keys and values."""
        scales = 2 * torch.float32.itemsize if dtype in _SCALED.values() else 0
        return self.num_kv_heads * ((self.key_dim + self.value_dim) * dtype.itemsize + scales)


class Place(NamedTuple):
    """Where a layer's keys and values are stored in the blocks of its group."""

    group: int
    place: int  # index within a block
    part: int = 0  # index within the place, which several small layers may share
    num_parts: int = 1  # how many layers of this shape a place has room for


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroups:
    """Divides a model's layers into groups, each of which stores keys and values in its own blocks.

    Without windows, all layers form one group, and a block has a place for each layer. With windows, the first group
    contains the layers without a window, and a block has a place for each of them. Every other group contains just
    enough layers with a window to fill a block. All blocks therefore have one size, and one pool serves all groups
    (`block_pool.py`). Layers with and without a window may differ in shape: a place has room for one layer of the
    larger shape, or for several of the smaller shape.
    """

    num_groups: int = 1
    window: int = 0  # tokens in the window of the layers outside the first group
    places: Mapping[int, Place] = field(default_factory=dict)  # by layer
    # Maps a layer to the earlier layer whose keys and values it reads. Omits layers that store their own.
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
        """Return the groups, or a single group if several groups are impossible or save no memory.

        Several groups require that all windows have one size, that the layers with a window share one shape, that the
        layers without a window share one shape, and that some number of layers of one kind needs exactly the memory of
        one layer of the other. The layers with a window must fill a block, and the context must exceed the window.

        windows: by layer, in tokens. stored_by: as the field. is_of_one_shape: require one shape for all layers.
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
        """Return a layer's place, or the place of the layer whose keys and values it reads."""
        layer = self.stored_by.get(layer, layer)
        return self.places.get(layer, Place(0, layer))

    def in_block(self, layers: Mapping[int, LayerShape]) -> dict[int, LayerShape]:
        """Return the shape of each place in a block.

        If layers of two shapes share a place, returns the one with more heads, because 8-bit types add scales per head.
        """
        found: dict[int, LayerShape] = {}
        for layer, shape in layers.items():
            own = self.place_of(layer)
            whole = shape.times(own.num_parts)
            found[own.place] = max(found.get(own.place, whole), whole, key=lambda each: each.num_kv_heads)
        return found


def _parts_of_a_place(all_back: set[LayerShape], in_window: set[LayerShape]) -> tuple[int, int] | None:
    """Return how many layers without a window, and how many with a window, fill one place. One of the numbers is 1.

    Returns None if no number of layers of one shape needs exactly the memory of a layer of the other shape.
    """
    if len(all_back) != 1 or len(in_window) != 1:
        return None
    (one,), (other,) = all_back, in_window
    parts = (one.number_in(other), other.number_in(one))
    return (max(1, parts[0]), max(1, parts[1])) if any(parts) else None


ONE_GROUP = LayerGroups()


class KVCache:
    """Stores keys and values of all layers in blocks. A token's slot is `block_id * block_size + offset`.

    `write` and `read` do not support FP8: only kernels store and load FP8 keys and values, with their scales.
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
        """The tensors of all layers, including scales. The first dimension is the block."""
        return [*self._keys.values(), *self._values.values(), *self.scales.values()]

    @property
    def in_fp8(self) -> bool:
        return bool(self.scales)

    def layer(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's contiguous keys and values for a kernel: [num_blocks, block_size, num_kv_heads, dim].

        The layer must not share its place with other layers.
        """
        return self._keys[place], self._values[place]

    def write(
        self, place: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, part: int = 0
    ) -> None:
        """Store the keys and values of new tokens. slots: [num_tokens]; keys, values: [num_tokens, num_kv_heads, dim].

        part: the layer's part of a shared place, see `Place`.
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
        part: as in `write`. like: keys and values of new tokens, required if layers of several shapes use the place.
        """
        assert like is not None or part == 0, "a part of a place cannot be read without the layer's shape"
        keys, values = self._keys[place], self._values[place]
        if like is not None:
            keys, values = self._part(keys, part, like[0]), self._part(values, part, like[1])
        start = block_tables.dim() - 1
        return keys[block_tables].flatten(start, start + 1), values[block_tables].flatten(start, start + 1)

    def read_tokens(
        self, place: int, slots: torch.Tensor, *, part: int, like: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of single tokens' keys and values, [num_tokens, num_kv_heads, dim]. slots: [num_tokens]."""
        at = slots // self.block_size, slots % self.block_size
        keys, values = self._keys[place], self._values[place]
        return self._part(keys, part, like[0])[at], self._part(values, part, like[1])[at]

    def _part(self, memory: torch.Tensor, part: int, new: torch.Tensor) -> torch.Tensor:
        """Return a view of one layer's part of a place: [num_blocks, block_size, num_kv_heads, dim].

        new: keys or values of the layer, [num_tokens, num_kv_heads, dim].
        """
        return memory.view(self.num_blocks, -1, self.block_size, *new.shape[1:])[:, part]


def stored_dtype(config: CacheConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the type of stored keys and values. dtype: the model's type."""
    return _SCALED.get(config.dtype, dtype)


def block_bytes(config: CacheConfig, layers: dict[int, LayerShape], *, dtype: torch.dtype) -> int:
    """Return the bytes of one block for all layers. dtype: the model's type.

    Without attention layers, returns the bytes of a block's bookkeeping on the host.
    """
    stored = stored_dtype(config, dtype)
    num_bytes = config.block_size * sum(layer.bytes_per_token(stored) for layer in layers.values())
    return num_bytes if layers else BOOKKEEPING_BYTES


def _given(config: CacheConfig, gpu_bytes: int | None) -> tuple[str, int]:
    """Return the setting that limits the memory of blocks and slots, and its bytes. gpu_bytes: None on a CPU."""
    if gpu_bytes is None:
        return f"memory_gib={config.memory_gib:g}", int(config.memory_gib * GIB)
    return f"gpu_memory_fraction={config.gpu_memory_fraction:g}", gpu_bytes


def num_state_slots(state_bytes: int, *, max_running: int, memory_bytes: int) -> int:
    """Return the number of slots for recurrent states, without checking that they fit.

    A running sequence needs two slots, and each other slot stores a prefix that can be resumed. Eight slots let two
    sequences run and be resumed. If more slots fit, half of the memory is left for keys and values.

    state_bytes: bytes of one slot. memory_bytes: the bytes for slots and KV memory together.
    """
    return min(4 * max_running, max(memory_bytes // 2 // state_bytes, 8))


def num_state_slots_that_fit(
    config: CacheConfig, state_bytes: int, *, max_running: int, gpu_bytes: int | None = None
) -> int:
    """Return the number of slots for recurrent states.

    state_bytes: bytes of one slot. gpu_bytes: as in `num_blocks_that_fit`.

    Raises InvalidSetup if the slots leave no memory for keys and values.
    """
    given, memory_bytes = _given(config, gpu_bytes)
    number = num_state_slots(state_bytes, max_running=max_running, memory_bytes=memory_bytes)
    if number * state_bytes >= memory_bytes:
        left = "" if gpu_bytes is None else f" leaves {gpu_bytes / GIB:.3f} GiB"
        raise InvalidSetup(
            f"cache.{given}{left}: {number} slots of {state_bytes / 2**20:.1f} MiB for the states "
            f"of recurrent layers need {number * state_bytes / GIB:.3f} GiB, but keys and values need memory too. "
            f"Raise it"
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
    """Return the number of blocks in the pool: as configured, or derived from the memory settings.

    layers, dtype: the shapes in a block, and the model's type. num_groups: groups of layers, each with its own blocks.
    gpu_bytes: the bytes that a GPU has left for KV memory (`memory.py`), or None on a CPU.
    draft_bytes: the bytes that a draft model adds to each block.
    taken_bytes: the part of the memory that the states of recurrent layers use.

    Raises InvalidSetup if not even one block of each group fits.
    """
    if config.num_blocks is not None:
        if config.num_blocks < num_groups:
            raise InvalidSetup(
                f"cache.num_blocks={config.num_blocks}: this model's layers use blocks in {num_groups} groups, so the "
                f"first token needs {num_groups} blocks. Raise it"
            )
        return config.num_blocks
    # Blocks without layers use only host memory, while the states are on the GPU.
    if gpu_bytes is not None and not layers:
        gpu_bytes, taken_bytes = None, 0
    given, memory_bytes = _given(config, gpu_bytes)
    memory_bytes -= taken_bytes
    of_block = block_bytes(config, layers, dtype=dtype) + draft_bytes
    num_blocks = memory_bytes // of_block
    if num_blocks < num_groups:
        beside = f" next to {taken_bytes / GIB:.3f} GiB for states" if taken_bytes else ""
        raise InvalidSetup(
            f"cache.{given} leaves {memory_bytes / GIB:.3f} GiB for KV memory{beside}; one block of "
            f"{config.block_size} tokens needs {num_groups * of_block / GIB:.6f} GiB. Raise it, or serve a smaller "
            f"model"
        )
    return num_blocks
