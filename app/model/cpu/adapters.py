"""LoRA adapters as the C++ decoder takes them, see `adapters.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from app.engine.batch import Batch
from app.model.adapters import AdapterWeights, LowRankUpdate, Sizes
from app.model.cpu.library import LANES, AdapterLayer, LowRank
from app.model.cpu.weights import PANEL, NativeWeights
from app.model.llama import DecoderSettings

# The linear layers that are computed together, by the product's name.
_PRODUCTS = {
    "query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


class AdaptedModel(NamedTuple):
    """What adapters need to know of a model. It has none of its weights."""

    sizes: Mapping[str, Sizes]  # see AdaptableForward
    num_layers: int
    dtype: torch.dtype

    @classmethod
    def of(cls, weights: NativeWeights) -> AdaptedModel:
        return cls(linear_sizes(weights), len(weights.layers), weights.dtype)

    def prepare(self, weights: AdapterWeights) -> NativeAdapter:
        """See AdaptableForward."""
        return NativeAdapter(weights, num_layers=self.num_layers, dtype=self.dtype)


class NativeAdapter:
    """An adapter, packed. Steps that use it hold it."""

    def __init__(self, weights: AdapterWeights, *, num_layers: int, dtype: torch.dtype) -> None:
        self.num_bytes = 0
        self._tensors: list[torch.Tensor] = []  # what `_layers` points to
        self._dtype = dtype
        self._layers = (AdapterLayer * num_layers)()
        for index, layer in enumerate(self._layers):
            for product, linears in _PRODUCTS.items():
                updates = [weights.get(f"model.layers.{index}.{linear}") for linear in linears]
                setattr(layer, product, self._low_rank(updates))

    @property
    def address(self) -> int:
        return ctypes.addressof(self._layers)

    def _low_rank(self, updates: Sequence[LowRankUpdate | None]) -> LowRank:
        found = LowRank()
        even = [None if each is None else _with_even_rank(each) for each in updates]
        downs = [each.down for each in even if each is not None]
        if not downs:
            return found
        found.down = self._kept(_in_panels(torch.cat(downs).to(self._dtype)))
        for part, update in enumerate(even):
            if update is not None:
                found.rank[part] = update.rank
                found.up[part] = self._kept(_in_lanes(update.up.to(self._dtype)))
        return found

    def _kept(self, tensor: torch.Tensor) -> int:
        self._tensors.append(tensor)
        self.num_bytes += tensor.nbytes
        return tensor.data_ptr()


class AdapterColumns(NamedTuple):
    """A step's adapters as `DecoderStep` has them."""

    adapters: ctypes.Array[ctypes.c_void_p]
    of_token: torch.Tensor  # [num_tokens] int64, which of them; -1: none


def adapter_columns(batch: Batch) -> AdapterColumns:
    numbers: dict[int, int] = {}  # by address
    of_token: list[int] = []
    for item in batch.scheduled:
        number = -1
        if item.adapter is not None:
            assert isinstance(item.adapter, NativeAdapter), "loaded by the decoder that computes with it"
            number = numbers.setdefault(item.adapter.address, len(numbers))
        of_token += [number] * len(item.token_ids)
    return AdapterColumns((ctypes.c_void_p * len(numbers))(*numbers), torch.tensor(of_token))


def linear_sizes(weights: NativeWeights) -> dict[str, Sizes]:
    """The linear layers that adapters may change, by name; of layers with experts those of attention."""
    sizes = _sizes_of_layer(weights.settings)
    return {
        f"model.layers.{index}.{linear}": size
        for index, layer in enumerate(weights.layers)
        for linear, size in sizes.items()
        if layer.router is None or linear.startswith("self_attn.")
    }


def _sizes_of_layer(settings: DecoderSettings) -> dict[str, Sizes]:
    hidden, inner = settings.hidden_size, settings.intermediate_size
    query, kv = settings.num_heads * settings.head_dim, settings.num_kv_heads * settings.head_dim
    outputs = {"q": query, "k": kv, "v": kv}
    return {
        **{f"self_attn.{name}_proj": Sizes(hidden, size) for name, size in outputs.items()},
        "self_attn.o_proj": Sizes(query, hidden),
        "mlp.gate_proj": Sizes(hidden, inner),
        "mlp.up_proj": Sizes(hidden, inner),
        "mlp.down_proj": Sizes(inner, hidden),
    }


def _with_even_rank(update: LowRankUpdate) -> LowRankUpdate:
    """Two bfloat16 are one unit."""
    if update.rank % 2 == 0:
        return update
    pad = torch.nn.functional.pad
    return LowRankUpdate(pad(update.down, (0, 0, 0, 1)), pad(update.up, (0, 1)))


def _in_panels(down: torch.Tensor) -> torch.Tensor:
    """[columns, inputs] → [panels, units of inputs, PANEL columns] units of 32 bits, as matrices are packed."""
    padded = torch.nn.functional.pad(down, (0, 0, 0, -len(down) % PANEL)).contiguous()
    return padded.view(torch.int32).view(-1, PANEL, down.nbytes // len(down) // 4).transpose(1, 2).contiguous()


def _in_lanes(up: torch.Tensor) -> torch.Tensor:
    """[outputs, rank] → [outputs / LANES, units of the rank, LANES] units of 32 bits."""
    units = up.contiguous().view(torch.int32)
    return units.view(-1, LANES, units.shape[1]).transpose(1, 2).contiguous()
