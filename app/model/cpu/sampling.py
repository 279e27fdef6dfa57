"""Masks and draws in C++: the same functions of logits, seed and position as the sampler's own, without a full sort."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from app.engine.batch import ScheduledSequence
from app.model.cpu.library import Team, library
from app.model.cpu.rows import pointer_to, rows_at

_DRAW = "Qqqfff4x"  # a Draw of sampling.h: seed, position, top-k, temperature, top-p, min-p
_ALL_BITS = 2**64 - 1


class NativeDraw:
    """Stands in for `sampler.draw` where logits lie in host memory."""

    def __init__(self, team: Team) -> None:
        code = library()
        assert code is not None, "there is a team"
        self._team, self._draw = team, code.carousel_draw

    def __call__(self, logits: torch.Tensor, rows: Sequence[int], items: Sequence[ScheduledSequence]) -> torch.Tensor:
        """logits: [_, vocab_size] float32; one token for each of its `rows` → [len(rows)] int64."""
        logits = logits.contiguous()
        numbers: list[float] = []
        for item in items:
            sampling = item.sampling
            numbers += (sampling.seed & _ALL_BITS, item.end, sampling.top_k or 0)
            numbers += (sampling.temperature, sampling.top_p, sampling.min_p)
        draws = struct.pack(_DRAW * len(items), *numbers)
        where = rows_at(rows)
        tokens = torch.empty(len(items), dtype=torch.long)
        self._draw(
            self._team.handle, logits.data_ptr(), logits.shape[1], pointer_to(where), draws, len(items),
            tokens.data_ptr(),
        )  # fmt: skip
        return tokens


class NativeMask:
    """Stands in for `sampler.mask` where logits lie in host memory."""

    def __init__(self, team: Team) -> None:
        code = library()
        assert code is not None, "there is a team"
        self._team, self._mask = team, code.carousel_mask

    def __call__(self, logits: torch.Tensor, rows: Sequence[int], allowed: bytearray) -> torch.Tensor:
        """See `sampler.Mask`."""
        logits = logits.clone(memory_format=torch.contiguous_format)
        where = rows_at(rows)
        packed = torch.frombuffer(allowed, dtype=torch.uint8)
        self._mask(
            self._team.handle, logits.data_ptr(), logits.shape[1], pointer_to(where), packed.data_ptr(),
            len(allowed) // len(rows), len(rows),
        )  # fmt: skip
        return logits
