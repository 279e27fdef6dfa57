"""One step on the device: inputs, forward, sample, ids on the host."""

from __future__ import annotations

import torch

from app.engine.batch import Batch
from app.model.attention import PagedAttention
from app.model.inputs import build_inputs
from app.model.loader import LoadedModel
from app.model.sampler import sample


class TorchModelRunner:
    """Runs batches on one model; its attention owns the KV memory."""

    def __init__(self, model: LoadedModel, attention: PagedAttention) -> None:
        self._module = model.module
        self._device = model.device
        self._attention = attention

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[int]:
        inputs = build_inputs(batch, block_size=self._attention.block_size, device=self._device)
        logits = self._module(
            input_ids=inputs.token_ids,
            position_ids=inputs.positions,
            use_cache=False,
            logits_to_keep=inputs.sampled_indices,
            paged=self._attention.begin_step(batch, inputs),
        ).logits[0]
        token_ids: list[int] = sample(logits, batch.sampled).tolist()
        return token_ids
