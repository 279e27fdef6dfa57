"""One step on the device: inputs, forward, sample, ids on the host."""

from __future__ import annotations

import torch

from app.engine.batch import Batch
from app.model.forward import ForwardPass
from app.model.inputs import build_inputs
from app.model.sampler import Draw, Mask, draw, mask, sample


class TorchModelRunner:
    """Runs batches through one forward pass."""

    def __init__(self, forward: ForwardPass, device: torch.device, *, draw: Draw = draw, mask: Mask = mask) -> None:
        self.forward = forward
        self._device = device
        self._draw = draw
        self._mask = mask

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[int]:
        inputs = build_inputs(batch, block_size=self.forward.block_size, device=self._device)
        prediction = self.forward.predict(batch, inputs)
        token_ids = sample(
            prediction.logits, batch.sampled, likeliest=prediction.likeliest, draw=self._draw, mask=self._mask
        )
        return list(token_ids.tolist())
