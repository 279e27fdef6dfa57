"""Computes log-probabilities of sampled tokens and of prompt tokens, for requests that need them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

import torch

from app.engine.batch import StepBatch, StepResult, by_request
from app.engine.request import TokenLogprobs
from app.model.inputs import to_device

_ROWS_AT_ONCE = 64  # a row needs several float32 copies of its logits


class Logprobs(NamedTuple):
    """Each row's log-probability of one token, and those of its likeliest tokens. Natural logarithms in float32."""

    normalisers: torch.Tensor  # [num_rows], the number to subtract from a logit
    logprobs: torch.Tensor  # [num_rows]
    ranks: torch.Tensor  # [num_rows] int64; the likeliest token has rank 1
    top_token_ids: torch.Tensor  # [num_rows, num_top] int64
    top_logprobs: torch.Tensor  # [num_rows, num_top]

    @classmethod
    def empty(cls, num_rows: int, num_top: int, device: torch.device) -> Logprobs:
        """Allocate the columns for native code, which fills them."""
        new = partial(torch.empty, device=device)
        ranks, tokens = new(num_rows, dtype=torch.long), new(num_rows, num_top, dtype=torch.long)
        return cls(new(num_rows), new(num_rows), ranks, tokens, new(num_rows, num_top))


def compute_logprobs(logits: torch.Tensor, rows: Sequence[int], token_ids: torch.Tensor, *, num_top: int) -> Logprobs:
    """Compute log-probabilities in plain torch, on any device. See `Sampler.logprobs`."""
    where = to_device(rows, logits.device)
    pieces = [slice(at, at + _ROWS_AT_ONCE) for at in range(0, len(rows), _ROWS_AT_ONCE)]
    found = [_compute(logits[where[piece]], token_ids[piece], num_top) for piece in pieces]
    return found[0] if len(found) == 1 else Logprobs(*(torch.cat(columns) for columns in zip(*found, strict=True)))


def _compute(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
    logits = logits.float()
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(-1, token_ids[:, None])
    top, top_token_ids = logits.topk(num_top, dim=-1)
    # Subtract one normaliser everywhere, so that the likeliest token's value equals `top_logprobs[0]` bitwise.
    return Logprobs(
        normaliser[:, 0],
        (own - normaliser)[:, 0],
        1 + (logits > own).sum(dim=-1),
        top_token_ids,
        top - normaliser,
    )


class WantedLogprobs:
    """Computes the log-probabilities that a batch's requests ask for. Rows of logits are ordered as in `inputs.py`."""

    def __init__(self, batch: StepBatch) -> None:
        self._batch = batch
        self._scored = [item for item in batch.scheduled if item.targets] if batch.has_targets else []
        no_rows = ()
        self._sampled_rows, self._target_rows = _rows(batch) if self._scored else (range(len(batch.sampled)), no_rows)
        self._targets = [target for item in self._scored for target in item.targets]
        # Indices in `batch.sampled` of the items that ask for log-probabilities, and the number of top tokens of each.
        num_top = [item.sampling.logprobs for item in batch.sampled]
        self._wanting = [at for at, each in enumerate(num_top) if each is not None]
        self._num_drawn_top = [each for each in num_top if each is not None]
        self._num_scored_top = [item.sampling.prompt_logprobs or 0 for item in self._scored]
        self._named = [batch.sampled[at].sampling.logprob_token_ids for at in self._wanting]

    def of_sampled(self, of_rows: torch.Tensor) -> torch.Tensor:
        """Select the rows of `batch.sampled` from a tensor with one row for each row of the logits."""
        return of_rows[to_device(self._sampled_rows, of_rows.device)] if self._scored else of_rows

    def compute(self, logits: torch.Tensor, token_ids: torch.Tensor, compute: Callable[..., Logprobs]) -> Logprobs:
        """Compute the log-probabilities. Those of tokens that requests name are appended to `logprobs`.

        logits: all rows. token_ids: [num_sampled] int64, the sampled tokens. compute: `Sampler.logprobs`.
        """
        device = logits.device
        rows: Sequence[int] = self._sampled_rows
        if len(self._wanting) < len(rows):
            rows = [rows[at] for at in self._wanting]
            token_ids = token_ids[to_device(self._wanting, device)]
        if self._targets:
            rows = [*rows, *self._target_rows]
            token_ids = torch.cat((token_ids, to_device(self._targets, device)))
        found = compute(logits, rows, token_ids, num_top=max((*self._num_drawn_top, *self._num_scored_top)))
        if not any(self._named):
            return found
        places = to_device([at for at, named in enumerate(self._named) for _ in named], device)
        of_named = logits[to_device(rows, device)[places], to_device(list(chain.from_iterable(self._named)), device)]
        # The same subtraction as for all other tokens, so that equal logits yield bitwise equal values.
        return found._replace(logprobs=torch.cat((found.logprobs, of_named.float() - found.normalisers[places])))

    def result(self, token_ids: list[int], found: Logprobs) -> StepResult:
        """Return the step's result. found: the result of `compute`, moved to the host."""
        num_top = list(self._num_drawn_top)
        for item, num_scored_top in zip(self._scored, self._num_scored_top, strict=True):
            num_top += [num_scored_top] * len(item.targets)
        own, of_named = found.logprobs[: len(num_top)], iter(found.logprobs[len(num_top) :].tolist())
        by_row = _by_row(found._replace(logprobs=own), num_top)
        for row, named in enumerate(self._named):
            if named:
                by_row[row] = by_row[row]._replace(
                    top_token_ids=named, top_logprobs=tuple(islice(of_named, len(named)))
                )
        logprobs = by_request(
            (self._batch.sampled[at].request_id, each) for at, each in zip(self._wanting, by_row, strict=False)
        )
        prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        row = len(self._wanting)
        for item in self._scored:
            prompt_logprobs[item.request_id] = tuple(by_row[row : row + len(item.targets)])
            row += len(item.targets)
        return StepResult(token_ids, logprobs, prompt_logprobs)


def _rows(batch: StepBatch) -> tuple[Sequence[int], Sequence[int]]:
    """Return the rows of logits that belong to `batch.sampled`, and the rows of all targets."""
    sampled_rows: list[int] = []
    target_rows: list[int] = []
    row = 0
    for item in batch.scheduled:
        target_rows += range(row, row + len(item.targets))
        row += len(item.targets)
        if item.samples:
            sampled_rows.append(row)
            row += 1
    return sampled_rows, target_rows


def _by_row(found: Logprobs, num_top: list[int]) -> list[TokenLogprobs]:
    """Convert tensors to plain numbers. num_top: how many of the likeliest tokens to include, by row."""
    logprobs, ranks, top_token_ids, top_logprobs = (column.tolist() for column in found[1:])
    if min(num_top) == max(num_top):
        return list(map(_entry, zip(logprobs, ranks, map(tuple, top_token_ids), map(tuple, top_logprobs), strict=True)))
    rows = zip(logprobs, ranks, top_token_ids, top_logprobs, num_top, strict=True)
    return [_entry((a, b, tuple(c[:num]), tuple(d[:num]))) for a, b, c, d, num in rows]


# Creates a TokenLogprobs from its four fields. Faster than `_make`, because no Python code runs.
_entry: Callable[[Iterable[object]], TokenLogprobs] = partial(tuple.__new__, TokenLogprobs)
