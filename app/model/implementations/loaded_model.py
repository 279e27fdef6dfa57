"""The interface of a loaded model. Each implementation is a subclass in a file next to this one."""

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
from app.model.verification import Output, Reference, TrialBlocks
from app.model.weights_digest import folder_of_weights

if TYPE_CHECKING:
    from app.model.attention import PagedAttention
    from app.model.forward import DeviceForward
    from app.model.runner import LeadingRunner


@dataclass(frozen=True, kw_only=True)
class LoadedModel(ABC):
    """A model with its weights laid out for one implementation, and the model info found while loading."""

    model_info: ModelInfo
    layers: dict[int, LayerShape]  # the shape of the stored keys and values, by layer index
    dtype: torch.dtype
    device: torch.device
    reference: Reference | None = None  # None once the steps are verified; on a GPU they are verified in full KV memory
    group: Exchange | None = None  # the ranks, if this is one rank's part of the model
    adapters: AdapterSlots | None = None  # only for our decoder on a GPU, if adapters may be loaded
    groups: LayerGroups = ONE_GROUP  # the groups of blocks that store the layers' keys and values
    states: tuple[StateShape, ...] = ()  # one for each recurrent operator, in the order of their calls
    why_not_ours: str | None = None  # why the model runs on transformers' code, if our decoder failed verification
    why_plain_draws: str | None = None  # why plain torch draws the tokens, if our sampling kernels failed on this GPU

    @classmethod
    def converted_from(cls, own: LoadedModel, **more: Any) -> Self:
        """Convert a model of another implementation to this one. more: the fields that the conversion cannot copy."""
        return cls(
            model_info=own.model_info, layers=own.layers, dtype=own.dtype, device=own.device, groups=own.groups, **more
        )  # fmt: skip

    @property
    def in_block(self) -> dict[int, LayerShape]:
        """The layer shapes in one block of KV memory, by place in the block."""
        return self.groups.in_block(self.layers)

    def with_window_groups(self) -> Self:
        """Return the model with windowed layers in separate groups, so that blocks behind the window can be freed.

        Returns the model itself if groups save no memory, or if the implementation supports only one group.
        """
        return self

    def with_groups(
        self, windows: Mapping[int, int | None], *, extra_kept_tokens: int = 0, is_of_one_shape: bool = False
    ) -> Self:
        """Return the model with its layers grouped by their windows, or the model itself if that saves no memory.

        windows: by layer, in tokens. extra_kept_tokens: how many tokens behind a window kernels may still read.
        is_of_one_shape: whether all layers must have one shape to be divided into groups.
        """
        groups = LayerGroups.of(
            self.layers, windows, max_model_len=self.model_info.max_model_len, stored_by=self.groups.stored_by,
            is_of_one_shape=is_of_one_shape,
        )  # fmt: skip
        if groups.num_groups == 1:
            return self
        window = groups.window + extra_kept_tokens
        model_info = replace(self.model_info, num_window_groups=groups.num_groups - 1, window_tokens=window)
        return replace(self, groups=groups, model_info=model_info)

    def kv_namespace(self, config: EngineConfig) -> bytes:
        """Return a digest of everything that determines the bytes of a KV block: files, code, types and layout."""
        folder = folder_of_weights(resolve_model_path(config.model.path), config.model.revision)
        computed_by = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        kinds = (
            type(self).__name__,
            config.model.backend in WITHOUT_TRITON,  # these backends lay out blocks differently
            computed_by,
            self.states,
            config.model.quantization,
            config.cache.dtype,
            config.cache.block_size,
        )
        return bytes.fromhex(digest_of_files(folder, self.dtype, *kinds))

    @property
    def abilities(self) -> Abilities:
        """The engine abilities that work with the model in its current groups of layers."""
        own = self.abilities_in_one_group
        return own if self.groups.num_groups == 1 else replace(own, windows="freed")

    @property
    @abstractmethod
    def abilities_in_one_group(self) -> Abilities:
        """The abilities of the model while all its layers are in one group."""

    @abstractmethod
    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the weights and all other tensors that the model owns. Tied weights may appear more than once."""

    @abstractmethod
    def needs(self, config: EngineConfig, largest: StepBatch) -> MemoryNeeds:
        """Return the bytes that the model needs besides KV memory. largest: the batch that needs the most memory."""

    @abstractmethod
    def runner(self, config: EngineConfig, *, num_blocks: int, num_threads: int) -> LeadingRunner:
        """Allocate KV memory of `num_blocks` blocks and return a runner. num_threads: threads of native code.

        Raises InvalidSetup if the runner cannot honour `model.batch_invariant` or store KV memory in `cache.dtype`.
        """

    @torch.inference_mode()
    def verify_steps(self, attention: PagedAttention, blocks: TrialBlocks, quantization: str) -> None:
        """Run trial steps with the given attention and compare them with the reference. See `Reference.verify_steps`.

        quantization: the type of the weights, or of the KV memory if that is quantised.

        Raises UnsupportedModel if the results differ by more than rounding.
        """
        assert self.reference is not None, "attention that is not Triton's is verified when the model is loaded"
        how = f"with {type(attention).__name__}"
        self.reference.verify_steps(how, partial(self.output_of_step, attention), blocks, quantization)

    @torch.inference_mode()
    def difference_in_steps(self, attention: PagedAttention, blocks: TrialBlocks, quantization: str) -> str | None:
        """Describe the first difference for which `verify_steps` would raise. Returns None if there is none."""
        assert self.reference is not None, "a model without a reference cannot be verified"
        return self.reference.difference_in_steps(partial(self.output_of_step, attention), blocks, quantization)

    def output_of_step(self, attention: PagedAttention, batch: StepBatch) -> Output:
        """Run a step and return the outputs of all its tokens. Our decoders return logits in place of hidden states."""
        raise NotImplementedError(f"{type(self).__name__} computes its attention itself")

    def device_forward(self, attention: PagedAttention, *, num_layers: int = 0) -> DeviceForward:
        """Return the forward pass on a GPU. num_layers: the number of layers to run before norm and head; 0 for all."""
        raise NotImplementedError(f"{type(self).__name__} runs on CPUs")

    def why_not_on(self, backend: str) -> str | None:
        """Return the reason why a GPU backend cannot run this kind of model, or None if it can."""
        if backend == GRAPHS and self.states:
            return "steps of models with recurrent layers cannot be captured"
        return None

    def plain_attention(
        self, num_blocks: int, block_size: int, kind: type[TorchAttention] = TorchAttention
    ) -> PagedAttention:
        """Allocate KV memory and return attention without Triton kernels, or the model's own attention."""
        raise NotImplementedError(f"{type(self).__name__} has kernels for it")

    @property
    def num_own_kernels(self) -> int:
        """The number of launches of our own kernels in a decode step on a GPU, in addition to torch's operators."""
        return 0
