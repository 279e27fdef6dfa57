"""The forward pass of one step, as the backends implement it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from app.engine.batch import Batch
from app.model.attention import PagedAttention
from app.model.inputs import ModelInputs
from app.model.pooling import LastHiddenStates

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Prediction(NamedTuple):
    """The output of a forward pass: logits for the tokens of `logits_indices`."""

    logits: torch.Tensor  # [num_rows, vocab_size]
    likeliest: torch.Tensor | None = None  # [num_rows] int64, the argmax of each row, where the forward pass finds it
    hidden: torch.Tensor | None = None  # [num_hidden, hidden_size], where `hidden_indices` are given


class ForwardPass(Protocol):
    """A model together with its KV memory."""

    block_size: int

    def predict(self, batch: Batch, inputs: ModelInputs) -> Prediction:
        """Write the new tokens' KV and compute the logits of the wanted tokens."""
        ...


class TransformersForward:
    """The code of transformers with our paged attention: for any architecture that loads."""

    def __init__(self, module: PreTrainedModel, attention: PagedAttention) -> None:
        self.block_size = attention.block_size
        self.attention = attention
        self._module = module
        self._last_hidden = LastHiddenStates(module)

    def predict(self, batch: Batch, inputs: ModelInputs) -> Prediction:
        with self._last_hidden.kept(inputs.hidden_indices) as kept:
            output = self._module(
                input_ids=inputs.token_ids,
                position_ids=inputs.positions,
                use_cache=False,
                logits_to_keep=inputs.logits_indices,
                paged=self.attention.begin_step(batch, inputs),
            )
        return Prediction(output.logits[0], hidden=kept.hidden)
