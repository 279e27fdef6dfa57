"""Masks and draws in C++: the same functions of logits, seed and position as the sampler's own, without a full sort."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from app.engine.batch import ScheduledSequence
from app.model.native.library import Draw, Team, library


class NativeDraw:
    """Stands in for `sampler.draw` where logits lie in host memory."""

    def __init__(self, team: Team) -> None:
        code = library()
        assert code is not None, "there is a team"
        self._team, self._draw = team, code.carousel_draw

    def __call__(self, logits: torch.Tensor, rows: Sequence[int], items: Sequence[ScheduledSequence]) -> torch.Tensor:
        """logits: [_, vocab_size] float32; one token for each of its `rows` → [len(rows)] int64."""
        logits = logits.contiguous()
        draws = (Draw * len(items))(
            *(
                Draw(p.seed, item.end, p.top_k or 0, p.temperature, p.top_p, p.min_p)
                for item in items
                for p in (item.sampling,)
            )
        )
        row_indices = torch.tensor(rows, dtype=torch.long)
        tokens = torch.empty(len(items), dtype=torch.long)
        self._draw(
            self._team.handle, logits.data_ptr(), logits.shape[1], row_indices.data_ptr(), draws, len(items),
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
        row_indices = torch.tensor(rows, dtype=torch.long)
        packed = torch.frombuffer(allowed, dtype=torch.uint8)
        self._mask(
            self._team.handle, logits.data_ptr(), logits.shape[1], row_indices.data_ptr(), packed.data_ptr(),
            len(allowed) // len(rows), len(rows),
        )  # fmt: skip
        return logits
