"""Pure functions that turn a batch of plain Python values into the packed tensors that a model reads.

All scheduled tokens are packed into one row, without padding:

    tokens     a0 a1 a2 | b7 | c4 | d16 d17       sequences a and d prefill, b and c decode
    positions   0  1  2    7    4    16  17
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from app.engine.batch import ScheduledSequence, StepBatch
from app.engine.request import Pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """The inputs of a forward pass. Indices refer to tokens in the packed row."""

    token_ids: torch.Tensor  # [1, num_tokens]
    positions: torch.Tensor  # [1, num_tokens]
    slots: tuple[torch.Tensor, ...]  # one tensor per group of layers: [num_tokens], where keys and values are written
    logits_indices: torch.Tensor  # [num_rows], tokens whose logits are needed, ascending
    hidden_indices: torch.Tensor | None = None  # [num_hidden], tokens whose hidden states are needed


class PackedColumns(NamedTuple):
    """The numbers of `ModelInputs` before they are converted to tensors."""

    token_ids: list[int]
    positions: list[int]
    logits_indices: list[int]
    slots: list[list[int]]  # by group of layers


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """The sequences with a single new token, which attend in one call."""

    token_indices: torch.Tensor  # [num_rows], each sequence's token in the packed row
    block_tables: torch.Tensor  # [num_rows, max_blocks], padded with 0
    lengths: torch.Tensor  # [num_rows], tokens to attend to, including the new one

    def parts(self, number: int) -> Iterator[DecodeRows]:
        """Yield parts of at most `number` rows."""
        for first in range(0, len(self.lengths), number):
            own = slice(first, first + number)
            yield DecodeRows(
                token_indices=self.token_indices[own], block_tables=self.block_tables[own], lengths=self.lengths[own]
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """A sequence with several new tokens."""

    tokens: slice  # indices of the new tokens
    block_table: torch.Tensor  # [num_blocks]
    start: int  # position of the first token
    length: int  # tokens that the last new token attends to, including itself


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """A step's sequences, as attention in plain torch needs them."""

    decode: DecodeRows | None
    prefill: tuple[PrefillChunk, ...]


@dataclass(frozen=True, slots=True)
class Segments:
    """A step's sequences, as native attention needs them. Long sequences are split so that threads share the work."""

    segments: torch.Tensor  # [num_segments, 4] int32: first token in the packed row, tokens, position, table offset
    tables: tuple[torch.Tensor, ...]  # one per group of layers: [num_block_ids] int32, all block tables joined
    num_positions: int  # length of the longest sequence, including its new tokens


def build_inputs(batch: StepBatch, *, block_size: int, device: torch.device) -> ModelInputs:
    columns = packed_columns(batch, block_size=block_size)
    token_ids, positions, logits_indices, *slots = _tensors([*columns[:3], *columns.slots], device)
    return ModelInputs(
        token_ids=token_ids[None],
        positions=positions[None],
        slots=tuple(slots),
        logits_indices=logits_indices,
        hidden_indices=to_device(pooled_places(batch.scheduled), device) if batch.has_pooling else None,
    )


def packed_columns(batch: StepBatch, *, block_size: int) -> PackedColumns:
    scheduled = batch.scheduled
    num_tokens = [len(item.token_ids) for item in scheduled]
    tables = [[item.block_ids for item in scheduled], *zip(*[item.window_ids for item in scheduled], strict=True)]
    if max(num_tokens, default=1) == 1:  # a fast path for the common case: every sequence decodes
        positions = [item.start for item in scheduled]
        token_ids = [item.token_ids[0] for item in scheduled]
        slots = [
            [ids[at // block_size] * block_size + at % block_size for ids, at in zip(of_group, positions, strict=True)]
            for of_group in tables
        ]
    else:
        positions = [at for item in scheduled for at in range(item.start, item.end)]
        token_ids = [token_id for item in scheduled for token_id in item.token_ids]
        slots = [
            [slot for item, ids in zip(scheduled, of_group, strict=True) for slot in _slots(item, ids, block_size)]
            for of_group in tables
        ]
    ends = accumulate(num_tokens)
    if batch.has_drafts:
        wanted = list(range(len(token_ids)))
    elif batch.has_targets:
        wanted = list(chain.from_iterable(_wanted(item, end) for item, end in zip(scheduled, ends, strict=True)))
    else:
        wanted = [end - 1 for item, end in zip(scheduled, ends, strict=True) if item.samples]
    return PackedColumns(token_ids, positions, wanted, slots)


def _tensors(columns: Sequence[list[int]], device: torch.device) -> Sequence[torch.Tensor]:
    if device.type != "cpu":  # kernels require aligned tensors, so each tensor has its own memory
        return [to_device(column, device) for column in columns]
    # Creating a small tensor is mostly overhead, so the columns are views of one tensor.
    together = torch.tensor(list(chain.from_iterable(columns)), dtype=torch.long)
    return torch.split_with_sizes(together, [len(column) for column in columns])


def _wanted(item: ScheduledSequence, end: int) -> list[int]:
    """Return the indices of a sequence's tokens whose logits are needed. end: its end in the packed row.

    Tokens that predict targets come first, then the last token if it samples. `logprobs.py` relies on this order.
    """
    first = end - item.end + item.first_target - 1
    wanted = list(range(first, first + len(item.targets)))
    return [*wanted, end - 1] if item.samples else wanted


def pooled_places(scheduled: Sequence[ScheduledSequence]) -> list[int]:
    """Return the indices of all tokens whose hidden states are pooled. `pooling.py` relies on their order."""
    places: list[int] = []
    end = 0
    for item in scheduled:
        begin, end = end, end + len(item.token_ids)
        if item.pooling == Pooling.CLS:
            places.append(begin)
        elif item.pooling is not None:
            places += range(begin if item.pooling == Pooling.MEAN else end - 1, end)
    return places


def to_device(
    values: Sequence[float] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.long
) -> torch.Tensor:
    """Create a tensor of numbers on a device. Copies to CUDA from pinned memory, so that the host does not wait."""
    is_cuda = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=is_cuda).to(device, non_blocking=is_cuda)


def bytes_to_device(numbers: bytearray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Like `to_device`, for at least one number that is already encoded as `dtype`."""
    return moved(torch.frombuffer(numbers, dtype=dtype), device)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Like `to_device`, for a tensor in host memory."""
    is_cuda = device.type == "cuda"
    return (tensor.pin_memory() if is_cuda else tensor).to(device, non_blocking=is_cuda)


def build_attention_rows(batch: StepBatch, *, group: int, block_size: int, device: torch.device) -> AttentionRows:
    ends = list(accumulate(len(item.token_ids) for item in batch.scheduled))
    both = list(zip(batch.scheduled, ends, strict=True))
    decode = [(item, end - 1) for item, end in both if len(item.token_ids) == 1]
    return AttentionRows(
        decode=_decode_rows(decode, group, block_size, device) if decode else None,
        prefill=tuple(
            PrefillChunk(
                tokens=slice(end - len(item.token_ids), end),
                block_table=torch.tensor(item.ids_of(group)[: -(-item.end // block_size)], device=device),
                start=item.start,
                length=item.end,
            )
            for item, end in both
            if len(item.token_ids) > 1
        ),
    )


def build_segments(batch: StepBatch, *, num_groups: int = 1, block_size: int, max_tokens: int) -> Segments:
    """Return segments of at most `max_tokens` tokens each, as tensors in host memory, where native attention runs."""
    segments: list[int] = []
    tables: list[list[int]] = [[] for _ in range(num_groups)]
    first_token = 0
    for item in batch.scheduled:
        num_tokens, start = len(item.token_ids), item.start
        if num_tokens <= max_tokens:
            segments += (first_token, num_tokens, start, len(tables[0]))
        else:
            for offset in range(0, num_tokens, max_tokens):
                size = min(max_tokens, num_tokens - offset)
                segments += (first_token + offset, size, start + offset, len(tables[0]))
        for group, table in enumerate(tables):
            table += item.ids_of(group)[: -(-(start + num_tokens) // block_size)]
        first_token += num_tokens
    num_positions = max(item.end for item in batch.scheduled)
    return Segments(_as_tensor(segments).view(-1, 4), tuple(map(_as_tensor, tables)), num_positions)


def _as_tensor(numbers: list[int]) -> torch.Tensor:
    """Convert one or more numbers to an int32 tensor. Uses an array, because torch converts lists slowly."""
    return torch.frombuffer(array("i", numbers), dtype=torch.int32)


def _slots(item: ScheduledSequence, block_ids: list[int], block_size: int) -> list[int]:
    return [block_ids[at // block_size] * block_size + at % block_size for at in range(item.start, item.end)]


def _decode_rows(
    rows: list[tuple[ScheduledSequence, int]], group: int, block_size: int, device: torch.device
) -> DecodeRows:
    widths = [-(-item.end // block_size) for item, _ in rows]
    width = max(widths)
    tables = [item.ids_of(group)[:own] + [0] * (width - own) for (item, _), own in zip(rows, widths, strict=True)]
    return DecodeRows(
        token_indices=torch.tensor([index for _, index in rows], device=device),
        block_tables=torch.tensor(tables, device=device),
        lengths=torch.tensor([item.end for item, _ in rows], device=device),
    )
