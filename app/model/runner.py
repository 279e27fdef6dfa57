"""Runs a step on the device: builds inputs, runs the forward pass, samples, and copies token ids to the host."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from app.engine.batch import StepBatch, StepResult
from app.engine.model_runner import ModelRunner
from app.model.adapters import AdapterWeights, read_adapter
from app.model.forward import ForwardPass, Prediction
from app.model.host_blocks import HostBlocks
from app.model.inputs import build_inputs
from app.model.logprobs import Logprobs, WantedLogprobs
from app.model.parallel.group import RankGroup
from app.model.parallel.ranks import Ranks
from app.model.pooling import PooledStates
from app.model.sampler import Sampler


class NoRanks:
    """Replaces `Ranks` if a single process runs the whole model."""

    def step(self, _batch: StepBatch) -> AbstractContextManager[None]:
        return nullcontext()

    def watched(self) -> AbstractContextManager[None]:
        return nullcontext()

    def preparing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        pass

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class LeadingRunner(ModelRunner):
    """Base of runners that can share a model with other ranks. Rank 0 calls `lead`, every other rank `join`."""

    def __init__(self) -> None:
        self._ranks: Ranks | NoRanks = NoRanks()
        self._group: RankGroup | None = None

    def lead(self, ranks: Ranks) -> None:
        """Make the other ranks run their part of each step."""
        self._ranks = ranks
        self.join(ranks.group)

    def join(self, group: RankGroup) -> None:
        """Share the model with the ranks of a group. Must be called before any other method."""
        self._group = group

    @abstractmethod
    def follow(self, batch: StepBatch) -> None:
        """Run this rank's part of a step's forward pass. Called on all ranks but rank 0."""

    def follow_adapter(self, slot: int, part: AdapterWeights) -> None:
        """Store this rank's part of an adapter in a slot. Called on a different thread from `follow`."""
        raise NotImplementedError(f"{type(self).__name__} does not support adapters on several ranks")

    def check(self) -> None:
        """Raise DeviceLost if another rank has ended."""
        self._ranks.check()

    def close(self) -> None:
        self._ranks.close()


class TorchModelRunner(LeadingRunner):
    """Runs each batch in one forward pass. Removing an adapter frees its memory after the last step that uses it."""

    adapts = True

    def __init__(
        self,
        forward: ForwardPass,
        device: torch.device,
        sampler: Sampler | None = None,
        *,
        states: Sequence[torch.Tensor] = (),
    ) -> None:
        """states: the states of recurrent layers; the first dimension of each tensor is the slot."""
        super().__init__()
        self._states = states
        self.forward = forward
        self._device = device
        self._sampler = sampler or Sampler()
        self._kv_memory: HostBlocks | None = None  # None until the first call of `kv_memory`

    def join(self, group: RankGroup) -> None:
        super().join(group)
        self.adapts = False  # `LinearUpdates` only supports undivided linear layers

    @torch.inference_mode()
    def load_adapter(self, folder: Path, make_room: Callable[[], None] = lambda: None) -> object:
        adapting = self.forward.adapting
        weights = read_adapter(folder, adapting.sizes)
        make_room()
        return adapting.prepare(weights)

    def kv_memory(self) -> HostBlocks | None:
        if self._device.type != "cpu" or isinstance(self._ranks, Ranks) or not self.forward.kv_tensors:
            return None
        if self._kv_memory is None:
            self._kv_memory = HostBlocks(self.forward.kv_tensors, self._states)
        return self._kv_memory

    @torch.inference_mode()
    def follow(self, batch: StepBatch) -> None:
        self._predict(batch)

    def _predict(self, batch: StepBatch) -> Prediction:
        inputs = build_inputs(batch, block_size=self.forward.block_size, device=self._device)
        with self._ranks.step(batch):
            return self.forward.predict(batch, inputs)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> StepResult:
        prediction = self._predict(batch)
        result = draw_tokens(batch, prediction, self._sampler).result()
        if prediction.hidden is None:
            return result
        pooled = PooledStates(batch, prediction.hidden)
        return result._replace(pooled=pooled.result(pooled.sums))


class DrawnTokens(NamedTuple):
    """A step's sampled tokens and, if requested, log-probabilities, as tensors on the device or on the host."""

    token_ids: torch.Tensor  # [num_sampled] int64
    wanted: WantedLogprobs | None = None
    logprobs: Logprobs | None = None  # the result of `wanted.compute`

    def result(self) -> StepResult:
        """Return the result in plain numbers. Blocks until the device has computed it."""
        token_ids: list[int] = self.token_ids.tolist()
        if self.wanted is None or self.logprobs is None:
            return StepResult(token_ids)
        return self.wanted.result(token_ids, self.logprobs)


def draw_tokens(batch: StepBatch, prediction: Prediction, sampler: Sampler) -> DrawnTokens:
    """Sample a batch's next tokens and compute log-probabilities if requested. Does not wait for the device."""
    logits, likeliest = prediction.logits, prediction.likeliest
    if not batch.has_logprobs:
        return DrawnTokens(sampler.sample(logits, batch.sampled, likeliest=likeliest))
    wanted = WantedLogprobs(batch)
    likeliest = None if likeliest is None else wanted.of_sampled(likeliest)
    token_ids = sampler.sample(wanted.of_sampled(logits), batch.sampled, likeliest=likeliest)
    return DrawnTokens(token_ids, wanted, wanted.compute(logits, token_ids, sampler.logprobs))
