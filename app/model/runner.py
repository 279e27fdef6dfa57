"""One step on the device: inputs, forward, sample, ids on the host."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from app.engine.batch import Batch, StepResult
from app.model.forward import ForwardPass, Prediction
from app.model.inputs import build_inputs
from app.model.logprobs import ComputeLogprobs, WantedLogprobs, compute_logprobs
from app.model.parallel.group import RankGroup
from app.model.parallel.ranks import Ranks
from app.model.pooling import PooledStates
from app.model.sampler import Adjust, Draw, adjust, draw, sample


class TorchModelRunner:
    """Runs batches through one forward pass."""

    def __init__(
        self,
        forward: ForwardPass,
        device: torch.device,
        *,
        draw: Draw = draw,
        adjust: Adjust = adjust,
        compute_logprobs: ComputeLogprobs = compute_logprobs,
    ) -> None:
        self.forward = forward
        self._device = device
        self._draw = draw
        self._adjust = adjust
        self._compute_logprobs = compute_logprobs
        self._ranks: Ranks | None = None

    def lead(self, ranks: Ranks) -> None:
        """Have other ranks compute each step, too."""
        self._ranks = ranks

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()

    def check(self) -> None:
        """Raises DeviceLost if another rank has ended."""
        if self._ranks is not None:
            self._ranks.check()

    def prepare(self) -> None:
        """Nothing: all is ready for the first step."""

    def join(self, group: RankGroup) -> None:
        """Nothing: the model has what it exchanges."""

    @torch.inference_mode()
    def follow(self, batch: Batch) -> None:
        """Compute a step of rank 0."""
        self._predict(batch)

    def _predict(self, batch: Batch) -> Prediction:
        inputs = build_inputs(batch, block_size=self.forward.block_size, device=self._device)
        with nullcontext() if self._ranks is None else self._ranks.step(batch):
            return self.forward.predict(batch, inputs)

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        prediction = self._predict(batch)
        result = self._drawn(batch, prediction)
        if prediction.hidden is None:
            return result
        pooled = PooledStates(batch, prediction.hidden)
        return result._replace(pooled=pooled.result(pooled.sums))

    def _drawn(self, batch: Batch, prediction: Prediction) -> StepResult:
        if batch.has_logprobs:
            return self._with_logprobs(batch, prediction)
        token_ids = sample(
            prediction.logits, batch.sampled, likeliest=prediction.likeliest, draw=self._draw, adjust=self._adjust
        )
        return StepResult(token_ids.tolist())

    def _with_logprobs(self, batch: Batch, prediction: Prediction) -> StepResult:
        logits, likeliest = prediction.logits, prediction.likeliest
        wanted = WantedLogprobs(batch)
        token_ids = sample(
            wanted.of_sampled(logits),
            batch.sampled,
            likeliest=None if likeliest is None else wanted.of_sampled(likeliest),
            draw=self._draw,
            adjust=self._adjust,
        )
        found = wanted.compute(logits, token_ids, self._compute_logprobs)
        return wanted.result(token_ids.tolist(), found)
