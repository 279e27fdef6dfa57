"""Decode steps from graphs captured once, so that a step costs one launch instead of hundreds.

A step in which every sequence has one token looks the same each time but for its content. Its facts are copied into
tensors that stay where they are, padded to the next of a few captured sizes, and the captured work is replayed. Spare
rows belong to no sequence: they write to a scratch slot, and what they draw is thrown away. Every other step runs
eagerly.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from app.engine.batch import Batch, ScheduledSequence
from app.model.loader import LoadedModel
from app.model.runner import TorchModelRunner
from app.model.sampler import sample
from app.model.triton_attention import TritonAttention

logger = logging.getLogger(__name__)

# Takes a function that reads and writes tensors that stay where they are; gives one that does the same work again and
# leaves the result in the same tensor.
Capture = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]

_LARGEST = 512  # beyond it a step takes so long that its launches do not matter


class GraphModelRunner:
    """Runs batches on one model: decode steps by replay, the others through a TorchModelRunner."""

    def __init__(self, model: LoadedModel, attention: TritonAttention, *, max_rows: int, capture: Capture) -> None:
        """Capture every size up to `max_rows` sequences; seconds on a GPU. What cannot be captured runs eagerly."""
        self._model = model
        self._attention = attention
        self._eager = TorchModelRunner(model, attention)
        self._logits: torch.Tensor | None = None  # [largest size, vocab_size], of whatever was replayed last
        self._graphs: dict[int, _Graph] = {}
        self._sizes = graph_sizes(max_rows)
        self._capture_all(capture)

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[int]:
        graph = self._graph_for(batch)
        if graph is None:
            return self._eager.run(batch)
        graph.fill(batch.scheduled, self._attention)
        logits = graph.replay()[: len(batch.scheduled)]
        token_ids: list[int] = sample(logits, batch.sampled).tolist()
        return token_ids

    def _graph_for(self, batch: Batch) -> _Graph | None:
        num_rows = len(batch.scheduled)
        if not self._graphs or num_rows > self._sizes[-1]:
            return None
        if not all(len(item.token_ids) == 1 and item.samples for item in batch.scheduled):
            return None
        return self._graphs[self._sizes[bisect_left(self._sizes, num_rows)]]

    @torch.inference_mode()
    def _capture_all(self, capture: Capture) -> None:
        graphs: dict[int, _Graph] = {}
        try:
            for size in reversed(self._sizes):  # the largest first: the smaller ones fit into its memory
                graphs[size] = self._captured(size, capture)
        except RuntimeError as error:
            reason = str(error).strip().split("\n", 1)[0]
            logger.warning("decode steps run without CUDA graphs, slower: this model cannot be captured (%s)", reason)
            return
        self._graphs = graphs
        logger.info("decode steps of up to %d sequences run from %d CUDA graphs", self._sizes[-1], len(graphs))

    def _captured(self, size: int, capture: Capture) -> _Graph:
        facts = torch.tensor(
            columns_of([], [], size=size, attention=self._attention), dtype=torch.long, device=self._model.device
        )
        return _Graph(facts, capture(lambda: self._forward(facts)))

    def _forward(self, facts: torch.Tensor) -> torch.Tensor:
        """The captured work: from facts that lie on the device to logits that stay there."""
        token_ids, slots, segments = facts[0], facts[1], facts[2:]
        logits: torch.Tensor = self._model.module(
            input_ids=token_ids[None],
            position_ids=segments[2][None],
            use_cache=False,
            logits_to_keep=0,  # all of them
            paged=self._attention.begin_decode(slots, segments),
        ).logits[0]
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        # One result for all sizes: each of its own would keep a vocabulary of numbers for every row of every size.
        return self._logits[: logits.shape[0]].copy_(logits)


class _Graph:
    """Captured work of one size and the tensor it reads."""

    def __init__(self, facts: torch.Tensor, replay: Callable[[], torch.Tensor]) -> None:
        """facts: [6, size] int64, rows as in `columns_of`."""
        self._facts = facts
        self.replay = replay  # returns [size, vocab_size]

    def fill(self, items: Sequence[ScheduledSequence], attention: TritonAttention) -> None:
        """Write a step's facts where the captured work reads them: one copy, not waited for."""
        rows = attention.tables.update(items)
        columns = columns_of(items, rows, size=self._facts.shape[1], attention=attention)
        new = torch.tensor(columns, dtype=torch.long, pin_memory=self._facts.is_cuda)
        self._facts.copy_(new, non_blocking=True)


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """The sizes to capture: finely spaced where a spare row weighs most."""
    largest = min(max_rows, _LARGEST)
    ladder = [1, 2, 4, *range(8, 256, 8), *range(256, _LARGEST, 32)]
    return (*(size for size in ladder if size < largest), largest)


def columns_of(
    items: Sequence[ScheduledSequence], rows: Sequence[int], *, size: int, attention: TritonAttention
) -> list[list[int]]:
    """A step of single tokens, one column for each, filled up to `size` with columns of no sequence.

    rows: of the block tables, one for each item. Returns [6, size]: token id, slot, and the four rows of a segment
    (`triton_kernels.py`): place in the packed row, number of tokens, position, row of the block table.
    """
    block_size, spare = attention.block_size, size - len(items)
    slots = [item.block_ids[item.start // block_size] * block_size + item.start % block_size for item in items]
    return [
        [item.token_ids[0] for item in items] + [0] * spare,
        slots + [attention.scratch_slot] * spare,
        list(range(size)),
        [1] * size,
        [item.start for item in items] + [0] * spare,
        list(rows) + [attention.tables.scratch_row] * spare,
    ]
