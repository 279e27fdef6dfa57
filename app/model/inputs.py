"""A batch as packed model inputs: pure functions from plain Python to tensors.

All scheduled tokens stand in one row without padding:

    tokens     a0 a1 a2 | b7 | c4 | d16 d17       sequences a and d prefill, b and c decode
    positions   0  1  2    7    4    16  17
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch

from app.engine.batch import Batch, ScheduledSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """The sequences with a single token in this step, attended together."""

    token_indices: torch.Tensor  # [num_rows], where each one's token stands in the packed row
    block_tables: torch.Tensor  # [num_rows, max_blocks], padded with 0
    lengths: torch.Tensor  # [num_rows], tokens to attend to, its own included


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """One sequence with several tokens in this step."""

    tokens: slice  # where they stand in the packed row
    block_table: torch.Tensor  # [num_blocks]
    start: int  # position of the first
    length: int  # tokens to attend to at the last


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """What one forward pass takes."""

    token_ids: torch.Tensor  # [1, num_tokens]
    positions: torch.Tensor  # [1, num_tokens]
    slots: torch.Tensor  # [num_tokens], where each token's KV goes
    sampled_indices: torch.Tensor  # [num_sampled], tokens whose logits are wanted
    decode: DecodeRows | None
    prefill: tuple[PrefillChunk, ...]


def build_inputs(batch: Batch, *, block_size: int, device: torch.device) -> ModelInputs:
    scheduled = batch.scheduled
    ends: list[int] = []  # of each sequence's tokens in the packed row
    for item in scheduled:
        ends.append((ends[-1] if ends else 0) + len(item.token_ids))
    decode = [(item, end - 1) for item, end in zip(scheduled, ends, strict=True) if len(item.token_ids) == 1]
    prefill = [(item, end) for item, end in zip(scheduled, ends, strict=True) if len(item.token_ids) > 1]

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    return ModelInputs(
        token_ids=tensor(list(chain.from_iterable(item.token_ids for item in scheduled)))[None],
        positions=tensor(list(chain.from_iterable(range(item.start, item.end) for item in scheduled)))[None],
        slots=tensor(list(chain.from_iterable(_slots(item, block_size) for item in scheduled))),
        sampled_indices=tensor([end - 1 for item, end in zip(scheduled, ends, strict=True) if item.samples]),
        decode=_decode_rows(decode, block_size, device) if decode else None,
        prefill=tuple(
            PrefillChunk(
                tokens=slice(end - len(item.token_ids), end),
                block_table=tensor(item.block_ids[: -(-item.end // block_size)]),
                start=item.start,
                length=item.end,
            )
            for item, end in prefill
        ),
    )


def _slots(item: ScheduledSequence, block_size: int) -> list[int]:
    blocks = item.block_ids
    return [blocks[at // block_size] * block_size + at % block_size for at in range(item.start, item.end)]


def _decode_rows(rows: list[tuple[ScheduledSequence, int]], block_size: int, device: torch.device) -> DecodeRows:
    widths = [-(-item.end // block_size) for item, _ in rows]
    width = max(widths)
    tables = [item.block_ids[:own] + [0] * (width - own) for (item, _), own in zip(rows, widths, strict=True)]
    return DecodeRows(
        token_indices=torch.tensor([index for _, index in rows], device=device),
        block_tables=torch.tensor(tables, device=device),
        lengths=torch.tensor([item.end for item, _ in rows], device=device),
    )
