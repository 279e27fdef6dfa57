"""Collects the hidden states of requests for embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from app.engine.batch import StepBatch
from app.engine.request import Pooling

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LastHiddenStates:
    """Captures the input of a model's head: the last layer's hidden states after the final norm."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._indices: torch.Tensor | None = None
        self.hidden: torch.Tensor | None = None  # [num_hidden, hidden_size]
        if module.base_model is not module:
            module.base_model.register_forward_hook(self._keep)

    @contextmanager
    def kept(self, indices: torch.Tensor | None) -> Iterator[LastHiddenStates]:
        """Store the hidden states of these tokens, if any, in the forward pass inside the `with` block."""
        self._indices, self.hidden = indices, None
        try:
            yield self
        finally:
            self._indices = None

    def _keep(self, module: torch.nn.Module, given: tuple[Any, ...], output: Any) -> None:
        if self._indices is not None:
            self.hidden = output.last_hidden_state[0, self._indices]


class PooledStates:
    """The sum of each pooled sequence's hidden states, over a single token or over all its tokens in this step."""

    def __init__(self, batch: StepBatch, hidden: torch.Tensor) -> None:
        """hidden: [num_hidden, hidden_size], in the order of `inputs.py`."""
        pooled = [item for item in batch.scheduled if item.pooling is not None]
        self._request_ids = [item.request_id for item in pooled]
        sizes = [len(item.token_ids) if item.pooling == Pooling.MEAN else 1 for item in pooled]
        # [num_pooled, hidden_size]
        self.sums = torch.stack([part.float().sum(dim=0) for part in torch.split(hidden, sizes)])

    def result(self, sums: torch.Tensor) -> dict[str, list[float]]:
        """Return the sums by request id. sums: `self.sums` on the host."""
        return dict(zip(self._request_ids, sums.tolist(), strict=True))
