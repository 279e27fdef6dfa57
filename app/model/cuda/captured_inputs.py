"""Chooses the sizes of steps to capture, and pads the inputs of a step to one of these sizes.

    tokens     a0 a1 a2 | b7 | c4 | - - -       size: 8 tokens; a prefills, b and c decode, three tokens are spare

Spare tokens belong to no sequence: their KV is written to a scratch slot, and their logits are never read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, zip_longest

import torch

from app.engine.batch import EMPTY_BATCH, MAX_MULTI_TOKEN_SEQUENCES, StepBatch
from app.model.cuda.adapters import AdaptedRows, AdapterSlots
from app.model.cuda.attention import PaddedPieces, Segment, StepRows, TritonAttention, TritonStep
from app.model.inputs import PackedColumns, packed_columns, to_device

# Larger decode steps run so long that launch times do not matter.
_MAX_ROWS = 512
# With more tokens, the GPU computes a step for longer than the host needs to launch the next step.
_MAX_TOKENS = 2048
_MIN_TOKENS = 64  # below this, most of a step's time is spent on reading the weights, so spare tokens are free
_ALIGNED = 2  # int64 numbers in 16 bytes, because the kernels are compiled for pointers aligned to 16 bytes


@dataclass(frozen=True, slots=True)
class StepSize:
    """The limits of a captured step: it can replay any batch that stays within them."""

    num_tokens: int
    num_rows: int  # limits both the sequences and the tokens with logits
    max_longer: int = 0  # sequences with several tokens (prompts or drafts); 0 for a decode step, with one token each
    has_adapters: bool = False  # whether sequences may use adapters

    @property
    def is_mixed(self) -> bool:
        return self.max_longer > 0


def decode_size(num_rows: int) -> StepSize:
    return StepSize(num_rows, num_rows)


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Return the sizes of decode steps to capture, in sequences. Small sizes are dense: padding costs most there."""
    largest = min(max_rows, _MAX_ROWS)
    ladder = [1, 2, 4, *range(8, 256, 8), *range(256, _MAX_ROWS, 32)]
    return (*(size for size in ladder if size < largest), largest)


def coarse_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes that must fit into memory for any graphs to be used, in the order of their capture.

    Padding to powers of two at most doubles a step. The largest size comes first, because the rest reuse its memory.
    """
    return tuple(sorted({sizes[-1], *(size for size in sizes if size.bit_count() == 1)}, reverse=True))


def mixed_sizes(*, max_rows: int, max_tokens: int) -> tuple[StepSize, ...]:
    """Return the sizes of steps with prompts to capture, of up to `max_tokens` tokens, ascending.

    From 256 tokens on, where each token costs time, each doubling has four sizes, so padding adds at most a quarter.
    """
    if max_tokens < 2:
        return ()
    largest = min(max_tokens, _MAX_TOKENS)
    ladder = [n << shift for shift in range(3) for n in range(_MIN_TOKENS * 4, _MIN_TOKENS * 8, _MIN_TOKENS)]
    every = [*range(_MIN_TOKENS, _MIN_TOKENS * 4, _MIN_TOKENS), *ladder]
    return tuple(
        StepSize(
            num_tokens, min(max_rows, num_tokens, _MAX_ROWS), min(max_rows, num_tokens // 2, MAX_MULTI_TOKEN_SEQUENCES)
        )
        for num_tokens in (*(size for size in every if size < largest), largest)
    )


def smallest_fitting(batch: StepBatch, *, decode: Sequence[StepSize], mixed: Sequence[StepSize]) -> StepSize | None:
    """Return the captured size to pad a step to, or None if the step must run eagerly. decode, mixed: ascending.

    A step that scores prompts or computes embeddings runs eagerly, because it needs outputs of too many tokens.
    """
    if batch.has_targets or batch.has_pooling:
        return None
    items = batch.scheduled
    if all(len(item.token_ids) == 1 and item.samples for item in items):
        at = bisect_left(decode, len(items), key=lambda size: size.num_rows)
        return decode[at] if at < len(decode) else None
    num_longer = sum(len(item.token_ids) > 1 for item in items)
    num_rows = batch.num_tokens if batch.has_drafts else len(items)  # with drafts, any token may need logits
    at = bisect_left(mixed, batch.num_tokens, key=lambda size: size.num_tokens)
    fitting = (size for size in mixed[at:] if num_rows <= size.num_rows and num_longer <= size.max_longer)
    return next(fitting, None)


class CapturedInputs:
    """The input tensors of one captured step, at addresses that do not change."""

    def __init__(self, size: StepSize, attention: TritonAttention, adapters: AdapterSlots | None = None) -> None:
        """Allocate the tensors. adapters: ignored unless the size has adapters."""
        self.size = size
        self._attention = attention
        self._adapters = adapters if size.has_adapters else None
        num_groups = attention.groups.num_groups
        columns = self._columns(EMPTY_BATCH, PackedColumns([], [], [], [[]] * num_groups), [[]] * num_groups)
        ends = list(accumulate(map(_room, columns)))
        self._numbers = to_device(_joined(columns), attention.device)
        views = [self._numbers[end - _room(column) :][: len(column)] for column, end in zip(columns, ends, strict=True)]
        self.token_ids, self.positions, self.logits_indices, *others = views
        slots, single, adapted = others[:num_groups], others[num_groups : 2 * num_groups], others[2 * num_groups :]
        self.adapted = None  # the rows with adapters, if the size has adapters
        if self._adapters is not None:
            self.adapted = AdaptedRows(self._adapters, adapted[0], adapted[1].view(3, -1))
        self._pieces = [self._spare_pieces() for _ in slots] if size.is_mixed else []
        self._rows = [
            StepRows(own, each.view(4, -1), pieces)
            for own, each, pieces in zip_longest(slots, single, self._pieces)
        ]  # fmt: skip

    def fill(self, batch: StepBatch) -> None:
        """Copy a step's inputs to the device without waiting: one copy, plus one for each size of prefill tiles."""
        packed = packed_columns(batch, block_size=self._attention.block_size)
        segments = self._attention.segments(batch.scheduled)
        numbers = _joined(self._columns(batch, packed, [single for single, _ in segments]))
        self._numbers.copy_(
            torch.tensor(numbers, dtype=torch.long, pin_memory=self._numbers.is_cuda), non_blocking=True
        )
        for pieces, (_, longer) in zip(self._pieces, segments, strict=False):  # a decode step has no pieces
            pieces.fill(longer, first_spare=len(packed.token_ids))

    def begin(self) -> TritonStep:
        return TritonStep(self._attention, self._rows)

    def _columns(self, batch: StepBatch, packed: PackedColumns, single: Sequence[Sequence[Segment]]) -> list[list[int]]:
        attention, adapters = self._attention, self._adapters
        columns = padded_columns(
            packed, single, size=self.size,
            scratch_slot=attention.scratch_slot, scratch_row=attention.tables.scratch_row,
        )  # fmt: skip
        return columns if adapters is None else [*columns, *adapters.columns(batch, num_tokens=self.size.num_tokens)]

    def _spare_pieces(self) -> PaddedPieces:
        return PaddedPieces(
            self._attention.device,
            num_tokens=self.size.num_tokens,
            max_longer=self.size.max_longer,
            scratch_row=self._attention.tables.scratch_row,
        )


def padded_columns(
    packed: PackedColumns, single: Sequence[Sequence[Segment]], *, size: StepSize, scratch_slot: int, scratch_row: int
) -> list[list[int]]:
    """Return the inputs of a step as columns, padded with spare tokens and segments.

    The columns are token ids, positions, indices of the tokens with logits, then slots for each group of layers, then
    segments of single tokens for each group, [4 * num_rows] (see `kernels.py`). single: the unpadded segments by group.
    """
    num_spare, num_single = size.num_tokens - len(packed.token_ids), len(single[0])
    if size.is_mixed:  # spare segments are empty, because prompts may use all tokens of the step
        spare_columns = [(0, 0, -1, scratch_row)] * (size.num_rows - num_single)
    else:
        spare_columns = [(at, 1, 0, scratch_row) for at in range(num_single, size.num_rows)]
    return [
        packed.token_ids + [0] * num_spare,
        packed.positions + [0] * num_spare,
        packed.logits_indices + [0] * (size.num_rows - len(packed.logits_indices)),
        *(slots + [scratch_slot] * num_spare for slots in packed.slots),
        *(list(chain.from_iterable(zip(*own, *spare_columns, strict=True))) for own in single),
    ]


def _room(column: Sequence[int]) -> int:
    return -(-len(column) // _ALIGNED) * _ALIGNED


def _joined(columns: Sequence[list[int]]) -> list[int]:
    return list(chain.from_iterable(column + [0] * (_room(column) - len(column)) for column in columns))
