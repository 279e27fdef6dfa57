"""Adjustments, draws and log-probabilities in C++, without a full sort. `Sampler` has the same functions.

One thread computes each row in a fixed order, so the bits of a row do not depend on the other rows.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

import torch

from app.engine.batch import ScheduledSequence
from app.model.cpu.library import Adjustments, Draw, ThreadPool
from app.model.logprobs import Logprobs
from app.model.sampler import Sampler, draw_numbers, joined_masks

_DRAW, _ADJUSTMENTS = Draw.packing(), Adjustments.packing()


class NativeSampler(Sampler):
    """A sampler for logits in host memory."""

    def __init__(self, threads: ThreadPool) -> None:
        self._threads = threads

    def draw(self, logits: torch.Tensor, rows: Sequence[int], items: Sequence[ScheduledSequence]) -> torch.Tensor:
        logits = logits.float().contiguous()
        numbers: list[float] = []
        for item in items:
            numbers.append(item.end)
            numbers += draw_numbers(item.sampling)
        draws = struct.pack("=" + _DRAW * len(items), *numbers)
        where = _rows_at(rows)
        tokens = torch.empty(len(items), dtype=torch.long)
        self._threads.code.carousel_draw(
            self._threads.handle, logits.data_ptr(), logits.shape[1], _pointer_to(where), draws, len(items),
            tokens.data_ptr(),
        )  # fmt: skip
        return tokens

    def adjust(self, logits: torch.Tensor, rows: Sequence[int], items: Sequence[ScheduledSequence]) -> torch.Tensor:
        logits = logits.float().contiguous()
        where = _rows_at(rows)
        masks = joined_masks(items)
        # Keep the arrays alive until the call returns.
        banned = [array("q", () if item.matcher else item.banned_token_ids) for item in items]
        numbers: list[float] = []
        num_masks = 0
        for item, tokens in zip(items, banned, strict=True):
            numbers += _numbers_of(item)
            numbers += (*tokens.buffer_info(), -1 if item.matcher is None else num_masks)
            num_masks += item.matcher is not None
        adjusted = torch.empty(len(items), logits.shape[1])
        self._threads.code.carousel_adjust(
            self._threads.handle, logits.data_ptr(), logits.shape[1], _pointer_to(where),
            struct.pack("=" + _ADJUSTMENTS * len(items), *numbers), len(items),
            torch.frombuffer(masks, dtype=torch.uint8).data_ptr() if masks else None,
            len(masks) // max(1, num_masks), adjusted.data_ptr(),
        )  # fmt: skip
        return adjusted

    def logprobs(self, logits: torch.Tensor, rows: Sequence[int], token_ids: torch.Tensor, *, num_top: int) -> Logprobs:
        logits, token_ids = logits.float().contiguous(), token_ids.contiguous()
        where = _rows_at(rows)
        found = Logprobs.empty(len(rows), num_top, logits.device)
        self._threads.code.carousel_logprobs(
            self._threads.handle, logits.data_ptr(), logits.shape[1], _pointer_to(where), token_ids.data_ptr(),
            len(rows), num_top, *(column.data_ptr() for column in found),
        )  # fmt: skip
        return found


def _numbers_of(item: ScheduledSequence) -> tuple[float, ...]:
    """Return the first fields of `Adjustments` in sampling.h: a penalty, then addresses and lengths of arrays."""
    own = item.adjustments
    if own is None:
        return (1.0, *(0,) * 8)
    deductions, biases = own.deductions.buffer_info()[0], own.biases.buffer_info()[0]
    tokens = (*own.seen.buffer_info(), *own.deducted.buffer_info(), deductions, *own.biased.buffer_info(), biases)
    return (own.repetition_penalty, *tokens)


def _rows_at(rows: Sequence[int]) -> torch.Tensor | None:
    """Return indices of rows, [num_rows] int64, or None for a range, which must be the first rows in order."""
    if isinstance(rows, range):
        assert rows == range(len(rows)), f"{rows} leaves rows out"
        return None
    return torch.tensor(rows, dtype=torch.long)


def _pointer_to(rows: torch.Tensor | None) -> int | None:
    """Return the address of the indices, which must outlive the call."""
    return None if rows is None else rows.data_ptr()
