"""Packs LoRA adapters for the C++ decoder. See `adapters.h` for the layout."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from app.engine.batch import StepBatch
from app.model.adapters import AdapterWeights, LowRankUpdate, Sizes, linear_sizes, products
from app.model.cpu.library import LANES, AdapterLayer, LowRank, in_large_pages
from app.model.cpu.weights import NativeWeights, in_order
from app.model.llama import DecoderSettings


class AdaptedModel(NamedTuple):
    """The properties of a model that adapters depend on. Does not hold a reference to the model's weights."""

    sizes: Mapping[str, Sizes]  # by the linear layer's name
    settings: DecoderSettings
    dtype: torch.dtype

    @classmethod
    def of(cls, weights: NativeWeights) -> AdaptedModel:
        return cls(linear_sizes(weights.settings, weights.layers), weights.settings, weights.dtype)

    def prepare(self, weights: AdapterWeights) -> NativeAdapter:
        return NativeAdapter(weights, settings=self.settings, dtype=self.dtype)

    def adapter_bytes(self, rank: int) -> int:
        """Return the bytes of a `NativeAdapter` that has this rank and changes all adaptable linear layers."""
        updates = {
            name: LowRankUpdate(
                down=torch.empty(rank, size.num_inputs, device="meta"),
                up=torch.empty(size.num_outputs, rank, device="meta"),
            )
            for name, size in self.sizes.items()
        }
        return sum(_packed_bytes(each, self.dtype) for _, _, each in _by_product(updates, self.settings))


class NativeAdapter:
    """A packed adapter. Steps that use it hold a reference, so it may be unloaded at any time."""

    def __init__(self, weights: AdapterWeights, *, settings: DecoderSettings, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._layers = (AdapterLayer * len(settings.layers))()
        by_product = list(_by_product(weights, settings))
        # `_layers` points into this memory, which is filled in the order in which a step reads it.
        num_bytes = sum(_packed_bytes(updates, dtype) for _, _, updates in by_product)
        self._memory, self._num_used = in_large_pages(num_bytes, dtype=torch.uint8), 0
        for index, product, updates in by_product:
            setattr(self._layers[index], product, self._low_rank(updates))

    @property
    def address(self) -> int:
        return ctypes.addressof(self._layers)

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def _low_rank(self, updates: Sequence[LowRankUpdate | None]) -> LowRank:
        found = LowRank()
        downs = [each.down for each in updates if each is not None]
        if not downs:
            return found
        found.down = self._kept(_in_lanes(torch.cat(downs).to(self._dtype)))
        for part, update in enumerate(updates):
            if update is not None:
                found.rank[part] = update.rank
                found.up[part] = self._kept(_in_lanes(update.up.to(self._dtype)))
        return found

    def _kept(self, packed: torch.Tensor) -> int:
        """Append a tensor to `_memory` and return the address of the copy."""
        place = self._memory[self._num_used : self._num_used + packed.nbytes]
        self._num_used += packed.nbytes
        place.copy_(packed.view(torch.uint8).view(-1))
        return place.data_ptr()


class AdapterColumns(NamedTuple):
    """A step's adapters, in the form that `DecoderStep` requires."""

    adapters: ctypes.Array[ctypes.c_void_p]
    of_token: torch.Tensor  # [num_tokens] int64, each token's index in `adapters`, or -1


def adapter_columns(batch: StepBatch) -> AdapterColumns:
    numbers: dict[int, int] = {}  # index by adapter address
    of_token: list[int] = []
    for item in batch.scheduled:
        number = -1
        if item.adapter is not None:
            assert isinstance(item.adapter, NativeAdapter), "loaded by the decoder that computes with it"
            number = numbers.setdefault(item.adapter.address, len(numbers))
        of_token += [number] * len(item.token_ids)
    return AdapterColumns((ctypes.c_void_p * len(numbers))(*numbers), torch.tensor(of_token))


def _by_product(
    weights: AdapterWeights, settings: DecoderSettings
) -> Iterator[tuple[int, str, list[LowRankUpdate | None]]]:
    for index, product, linears in products(settings):
        yield index, product, [_prepared(weights.get(linear), settings, linear) for linear in linears]


def _packed_bytes(updates: Sequence[LowRankUpdate | None], dtype: torch.dtype) -> int:
    """Return the bytes of one product's updates after packing, including the padding of A to whole vectors."""
    found = [each for each in updates if each is not None]
    columns = sum(each.rank for each in found)
    down = (columns + -columns % LANES) * found[0].down.shape[1] if found else 0
    return (down + sum(each.up.numel() for each in found)) * dtype.itemsize


def _prepared(update: LowRankUpdate | None, settings: DecoderSettings, linear: str) -> LowRankUpdate | None:
    """Return an update with its outputs in the C++ code's order. Pads odd ranks: two bfloat16 form one unit."""
    if update is None:
        return None
    down, up = update.down, in_order(settings, linear, update.up)
    pad = torch.nn.functional.pad
    return LowRankUpdate(pad(down, (0, 0, 0, 1)), pad(up, (0, 1))) if update.rank % 2 else LowRankUpdate(down, up)


def _in_lanes(columns: torch.Tensor) -> torch.Tensor:
    """Convert [columns, inputs] to [columns / LANES, units of inputs, LANES] in units of 32 bits, padded with zeros."""
    padded = torch.nn.functional.pad(columns, (0, 0, 0, -len(columns) % LANES)).contiguous()
    units = padded.view(torch.int32)
    return units.view(-1, LANES, units.shape[1]).transpose(1, 2).contiguous()
