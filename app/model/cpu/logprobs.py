"""Log-probabilities in C++: each row by one thread, in an order of its own, so its bits do not depend on the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from app.model.cpu.library import Team, library
from app.model.cpu.rows import pointer_to, rows_at
from app.model.logprobs import Logprobs


class NativeLogprobs:
    """Stands in for `logprobs.compute_logprobs` where logits lie in host memory."""

    def __init__(self, team: Team) -> None:
        code = library()
        assert code is not None, "there is a team"
        self._team, self._compute = team, code.carousel_logprobs

    def __call__(self, logits: torch.Tensor, rows: Sequence[int], token_ids: torch.Tensor, *, num_top: int) -> Logprobs:
        """logits: [_, vocab_size]; token_ids: [len(rows)] int64, one for each of the `rows`."""
        logits, token_ids = logits.float().contiguous(), token_ids.contiguous()
        where = rows_at(rows)
        num_rows = len(rows)
        found = Logprobs(
            torch.empty(num_rows),
            torch.empty(num_rows, dtype=torch.long),
            torch.empty(num_rows, num_top, dtype=torch.long),
            torch.empty(num_rows, num_top),
        )
        self._compute(
            self._team.handle, logits.data_ptr(), logits.shape[1], pointer_to(where), token_ids.data_ptr(),
            num_rows, num_top, *(column.data_ptr() for column in found),
        )  # fmt: skip
        return found
