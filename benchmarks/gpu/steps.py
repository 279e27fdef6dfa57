"""Steps as the engine would schedule them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from app.engine.batch import ScheduledSequence, StepBatch
from app.engine.request import SamplingParams
from benchmarks.gpu.bench import BLOCK_SIZE

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def step_of(
    pieces: Sequence[tuple[int, int]],
    *,
    num_blocks: int,
    sampling: SamplingParams = GREEDY,
    beside: Callable[[], dict[str, Any]] = dict,
    adapters: Sequence[object] = (),
) -> StepBatch:
    """Return a step of pieces of sequences. pieces: position of the first token, and number of tokens.

    beside: more fields of a sequence, by the names of `ScheduledSequence`. adapters: assigned to the sequences in turn.
    No two sequences share a block, and their blocks are scattered, as after hours of service.
    """
    generator = torch.Generator().manual_seed(0)
    scattered = iter(torch.randperm(num_blocks, generator=generator).tolist())
    items = tuple(
        ScheduledSequence(
            f"{at}", (5 + at % 97,) * size, start, [next(scattered) for _ in range(-(-(start + size) // BLOCK_SIZE))],
            True, sampling, adapter=adapters[at % len(adapters)] if adapters else None, **beside(),
        )
        for at, (start, size) in enumerate(pieces)
    )  # fmt: skip
    return StepBatch(
        items, (), num_scheduled_tokens=sum(size for _, size in pieces), has_logprobs=sampling.logprobs is not None
    )


def blocks_needed(pieces: Sequence[tuple[int, int]]) -> int:
    """Return the number of blocks that such a step needs."""
    return sum(-(-(start + size) // BLOCK_SIZE) for start, size in pieces)
