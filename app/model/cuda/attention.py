"""Paged attention on CUDA with our own Triton kernels (`kernels.py`). Requires only torch with CUDA and its Triton.

For sequences with one token in a step, the decode kernel splits the keys among programs (Flash-Decoding). For longer
pieces, the prefill kernel tiles the tokens (FlashAttention). Both read queries from the packed row, and keys and values
from the blocks, without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from app.engine.batch import ScheduledSequence, StepBatch
from app.model.attention import AttentionRules, with_contiguous_rows
from app.model.cuda.block_tables import BlockTables
from app.model.cuda.launching import kernels_of
from app.model.cuda.tuning import tuning_for
from app.model.inputs import ModelInputs, to_device
from app.model.kv_cache import ONE_GROUP, KVCache, LayerGroups, LayerShape

# (first token in the packed row, number of tokens, position of the first token, row of the block table); `kernels.py`.
Segment = tuple[int, int, int, int]

_LOG2_E = math.log2(math.e)
_MIN_DOT = 16  # the smallest side of a matrix product in Triton
_ROWS_OF_FLOAT32 = 16  # float32 products do not use tensor cores, and more rows would not fit into the registers
LARGEST_TILE = 64  # keys; kernels load a window from the start of the tile that contains its first key
# With `batch_invariant`, most tiles contain one token. With more rows, computing would take longer than loading keys.
_ROWS_OF_SINGLE = 64
_PROGRAMS_PER_SM = 16  # the most decode programs per multiprocessor; short sequences have fewer splits to run


class TritonAttention:
    """Paged KV memory and the attention kernels that read and write it.

    Splits and tiles follow from positions alone, so the result of a row does not depend on the other rows of its step.
    With `batch_invariant`, the prefill kernel also computes single tokens. The result then does not depend on how a
    sequence is cut into pieces either, but steps with few long sequences are slower.
    """

    def __init__(
        self,
        layers: dict[int, LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        groups: LayerGroups = ONE_GROUP,
        batch_invariant: bool = False,
        split_tokens: int = 256,
        max_splits: int = 32,
    ) -> None:
        """Allocate `num_blocks` blocks for at most `max_rows` sequences in a step, of up to `max_blocks` blocks each.

        layers: the shapes that a block stores, by place in the block. With a single group, places are layer indices.
        split_tokens: keys in a split, or more to keep a sequence within `max_splits` splits. Both are powers of two.
        dtype: the type of stored keys and values: the model's type or FP8.
        """
        assert split_tokens >= _MIN_DOT, f"a split of {split_tokens} keys is smaller than a tile"
        assert split_tokens == padded(split_tokens, 1), f"{split_tokens} is not a power of two"
        assert max_splits == padded(max_splits, 1), f"{max_splits} is not a power of two"
        self.block_size = block_size
        self.groups = groups
        self.batch_invariant = batch_invariant
        self.device = device
        self.scratch_slot = num_blocks * block_size  # the first slot of an extra block for padding tokens
        self.cache = KVCache(layers, num_blocks=num_blocks + 1, block_size=block_size, dtype=dtype, device=device)
        self.kv_tensors = self.cache.tensors
        self.tables = BlockTables(
            max_rows=max_rows * groups.num_groups, max_blocks=max_blocks, scratch_block=num_blocks, device=device
        )  # fmt: skip
        self.split_tokens = split_tokens
        # Reserve no memory for more partial results than the longest sequence has splits.
        longest = self.tables.tensor.shape[1] * block_size
        self.max_splits = min(max_splits, padded(-(-longest // split_tokens), 1))
        self.tuning = tuning_for(device)
        self.num_programs = _num_multiprocessors(device) * _PROGRAMS_PER_SM
        self.kernels = kernels_of("kernels", device)

    @staticmethod
    def fits(device: torch.device) -> bool:
        """Return whether the device is a CUDA device. Tests replace this to run in Triton's interpreter on a CPU."""
        return device.type == "cuda"

    def begin_step(self, batch: StepBatch, inputs: ModelInputs) -> TritonStep:
        rows = [
            StepRows(
                slots,
                single=_columns(single, self.device) if single else None,
                pieces=Pieces(longer, self.device) if longer else None,
            )
            for slots, (single, longer) in zip(inputs.slots, self.segments(batch.scheduled), strict=True)
        ]
        return TritonStep(self, rows)

    def segments(self, items: Sequence[ScheduledSequence]) -> list[tuple[list[Segment], list[Segment]]]:
        """Update the block tables. Return the segments with one token and those with several tokens, by group."""
        sizes = [len(item.token_ids) for item in items]
        starts = list(accumulate(sizes, initial=0))
        lists = [item.ids_of(group) for group in range(self.groups.num_groups) for item in items]
        rows = iter(self.tables.update(lists))
        found = []
        for _ in range(self.groups.num_groups):
            segments = [
                (first, size, item.start, next(rows))
                for first, size, item in zip(starts, sizes, items, strict=False)  # `starts` also has the end
            ]
            found.append(([each for each in segments if each[1] == 1], [each for each in segments if each[1] > 1]))
        return found


class Pieces:
    """The sequences with several tokens in a step. Cuts them into pieces that fit into a prefill tile."""

    def __init__(self, longer: Sequence[Segment], device: torch.device) -> None:
        self._longer = longer
        self._device = device
        self._cut: dict[int, torch.Tensor] = {}  # [4, num_pieces], by `max_tokens`

    def of(self, max_tokens: int) -> torch.Tensor:
        """Return pieces of at most `max_tokens` tokens as segments, [4, num_pieces]. Layers of one shape share them."""
        pieces = self._cut.get(max_tokens)
        if pieces is None:
            pieces = self._cut[max_tokens] = _columns(self._columns_of(max_tokens), self._device)
        return pieces

    def _columns_of(self, max_tokens: int) -> list[Segment]:
        return [
            (first + offset, min(max_tokens, size - offset), start + offset, row)
            for first, size, start, row in self._longer
            for offset in range(0, size, max_tokens)
        ]


class PaddedPieces(Pieces):
    """The pieces of a captured step. Their number and their addresses stay the same in every replay."""

    def __init__(self, device: torch.device, *, num_tokens: int, max_longer: int, scratch_row: int) -> None:
        """Reserve pieces for `num_tokens` tokens of at most `max_longer` sequences with several tokens."""
        super().__init__((), device)
        self._num_tokens, self._max_longer, self._scratch_row = num_tokens, max_longer, scratch_row
        self._first_spare = 0

    def fill(self, longer: Sequence[Segment], *, first_spare: int) -> None:
        """Overwrite the pieces with those of another step. Tokens from `first_spare` on belong to no sequence."""
        self._longer, self._first_spare = longer, first_spare
        for max_tokens, pieces in self._cut.items():
            columns = list(zip(*self._columns_of(max_tokens), strict=True))
            pieces.copy_(torch.tensor(columns, pin_memory=pieces.is_cuda), non_blocking=True)

    def _columns_of(self, max_tokens: int) -> list[Segment]:
        pieces = super()._columns_of(max_tokens)
        # Spare tokens get positions before 0 and see no key, so the kernel writes zeros to their uninitialised outputs.
        for first in range(self._first_spare, self._num_tokens, max_tokens):
            size = min(max_tokens, self._num_tokens - first)
            pieces.append((first, size, -size, self._scratch_row))
        room = self._num_tokens // max_tokens + self._max_longer + 1  # each sequence's last piece may be short
        return pieces + [(0, 0, 0, self._scratch_row)] * (room - len(pieces))


@dataclass(frozen=True, slots=True)
class StepRows:
    """The slots and segments of a step in the blocks of one group of layers.

    The tensors are int64 on the device. Launches depend only on the tensors' sizes, so the content may change between
    replays of a CUDA graph.
    """

    slots: torch.Tensor  # [num_tokens]
    single: torch.Tensor | None  # [4, num_segments]: segments (see `kernels.py`) of the sequences with one token
    pieces: Pieces | None


class TritonStep:
    """One forward pass, which writes the KV of the new tokens and then attends to the blocks."""

    def __init__(self, attention: TritonAttention, rows: Sequence[StepRows]) -> None:
        """rows: by group of layers."""
        self._attention = attention
        self._rows = rows
        self.slots = rows[0].slots  # the only slots of a model without windows

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: AttentionRules
    ) -> torch.Tensor:
        launch = _Launch(self._attention, layer, with_contiguous_rows(query), rules)
        launch.write(with_contiguous_rows(key), with_contiguous_rows(value), self._rows[launch.group_of_layer].slots)
        return self._attended(launch)

    def attend_written(self, layer: int, query: torch.Tensor, rules: AttentionRules) -> torch.Tensor:
        """Attend like `attend`, after the caller has written the new tokens' keys and values to `slots`."""
        return self._attended(_Launch(self._attention, layer, query, rules))

    def _attended(self, launch: _Launch) -> torch.Tensor:
        rows = self._rows[launch.group_of_layer]
        if rows.single is not None:
            if self._attention.batch_invariant:
                launch.prefill(rows.single)
            else:
                launch.decode(rows.single)
        if rows.pieces is not None:
            launch.prefill(rows.pieces.of(launch.tokens_per_piece))
        return launch.output


class _Launch:
    """Launches the kernels of one layer in one step."""

    def __init__(
        self,
        attention: TritonAttention,
        layer: int,
        query: torch.Tensor,
        rules: AttentionRules,
    ) -> None:
        self._attention = attention
        self._query = query
        place = attention.groups.place_of(layer)
        self.group_of_layer = place.group
        self._keys, self._values = attention.cache.layer(place.place)
        self._scales = attention.cache.scales.get(place.place, query)  # an unused pointer if there are no scales
        self._sinks = query if rules.sinks is None else rules.sinks  # an unused pointer if there are no sinks
        self._window = rules.sliding_window or 0
        key_dim, value_dim = self._keys.shape[-1], self._values.shape[-1]
        self.num_heads, self.num_kv_heads = query.shape[1], self._keys.shape[-2]
        self.group = self.num_heads // self.num_kv_heads
        self.output = query.new_empty(query.shape[0], self.num_heads, value_dim)
        key_padded, value_padded = padded(key_dim, _MIN_DOT), padded(value_dim, _MIN_DOT)
        self._shape = {
            "num_kv_heads": self.num_kv_heads,
            "key_dim": key_dim,
            "value_dim": value_dim,
            "key_padded": key_padded,
            "value_padded": value_padded,
        }
        self._tile = _tile(
            (key_padded + value_padded) * query.element_size(),
            tile_bytes=attention.tuning.tile_bytes,
            at_most=attention.split_tokens,
        )
        self._attend: dict[str, Any] = {
            **self._shape,
            # The kernels use powers of two, hence the factor log2(e). The cap is tanh(x / softcap) * softcap.
            "scale": rules.scaling * _LOG2_E if rules.softcap is None else rules.scaling / rules.softcap,
            "cap": (rules.softcap or 0.0) * _LOG2_E,
            "window": self._window,
            "table_stride": attention.tables.tensor.stride(0),
            "group": self.group,
            "block_size": attention.block_size,
            "tile": self._tile,
            "has_window": rules.sliding_window is not None,
            "has_cap": rules.softcap is not None,
            "has_sinks": rules.sinks is not None,
            "widen": attention.device.type == "cpu",
            "in_fp8": attention.cache.in_fp8,
        }

    @property
    def tokens_per_piece(self) -> int:
        """The number of tokens in a prefill tile, where each token has a row for each query head of a KV head."""
        return self._prefill_rows // self.group

    @property
    def _prefill_rows(self) -> int:
        shape = self._shape
        is_padded = (shape["key_dim"], shape["value_dim"]) != (shape["key_padded"], shape["value_padded"])
        in_fp8 = self._attention.cache.in_fp8
        rows = self._attention.tuning.rows(shape["value_padded"], is_padded=is_padded, in_fp8=in_fp8)
        if self._query.element_size() == torch.float32.itemsize:
            rows = _ROWS_OF_FLOAT32
        elif self._attention.batch_invariant:
            rows = min(rows, _ROWS_OF_SINGLE)
        return max(rows, padded(self.group, 1))

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        self._attention.kernels.write_kernel[(key.shape[0],)](
            key, value, slots, self._keys, self._values, self._scales, *key.stride()[:2], *value.stride()[:2],
            heads_padded=padded(self.num_kv_heads, 1), block_size=self._attention.block_size,
            in_fp8=self._attention.cache.in_fp8, **self._shape,
        )  # fmt: skip

    def decode(self, segments: torch.Tensor) -> None:
        attention, query, tuning = self._attention, self._query, self._attention.tuning
        num_segments, max_splits = segments.shape[1], attention.max_splits
        splits = {"tile": self._tile, "min_split": attention.split_tokens, "max_splits": max_splits}
        parts = (num_segments, self.num_heads, max_splits)
        highest, total = (torch.empty(parts, dtype=torch.float32, device=query.device) for _ in range(2))
        weighted = torch.empty(*parts, self._shape["value_dim"], dtype=torch.float32, device=query.device)
        num_lanes = min(max_splits, -(-attention.num_programs // (num_segments * self.num_kv_heads)))
        attention.kernels.decode_kernel[(num_segments, self.num_kv_heads, num_lanes)](
            query, self._keys, self._values, self._scales, attention.tables.tensor, segments, self._sinks, self.output,
            highest, total, weighted, *query.stride()[:2], num_rows=padded(self.group, _MIN_DOT),
            num_warps=tuning.decode_warps, num_stages=tuning.decode_stages, **(self._attend | splits),
        )  # fmt: skip
        if max_splits > 1:
            attention.kernels.reduce_kernel[(num_segments, self.num_heads)](
                highest, total, weighted, segments, self._sinks, self.output, self._window,
                value_dim=self._shape["value_dim"], value_padded=self._shape["value_padded"],
                has_window=self._attend["has_window"], has_sinks=self._attend["has_sinks"], **splits,
            )  # fmt: skip

    def prefill(self, segments: torch.Tensor) -> None:
        attention, query, tuning = self._attention, self._query, self._attention.tuning
        attention.kernels.prefill_kernel[(segments.shape[1], self.num_kv_heads)](
            query, self._keys, self._values, self._scales, attention.tables.tensor, segments, self._sinks, self.output,
            *query.stride()[:2], num_rows=self._prefill_rows, masks_all=attention.batch_invariant,
            num_warps=tuning.prefill_warps, num_stages=tuning.prefill_stages, **self._attend,
        )  # fmt: skip


def _columns(segments: Sequence[Segment], device: torch.device) -> torch.Tensor:
    """Transpose segments for the kernels: [4, num_segments] int64, on the device."""
    return to_device(list(zip(*segments, strict=True)), device)


def padded(size: int, smallest: int) -> int:
    """Return the next power of two, at least `smallest`, because sizes of Triton's tiles must be powers of two."""
    return max(smallest, 1 << (size - 1).bit_length())


def _tile(token_bytes: int, *, tile_bytes: int, at_most: int) -> int:
    """Return the keys in a tile: the largest power of two up to `at_most` whose keys and values fit in `tile_bytes`."""
    tile = min(LARGEST_TILE, at_most)
    while tile > _MIN_DOT and tile * token_bytes > tile_bytes:
        tile //= 2
    return tile


def _num_multiprocessors(device: torch.device) -> int:
    """Return the device's number of multiprocessors, or 1 for Triton's interpreter on a CPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
