"""LoRA adapters (Hu et al., 2021) in the CUDA decoder: adds rows × down × up to each matrix product.

All adapter matrices are stored in slots that are allocated once, at startup, so a captured step finds them at the same
addresses whichever adapters are loaded. Rows with the same adapter are grouped into tiles. Each product needs one
launch for `down` and one for `up`, like the grouped products of Punica (Chen et al., 2023, arXiv 2310.18547) and S-LoRA
(Sheng et al., 2023, arXiv 2311.03285). The speed has not been measured on a GPU yet.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from app.engine.batch import StepBatch
from app.model.adapters import (
    MAX_RANK,
    PRODUCTS,
    AdapterWeights,
    LowRankUpdate,
    Sizes,
    SlottedAdapter,
    linear_name,
    linear_sizes,
    part_of_rank,
    products,
    tokens_by_adapter,
    whole_size,
)
from app.model.cuda.attention import padded
from app.model.cuda.fp8 import Fp8Rows, Rows, in_fp8
from app.model.cuda.launching import copy_stream, kernels_of
from app.model.cuda.weights import CudaWeights
from app.model.inputs import to_device
from app.model.verification import MAX_DIFFERENCES, difference_above

_TILE_ROWS = _TILE_RANKS = 16  # the smallest size that matrix instructions support
_TILE_COLUMNS = 128
_RANK = 5  # the rank of the adapter in `difference`; not a multiple of a tile, to test the masks
_TILE_DEPTH_BYTES = 256
# Inputs that one program sums. Must not depend on the step, because a different split would change a row's bits.
_SPLIT = 2048


class AdaptedColumns(NamedTuple):
    """The rows of a step that use an adapter, as Python lists."""

    order: list[int]  # indices of tokens in the packed row, grouped by adapter
    tiles: list[int]  # [3 * num_tiles]: slots, first indices in `order`, numbers of rows; an unused tile has slot -1


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """`AdaptedColumns` on the device, in int64, with the slots that the tiles refer to."""

    slots: AdapterSlots
    order: torch.Tensor  # [num_places]
    tiles: torch.Tensor  # [3, num_tiles]

    def add(self, layer: int, product: str, inputs: Rows, output: torch.Tensor) -> None:
        """Add the adapters' updates to the output of a matrix product, in place. `product` is a key of `PRODUCTS`.

        inputs: [num_tokens, num_inputs]; output: [num_tokens, num_outputs], contiguous.
        """
        self.slots.add(layer, product, inputs, output, self)


@dataclass(frozen=True, slots=True)
class _StackedUpdates:
    """The matrices of all adapters for one product of one layer. A part is one of the linear layers in the product."""

    outputs: tuple[int, ...]  # the outputs of each part
    down: torch.Tensor  # [num_slots, num_parts, MAX_RANK, num_inputs]
    up: torch.Tensor  # [num_slots, outputs of all parts, MAX_RANK]
    ranks: torch.Tensor  # [num_parts, num_slots] int32; 0 if the adapter does not change the part

    @classmethod
    def of(cls, parts: Sequence[Sizes], num_slots: int, like: torch.Tensor) -> _StackedUpdates:
        outputs = tuple(each.num_outputs for each in parts)
        return cls(
            outputs,
            down=like.new_empty(num_slots, len(parts), MAX_RANK, parts[0].num_inputs),
            up=like.new_empty(num_slots, sum(outputs), MAX_RANK),
            ranks=like.new_zeros(len(parts), num_slots, dtype=torch.int32),
        )

    def write(self, slot: int, updates: Sequence[LowRankUpdate | None]) -> None:
        """Copy one adapter's updates to a slot. updates: one on the host for each part, or None for unchanged parts."""
        ups = torch.split(self.up[slot], list(self.outputs))
        for part, (update, up) in enumerate(zip(updates, ups, strict=True)):
            self.ranks[part, slot] = 0 if update is None else update.rank
            if update is not None:
                self.down[slot, part, : update.rank].copy_(update.down.to(self.down.dtype))
                # Copy whole rows: torch would need a buffer on the device to copy to parts of rows.
                up.copy_(functional.pad(update.up, (0, MAX_RANK - update.rank)).to(up.dtype))


class AdapterSlots:
    """Stores a model's adapters, and multiplies rows by their matrices. Loading and freeing are thread-safe.

    A rank stores only its part of each adapter.
    """

    def __init__(self, weights: CudaWeights, num_slots: int, *, num_ranks: int = 1) -> None:
        sizes = linear_sizes(weights.settings, weights.layers)
        self._num_ranks = num_ranks
        self.sizes = {name: whole_size(name, own, num_ranks) for name, own in sizes.items()}  # of whole adapters
        self.num_slots = num_slots
        like = weights.embedding
        self._device = like.device
        self._kernels = kernels_of("adapter_kernels", self._device)
        self._stacked: dict[tuple[int, str], _StackedUpdates] = {}  # by layer and product
        for index, product, linears in products(weights.settings):
            known = [sizes[linear] for linear in linears if linear in sizes]
            if known:
                self._stacked[index, product] = _StackedUpdates.of(known, num_slots, like)
        self._free = list(reversed(range(num_slots)))
        # All writes share one stream: torch has a pool of 32 streams, and a new one could be a capture's stream.
        self._stream = torch.cuda.Stream(like.device) if like.is_cuda else None  # type: ignore[no-untyped-call]
        self._writing = threading.Lock()
        self._late: dict[int, AdapterWeights] | None = None  # adapters to write in `resume`, by slot; None while awake

    def tensors(self) -> Iterator[torch.Tensor]:
        for each in self._stacked.values():
            yield from (each.down, each.up, each.ranks)

    @property
    def num_kernels(self) -> int:
        """The number of adapter kernels in a step."""
        return 2 * len(self._stacked)

    def step_bytes(self, num_tokens: int) -> int:
        """Return the bytes of scratch memory that a step needs if every token uses an adapter."""
        return max(_low_size(each, num_tokens).numel() for each in self._stacked.values()) * torch.float32.itemsize

    def load(self, weights: AdapterWeights) -> SlottedAdapter:
        """Write an adapter to a free slot. The caller must ensure that a slot is free.

        The write waits for launched steps, which may still read the slot. Only rank 0 may call this.
        """
        slot = self._free.pop()
        try:
            self.write(slot, part_of_rank(weights, 0, self._num_ranks))
        except BaseException:
            self._free.append(slot)
            raise
        return SlottedAdapter(slot)

    def write(self, slot: int, part: AdapterWeights) -> None:
        """Write this rank's part of an adapter to the slot that rank 0 has chosen."""
        with self._writing:
            if self._late is None:
                self._write(slot, part)
            else:
                self._late[slot] = part

    def free(self, adapter: SlottedAdapter) -> None:
        """Free an adapter's slot. No later step may use the adapter, but launched steps may still be running."""
        if (late := self._late) is not None:
            late.pop(adapter.slot, None)
        self._free.append(adapter.slot)

    def suspend_device(self) -> None:
        """Postpone all writes until `resume`. Call before the memory is freed."""
        with self._writing:
            self._late = {}

    def resume(self) -> None:
        """Write the adapters that were loaded since `suspend_device`. Call after the memory is restored."""
        with self._writing:
            late, self._late = self._late or {}, None
            while late:
                self._write(*late.popitem())

    def columns(self, batch: StepBatch, *, num_tokens: int | None = None) -> AdaptedColumns:
        """Return the rows of a step that use an adapter. num_tokens: pad the lists to a captured step of this size."""
        order: list[int] = []
        tiles: list[tuple[int, int, int]] = []
        for adapter, tokens in tokens_by_adapter(batch):
            assert isinstance(adapter, SlottedAdapter), "loaded by the decoder that computes with it"
            for first in range(0, len(tokens), _TILE_ROWS):
                tiles.append((adapter.slot, len(order) + first, min(_TILE_ROWS, len(tokens) - first)))
            order += tokens
        if num_tokens is not None:
            order += [0] * (num_tokens - len(order))
            tiles += [(-1, 0, 0)] * (self._max_tiles(num_tokens) - len(tiles))
        return AdaptedColumns(order, [number for column in zip(*tiles, strict=True) for number in column])

    def rows(self, batch: StepBatch) -> AdaptedRows:
        """Return the rows of a step that use an adapter, on the device. There must be at least one such row."""
        order, tiles = (to_device(column, self._device) for column in self.columns(batch))
        return AdaptedRows(self, order, tiles.view(3, -1))

    def add(self, layer: int, product: str, inputs: Rows, output: torch.Tensor, rows: AdaptedRows) -> None:
        """See `AdaptedRows.add`."""
        stacked = self._stacked.get((layer, product))
        if stacked is None:  # adapters do not change experts
            return
        values, scales = inputs if isinstance(inputs, Fp8Rows) else (inputs, inputs)
        num_inputs, num_places, num_tiles = values.shape[1], len(rows.order), rows.tiles.shape[1]
        size = _low_size(stacked, num_places)
        num_splits, _, num_parts, _ = size
        low = torch.empty(size, dtype=torch.float32, device=output.device)
        depth = _TILE_DEPTH_BYTES // stacked.down.element_size()
        options = {
            "num_slots": self.num_slots, "num_parts": num_parts, "max_rank": MAX_RANK, "tile_rows": _TILE_ROWS,
            "tile_ranks": _TILE_RANKS, "widen": self._device.type == "cpu",
        }  # fmt: skip
        self._kernels.shrink_kernel[(num_tiles, num_parts * MAX_RANK // _TILE_RANKS, num_splits)](
            values, scales, rows.order, rows.tiles, stacked.down, stacked.ranks, low, num_places,
            num_inputs=num_inputs, split=min(_SPLIT, padded(num_inputs, depth)), tile_depth=depth,
            in_fp8=isinstance(inputs, Fp8Rows), num_warps=2, num_stages=4, **options,
        )  # fmt: skip
        first, second, third = (*stacked.outputs, 0, 0)[:3]
        num_columns = sum(-(-size // _TILE_COLUMNS) for size in stacked.outputs)
        self._kernels.expand_kernel[(num_tiles, num_columns)](
            low, rows.order, rows.tiles, stacked.up, stacked.ranks, output, num_places, first_size=first,
            second_size=second, third_size=third, num_splits=num_splits, tile_columns=_TILE_COLUMNS, num_warps=4,
            num_stages=2, **options,
        )  # fmt: skip

    @torch.inference_mode()
    def difference(self, *, has_fp8: bool) -> str | None:
        """Describe how the kernels' results differ from plain torch's, or return None if they differ only by rounding.

        Runs one product of each size, in which two of three rows use an adapter. Overwrites slot 0, so no adapter may
        be loaded. has_fp8: whether the inputs of the products are in FP8.
        """
        numbers = torch.Generator().manual_seed(0)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=numbers)

        order, tiles = to_device([0, 2], self._device), to_device([[0], [0], [2]], self._device)
        tried = {(each.outputs, each.down.shape): (key, each) for key, each in self._stacked.items()}
        for (layer, product), stacked in tried.values():
            num_inputs = stacked.down.shape[-1]
            stacked.write(
                0, [LowRankUpdate(random(_RANK, num_inputs), random(size, _RANK)) for size in stacked.outputs]
            )
            inputs = random(3, num_inputs).to(stacked.down)
            given = in_fp8(inputs) if has_fp8 else inputs
            read = inputs.float() if isinstance(given, torch.Tensor) else given.values.float() * given.scales
            found = torch.zeros(3, sum(stacked.outputs), dtype=inputs.dtype, device=self._device)
            AdaptedRows(self, order, tiles).add(layer, product, given, found)
            ups = torch.split(stacked.up[0, :, :_RANK].float(), list(stacked.outputs))
            downs = stacked.down[0, :, :_RANK].float()
            expected = torch.cat([read @ down.T @ up.T for down, up in zip(downs, ups, strict=True)], dim=-1)
            expected[1] = 0
            stacked.ranks[:, 0] = 0
            difference = difference_above(MAX_DIFFERENCES[inputs.dtype][0], found, expected)
            if difference is not None:
                return f"the update of an adapter for {product} of layer {layer} differs by {difference}"
        return None

    def _max_tiles(self, num_tokens: int) -> int:
        """Return the largest possible number of tiles. An adapter's last tile may be short, but none is empty."""
        return min(num_tokens, -(-num_tokens // _TILE_ROWS) + self.num_slots)

    def _write(self, slot: int, weights: AdapterWeights) -> None:
        with copy_stream(self._stream):
            for (index, product), stacked in self._stacked.items():
                stacked.write(slot, [weights.get(linear_name(index, linear)) for linear in PRODUCTS[product]])


def _low_size(stacked: _StackedUpdates, num_places: int) -> torch.Size:
    """Return the shape of the output of `shrink_kernel`: [num_splits, num_places, num_parts, MAX_RANK]."""
    _, num_parts, max_rank, num_inputs = stacked.down.shape
    return torch.Size((-(-num_inputs // _SPLIT), num_places, num_parts, max_rank))
