"""The forward pass of one step: whichever way of computing it was chosen when the engine was built."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from transformers import PreTrainedModel

from app.engine.batch import Batch
from app.model.attention import PagedAttention
from app.model.inputs import ModelInputs


class Prediction(NamedTuple):
    """What tokens of a step predict: those of its inputs' `logits_indices`."""

    logits: torch.Tensor  # [num_rows, vocab_size]
    likeliest: torch.Tensor | None = None  # [num_rows] int64, their greatest, where it was found on the way


class ForwardPass(Protocol):
    """A model together with its KV memory."""

    block_size: int

    def predict(self, batch: Batch, inputs: ModelInputs) -> Prediction:
        """Write the new tokens' KV and compute the logits of those that are wanted."""
        ...


class TransformersForward:
    """The model's own code around a paged attention of ours: any architecture that loads."""

    def __init__(self, module: PreTrainedModel, attention: PagedAttention) -> None:
        self.block_size = attention.block_size
        self.attention = attention
        self._module = module

    def predict(self, batch: Batch, inputs: ModelInputs) -> Prediction:
        output = self._module(
            input_ids=inputs.token_ids,
            position_ids=inputs.positions,
            use_cache=False,
            logits_to_keep=inputs.logits_indices,
            paged=self.attention.begin_step(batch, inputs),
        )
        return Prediction(output.logits[0])
