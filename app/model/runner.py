"""One step on the device: inputs, forward, sample, ids on the host."""

from __future__ import annotations

import torch

from app.engine.batch import Batch, StepResult
from app.model.forward import ForwardPass, Prediction
from app.model.inputs import build_inputs
from app.model.logprobs import ComputeLogprobs, WantedLogprobs, compute_logprobs
from app.model.sampler import Draw, draw, sample


class TorchModelRunner:
    """Runs batches through one forward pass."""

    def __init__(
        self,
        forward: ForwardPass,
        device: torch.device,
        *,
        draw: Draw = draw,
        compute_logprobs: ComputeLogprobs = compute_logprobs,
    ) -> None:
        self.forward = forward
        self._device = device
        self._draw = draw
        self._compute_logprobs = compute_logprobs

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        inputs = build_inputs(batch, block_size=self.forward.block_size, device=self._device)
        prediction = self.forward.predict(batch, inputs)
        if batch.has_logprobs:
            return self._with_logprobs(batch, prediction)
        token_ids = sample(prediction.logits, batch.sampled, likeliest=prediction.likeliest, draw=self._draw)
        return StepResult(token_ids.tolist())

    def _with_logprobs(self, batch: Batch, prediction: Prediction) -> StepResult:
        logits, likeliest = prediction
        wanted = WantedLogprobs(batch)
        token_ids = sample(
            wanted.of_sampled(logits),
            batch.sampled,
            likeliest=None if likeliest is None else wanted.of_sampled(likeliest),
            draw=self._draw,
        )
        found = wanted.compute(logits, token_ids, self._compute_logprobs)
        return wanted.result(token_ids.tolist(), found)
