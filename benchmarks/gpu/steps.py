"""Steps as the engine would schedule them, and a look at the graphs that they replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

import app.model.ways.gpu
from app.engine.batch import ScheduledSequence, StepBatch
from app.engine.request import SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def step_of(
    pieces: Sequence[tuple[int, int]],
    *,
    num_blocks: int,
    block_size: int,
    sampling: SamplingParams = GREEDY,
    beside: Callable[[], dict[str, Any]] = dict,
    adapters: Sequence[object] = (),
) -> StepBatch:
    """A step of pieces of sequences. pieces: position of the first token, and number of tokens.

    beside: what else a sequence has, by the names of `ScheduledSequence`. adapters: the sequences have them in turn.

    No two sequences share a block, and their blocks lie scattered, as after hours of service.
    """
    generator = torch.Generator().manual_seed(0)
    scattered = iter(torch.randperm(num_blocks, generator=generator).tolist())
    items = tuple(
        ScheduledSequence(
            f"{at}", (5 + at % 97,) * size, start, [next(scattered) for _ in range(-(-(start + size) // block_size))],
            True, sampling, adapter=adapters[at % len(adapters)] if adapters else None, **beside(),
        )
        for at, (start, size) in enumerate(pieces)
    )  # fmt: skip
    return StepBatch(
        items, (), num_scheduled_tokens=sum(size for _, size in pieces), has_logprobs=sampling.logprobs is not None
    )


def blocks_needed(pieces: Sequence[tuple[int, int]], *, block_size: int) -> int:
    """Blocks that such a step needs."""
    return sum(-(-(start + size) // block_size) for start, size in pieces)


class Replays:
    """The graphs that are captured while it watches."""

    def __init__(self) -> None:
        self.num_graphs = 0
        self.last: Callable[[], torch.Tensor] | None = None  # of the step that was launched last; None: it had no graph

    @contextmanager
    def watched(self) -> Iterator[Replays]:
        """In here runners are built of which the graphs are seen."""
        real: Callable[[torch.device], Any] = vars(app.model.ways.gpu)["CudaCapture"]

        def capture_on(device: torch.device) -> Any:
            capture = real(device)

            def captures(function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
                return self._noting(capture(function))

            return captures

        with patch("app.model.ways.gpu.CudaCapture", capture_on):
            yield self

    def _noting(self, replay: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self.num_graphs += 1

        def noted() -> torch.Tensor:
            self.last = replay
            return replay()

        return noted
