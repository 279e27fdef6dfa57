"""The interface of a step's forward pass, which all backends implement, and the forward pass in transformers' code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from app.engine.batch import StepBatch
from app.model.adapters import AdapterWeights, LinearUpdates, Sizes
from app.model.attention import AttentionStep, PagedAttention
from app.model.inputs import ModelInputs, build_inputs
from app.model.own_attention import run_forward
from app.model.pooling import LastHiddenStates

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Prediction(NamedTuple):
    """The output of a forward pass. Each row of logits belongs to one of the step's `logits_indices`."""

    logits: torch.Tensor  # [num_rows, vocab_size]
    likeliest: torch.Tensor | None = None  # [num_rows] int64, each row's argmax, if already computed
    hidden: torch.Tensor | None = None  # [num_hidden, hidden_size], if there are `hidden_indices`


class Adapting(Protocol):
    """Converts LoRA adapters to the form that a forward pass requires."""

    @property
    def sizes(self) -> Mapping[str, Sizes]:
        """The sizes of the linear layers that adapters may change, by name in the checkpoint."""
        ...

    def prepare(self, weights: AdapterWeights) -> object:
        """Return the object that scheduled sequences carry as `adapter`. Thread-safe, even while a step is running."""
        ...


class ForwardPass(Protocol):
    """A loaded model together with its KV memory."""

    block_size: int
    kv_tensors: list[torch.Tensor]  # all KV memory; the first dimension is the block

    @property
    def adapting(self) -> Adapting: ...

    def predict(self, batch: StepBatch, inputs: ModelInputs) -> Prediction:
        """Run a step: store the new tokens' keys and values, and return the logits that `inputs` requests."""
        ...


class DeviceForward(Protocol):
    """A forward pass whose inputs are already on the device, so that a CUDA graph can capture it."""

    def compute(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: Any,
        *,
        logits_indices: torch.Tensor | None = None,
        hidden_indices: torch.Tensor | None = None,
        adapted: Any = None,
    ) -> Prediction:
        """Compute logits. token_ids, positions: [1, num_tokens]. step: the result of the attention's `begin_step`.

        logits_indices: the tokens that need logits, or None for all tokens.
        adapted: the adapters of the tokens, or None if the model supports no adapters.
        """
        ...


class TransformersForward:
    """Runs transformers' code with paged attention. Supports every architecture whose code can use it."""

    def __init__(self, module: PreTrainedModel, attention: PagedAttention) -> None:
        self.block_size = attention.block_size
        self.kv_tensors = attention.kv_tensors
        self.attention = attention
        self._module = module
        self._last_hidden = LastHiddenStates(module)
        self.adapting = LinearUpdates(module)

    def predict(self, batch: StepBatch, inputs: ModelInputs) -> Prediction:
        with self.adapting.of(batch):
            return self.compute(
                inputs.token_ids,
                inputs.positions,
                self.attention.begin_step(batch, inputs),
                logits_indices=inputs.logits_indices,
                hidden_indices=inputs.hidden_indices,
            )

    def compute(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        *,
        logits_indices: torch.Tensor | None = None,
        hidden_indices: torch.Tensor | None = None,
        adapted: None = None,
    ) -> Prediction:
        with self._last_hidden.kept(hidden_indices) as kept:
            output = run_forward(
                self._module,
                step,
                input_ids=token_ids,
                position_ids=positions,
                logits_to_keep=0 if logits_indices is None else logits_indices,
            )
        return Prediction(output.logits[0], hidden=kept.hidden)


class SequentialForward(TransformersForward):
    """Runs a step's sequences one after another, for models whose own attention supports only one sequence."""

    def predict(self, batch: StepBatch, inputs: ModelInputs) -> Prediction:
        device, predictions = inputs.token_ids.device, []
        for at in range(len(batch.scheduled)):
            part = batch.part(slice(at, at + 1))
            of_part = build_inputs(part, block_size=self.block_size, device=device)
            predictions.append(super().predict(part, of_part))
        hidden = [each.hidden for each in predictions if each.hidden is not None]
        logits = torch.cat([each.logits for each in predictions])
        return Prediction(logits, hidden=torch.cat(hidden) if hidden else None)
