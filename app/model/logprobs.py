"""Log-probabilities of drawn tokens and of prompt tokens, for those who ask: nobody else pays for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from app.engine.batch import Batch, StepResult
from app.engine.request import TokenLogprobs
from app.model.inputs import to_device

_ROWS_AT_ONCE = 64  # a vocabulary of float32 for each, several times over


class Logprobs(NamedTuple):
    """Of one token in each of some rows, and of the likeliest tokens there. Natural logarithms, float32."""

    logprobs: torch.Tensor  # [num_rows]
    ranks: torch.Tensor  # [num_rows] int64, from 1
    top_token_ids: torch.Tensor  # [num_rows, num_top] int64
    top_logprobs: torch.Tensor  # [num_rows, num_top]


class ComputeLogprobs(Protocol):
    """The log-softmax of raw logits, where it is wanted."""

    def __call__(self, logits: torch.Tensor, rows: Sequence[int], token_ids: torch.Tensor, *, num_top: int) -> Logprobs:
        """logits: [_, vocab_size]; token_ids: [len(rows)] int64, one for each of the `rows`."""
        ...


def compute_logprobs(logits: torch.Tensor, rows: Sequence[int], token_ids: torch.Tensor, *, num_top: int) -> Logprobs:
    """The plain torch way, on any device."""
    where = to_device(rows, logits.device)
    pieces = [slice(at, at + _ROWS_AT_ONCE) for at in range(0, len(rows), _ROWS_AT_ONCE)]
    found = [_compute(logits[where[piece]], token_ids[piece], num_top) for piece in pieces]
    return found[0] if len(found) == 1 else Logprobs(*(torch.cat(columns) for columns in zip(*found, strict=True)))


def _compute(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
    logits = logits.float()
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(-1, token_ids[:, None])
    top, top_token_ids = logits.topk(num_top, dim=-1)
    # One subtraction for all of them: the likeliest token's own value is the first of the others', to the last bit.
    return Logprobs(
        (own - normaliser)[:, 0],
        1 + (logits > own).sum(dim=-1),
        top_token_ids,
        top - normaliser,
    )


class WantedLogprobs:
    """Whose log-probabilities a batch wants, and in which rows of its logits they are (as `inputs.py` orders them)."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self.sampled_rows: list[int] = []  # one for each of `batch.sampled`
        self._target_rows: list[int] = []
        self._targets: list[int] = []
        row = 0
        for item in batch.scheduled:
            self._target_rows += range(row, row + len(item.targets))
            self._targets += item.targets
            row += len(item.targets)
            if item.samples:
                self.sampled_rows.append(row)
                row += 1
        self._askers = [at for at, item in enumerate(batch.sampled) if item.sampling.logprobs is not None]

    def of_sampled(self, of_rows: torch.Tensor) -> torch.Tensor:
        """What is given for all rows of the logits, for those of `batch.sampled` alone."""
        return of_rows[to_device(self.sampled_rows, of_rows.device)] if self._targets else of_rows

    def compute(self, logits: torch.Tensor, token_ids: torch.Tensor, compute: ComputeLogprobs) -> Logprobs:
        """logits: all rows; token_ids: [num_sampled] int64, what was drawn."""
        device = logits.device
        rows = [self.sampled_rows[at] for at in self._askers] + self._target_rows
        drawn = token_ids[to_device(self._askers, device)]
        return compute(logits, rows, torch.cat((drawn, to_device(self._targets, device))), num_top=self._num_top)

    @property
    def _num_top(self) -> int:
        """The most that anybody wants."""
        drawn = [self._batch.sampled[at].sampling.logprobs or 0 for at in self._askers]
        scored = [item.sampling.prompt_logprobs or 0 for item in self._batch.scheduled if item.targets]
        return max((*drawn, *scored))

    def result(self, token_ids: list[int], found: Logprobs) -> StepResult:
        """The step's result, from tensors on the host that `compute` gave."""
        columns = zip(*(column.tolist() for column in found), strict=True)
        logprobs: dict[str, TokenLogprobs] = {}
        for at in self._askers:
            item = self._batch.sampled[at]
            logprobs[item.request_id] = _cut(next(columns), item.sampling.logprobs or 0)
        prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        for item in self._batch.scheduled:
            if item.targets:
                num_top = item.sampling.prompt_logprobs or 0
                prompt_logprobs[item.request_id] = tuple([_cut(next(columns), num_top) for _ in item.targets])
        return StepResult(token_ids, logprobs, prompt_logprobs)


def _cut(row: tuple[float, int, list[int], list[float]], num_top: int) -> TokenLogprobs:
    logprob, rank, top_token_ids, top_logprobs = row
    return TokenLogprobs(logprob, rank, tuple(top_token_ids[:num_top]), tuple(top_logprobs[:num_top]))
