"""A model that one of the ways to compute has loaded. Each way is a class of its own, in a file beside this one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from app.config import EngineConfig
from app.engine.batch import StepBatch
from app.engine.request import ModelInfo
from app.model.abilities import Abilities
from app.model.attention import StateShape, TorchAttention
from app.model.cpu.verification_cache import digest_of_files
from app.model.cuda.adapters import AdapterSlots
from app.model.gpu_backends import GRAPHS, WITHOUT_TRITON
from app.model.kv_cache import ONE_GROUP, LayerGroups, LayerShape
from app.model.location import resolve_model_path
from app.model.memory import MemoryNeeds
from app.model.parallel.split_plan import Exchange
from app.model.verification import BlocksToTry, Output, Reference
from app.model.weights_digest import folder_of_weights

if TYPE_CHECKING:
    from app.model.attention import PagedAttention
    from app.model.cuda.graph_runner import GraphModelRunner
    from app.model.forward import DeviceForward
    from app.model.runner import TorchModelRunner


@dataclass(frozen=True, kw_only=True)
class LoadedModel(ABC):
    """A model's weights as one way to compute has them, and its measured facts."""

    facts: ModelInfo
    layers: dict[int, LayerShape]  # by layer index: what its KV memory stores
    dtype: torch.dtype
    device: torch.device
    reference: Reference | None = None  # until its steps are verified; on a GPU that needs the whole KV memory
    group: Exchange | None = None  # where it is one rank's part
    adapters: AdapterSlots | None = None  # on a GPU, where adapters may be loaded
    groups: LayerGroups = ONE_GROUP  # in which blocks its layers keep their keys and values
    states: tuple[StateShape, ...] = ()  # of its recurrent operators, in the order of their calls
    why_not_ours: str | None = None  # the reason, where transformers' code computes what a decoder of ours should
    why_plain_draws: str | None = None  # on a GPU: the reason, where plain torch draws its tokens

    @classmethod
    def in_place_of(cls, own: LoadedModel, **more: Any) -> Self:
        """The same model as another way has it. more: fields that the other does not have, or has otherwise."""
        return cls(
            facts=own.facts, layers=own.layers, dtype=own.dtype, device=own.device, groups=own.groups, **more
        )  # fmt: skip

    @property
    def in_block(self) -> dict[int, LayerShape]:
        """What one block of its KV memory stores, by place."""
        return self.groups.in_block(self.layers)

    def giving_back(self) -> Self:
        """The same with layers that look back a window in groups of their own, which give back the blocks behind it.

        Itself where that saves no memory or where its way has one group.
        """
        return self

    def with_groups(
        self, windows: Mapping[int, int | None], *, kept_beside: int = 0, is_of_one_shape: bool = False
    ) -> Self:
        """The same with its layers in groups by their windows, as far as that saves memory.

        windows: by layer, in tokens. kept_beside: tokens behind a window that may still be read.
        is_of_one_shape: whether layers of several shapes must be in one group.
        """
        groups = LayerGroups.of(
            self.layers, windows, max_model_len=self.facts.max_model_len, stored_by=self.groups.stored_by,
            is_of_one_shape=is_of_one_shape,
        )  # fmt: skip
        if groups.num_groups == 1:
            return self
        window = groups.window + kept_beside
        facts = replace(self.facts, num_window_groups=groups.num_groups - 1, window_tokens=window)
        return replace(self, groups=groups, facts=facts)

    def kv_namespace(self, config: EngineConfig) -> bytes:
        """What the bytes of its KV memory follow from: its files, all code that computes them, types and layout."""
        folder = folder_of_weights(resolve_model_path(config.model.path), config.model.revision)
        computed_by = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        kinds = (
            type(self).__name__,
            config.model.backend in WITHOUT_TRITON,  # other code lays out the same blocks in another way
            computed_by,
            self.states,
            config.model.quantization,
            config.cache.dtype,
            config.cache.block_size,
        )
        return bytes.fromhex(digest_of_files(folder, self.dtype, *kinds))

    @property
    def abilities(self) -> Abilities:
        """What of the engine works with it, and what does not."""
        own = self.in_one_group
        return own if self.groups.num_groups == 1 else replace(own, windows="freed")

    @property
    @abstractmethod
    def in_one_group(self) -> Abilities:
        """Its abilities while all blocks lie in one group."""

    @abstractmethod
    def tensors(self) -> Iterator[torch.Tensor]:
        """All weights, and what else is kept beside them; those that are tied more than once."""

    @abstractmethod
    def needs(self, config: EngineConfig, largest: StepBatch) -> MemoryNeeds:
        """Its memory beside that of the KV. largest: the batch that takes most."""

    @abstractmethod
    def runner(self, config: EngineConfig, *, num_blocks: int, num_threads: int) -> TorchModelRunner | GraphModelRunner:
        """Runs its steps, with KV memory of `num_blocks` blocks. num_threads: of native code.

        Raises InvalidSetup if it does not keep `model.batch_invariant`, or has no KV memory of `cache.dtype`.
        """

    @torch.inference_mode()
    def verify_steps(self, attention: PagedAttention, blocks: BlocksToTry, quantization: str) -> None:
        """Verify the steps that are computed with an attention and its KV memory; see `Reference.verify_steps`.

        quantization: of its weights, or of its KV memory.

        Raises:
            UnsupportedModel: the results differ by more than rounding.
        """
        assert self.reference is not None, "attention that is not Triton's is verified when the model is loaded"
        how = f"with {type(attention).__name__}"
        self.reference.verify_steps(how, partial(self.output_of_step, attention), blocks, quantization)

    @torch.inference_mode()
    def difference_in_steps(self, attention: PagedAttention, blocks: BlocksToTry, quantization: str) -> str | None:
        """As `verify_steps`: the first difference, in words."""
        assert self.reference is not None, "it is to be verified"
        return self.reference.difference_in_steps(partial(self.output_of_step, attention), blocks, quantization)

    def output_of_step(self, attention: PagedAttention, batch: StepBatch) -> Output:
        """The outputs for all tokens of a step; of a decoder of ours with logits for the first layer's output."""
        raise NotImplementedError(f"{type(self).__name__} computes its attention itself")

    def device_forward(self, attention: PagedAttention, *, num_layers: int = 0) -> DeviceForward:
        """Its forward pass on a GPU. num_layers: only the first few, then norm and head; 0 for all."""
        raise NotImplementedError(f"{type(self).__name__} runs on CPUs")

    def why_not_on(self, backend: str) -> str | None:
        """Why a backend of a GPU is not for this kind of model; None if it is."""
        if backend == GRAPHS and self.states:
            return "steps of models with recurrent layers are not captured"
        return None

    def plain_attention(
        self, num_blocks: int, block_size: int, kind: type[TorchAttention] = TorchAttention
    ) -> PagedAttention:
        """Attention without our kernels, or by the model's own code where it computes nothing else, with KV memory."""
        raise NotImplementedError(f"{type(self).__name__} has kernels for it")

    @property
    def num_own_kernels(self) -> int:
        """Launches in a decode step on a GPU that are no operators of torch."""
        return 0
