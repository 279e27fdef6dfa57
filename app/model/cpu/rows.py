"""Which rows of logits a C++ call is for."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def rows_at(rows: Sequence[int]) -> torch.Tensor | None:
    """Indices of rows [num_rows] int64; None for a range: the first rows, in their order."""
    if isinstance(rows, range):
        assert rows == range(len(rows)), f"{rows} leaves rows out"
        return None
    return torch.tensor(rows, dtype=torch.long)


def pointer_to(rows: torch.Tensor | None) -> int | None:
    """Where the indices lie; they must outlive the call."""
    return None if rows is None else rows.data_ptr()
