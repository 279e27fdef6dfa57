"""Runs any architecture on transformers' code with our attention, and provides the reference that verifies decoders."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from app.config import EngineConfig, ModelConfig
from app.engine.batch import StepBatch
from app.engine.request import ModelInfo
from app.errors import InvalidSetup, UnsupportedModel, first_line
from app.model.abilities import Abilities
from app.model.architectures import ARCHITECTURES
from app.model.attention import (
    AttentionRules,
    NoStep,
    PagedAttention,
    ProbeStep,
    TorchAttention,
    UnknownAttention,
    hand_steps_on,
)
from app.model.cpu.attention import NativeAttention
from app.model.cpu.checkpoint import MappedModel
from app.model.cpu.kv_cache import NativeKVCache
from app.model.cpu.library import ThreadPool
from app.model.cpu.recurrence import NativeRecurrence
from app.model.cpu.sampling import NativeSampler
from app.model.cuda.attention import LARGEST_TILE, TritonAttention
from app.model.cuda.graph_runner import GraphModelRunner
from app.model.cuda.library_attention import LibraryAttention
from app.model.description import as_token_ids, max_model_len
from app.model.device import check_kv_dtype
from app.model.forward import DeviceForward, SequentialForward, TransformersForward
from app.model.gpu_backends import LIBRARY, TORCH
from app.model.implementations.gpu import needs_on_gpu, verified_graph_runner
from app.model.implementations.loaded_model import LoadedModel
from app.model.inputs import build_inputs
from app.model.kv_cache import KVCache, LayerGroups
from app.model.latent_attention import store_expanded
from app.model.memory import MemoryNeeds, is_out_of_memory
from app.model.own_attention import CacheProbe, OwnAttention, keep_own_attention
from app.model.packed_linear import pack_linear_layers
from app.model.parallel.split_plan import SizesOfRank, SplitPlan
from app.model.positions import fix_positions, why_indices_matter
from app.model.recurrence import TorchRecurrence
from app.model.recurrent_layers import StatefulAttention
from app.model.runner import TorchModelRunner
from app.model.sampler import Sampler
from app.model.source import (
    ModelSource,
    fix_positions_of,
    length_limit,
    mapped_model,
    module_without_weights,
    part_of_rank,
    read_module,
    reason_of,
    unsupported_recurrence,
)
from app.model.verification import NUM_TOKENS, Output, Reference, TrialBlocks, run_module, tokens_to_try

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TransformersModel(LoadedModel):
    """A module of transformers, or one rank's part of it, whose attention is replaced by ours."""

    module: PreTrainedModel
    rules: dict[int, AttentionRules]  # by layer index
    mapped: MappedModel | None = None  # the files, if the module reads its weights from them while it computes
    uses_own_attention: bool = False  # whether the model's own attention stays in place, see `own_attention.py`

    @classmethod
    def load(cls, source: ModelSource, *, from_files: bool = False) -> TransformersModel:
        """Load a model, and verify our attention against the model's own attention on the same few tokens.

        from_files: leave the weights in the files where possible, because our C++ decoder will read them from there.
        """
        mapped, whole, config = None, None, source.config
        if source.group is not None:
            source.check_ranks(source.group.size)
        if from_files:
            # For FP8, weights are copied to the device one by one, so the device never holds all of them unquantised.
            mapped = mapped_model(source, source.device if config.quantization == "fp8" else None)
        if source.group is not None:
            module, whole = part_of_rank(source, mapped)
        else:
            module = read_module(source) if mapped is None else mapped.module
        if mapped is not None:
            mapped.compute_from_files()
            fix_positions_of(source, module)
        step, reference = _verified_reference(source, module)
        if whole is not None:
            whole.verify("split among ranks", reference.own)
        model = cls._of(source, module, step, reference, mapped)
        if reason := why_indices_matter(module, model.model_info.max_model_len):
            raise UnsupportedModel(f"{config.path} cannot run on paged attention: {reason}")
        if source.found.get_text_config() is not source.found:  # models that accept images may choose other positions
            _verify_numbering(module, reference, type(step)())
        if mapped is None and not model.uses_own_attention:
            _verify_positions(module, reference, model.model_info.max_model_len)
        return model

    @classmethod
    def planned(cls, source: ModelSource, *, num_ranks: int = 1) -> TransformersModel:
        """Build the model on the meta device from its config.json alone, to plan its memory without its weights.

        Raises:
            InvalidSetup: the model does not exist, its context length is unknown, or the ranks cannot share it.
            UnsupportedModel: the model cannot be served, or its steps depend on its weights; the message says why.
        """
        config, found = source.config, source.found
        # Dequantised weights need the same memory as the weights of an unquantised checkpoint, which can be planned.
        is_known = source.model_class.__name__ in ARCHITECTURES
        if source.quantised is not None and not (source.quantised.has_scales and is_known):
            raise UnsupportedModel(
                f"{config.path} cannot be planned: it is a quantised checkpoint, and its config.json does not show its "
                f"size"
            )
        longest = max_model_len(config, getattr(found.get_text_config(), "max_position_embeddings", None))
        module = module_without_weights(source, source.dtype)
        # The trial pass runs in bfloat16, the only type in which the meta device supports products of experts.
        tried = module if source.dtype is torch.bfloat16 else module_without_weights(source, torch.bfloat16)
        if num_ranks > 1:
            source.check_ranks(num_ranks)
        for each in (module,) if tried is module else (module, tried):
            fix_positions(each, longest)
            if num_ranks > 1:
                SplitPlan(each, SizesOfRank(num_ranks), path=config.path).split("", each)
        step = ProbeStep()
        token_ids = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device="meta")
        try:
            output = _probe(tried, token_ids, token_ids, step)
        except (UnknownAttention, TypeError, AttributeError, LookupError) as error:
            raise UnsupportedModel(f"{config.path} cannot run on paged attention: {reason_of(error)}") from error
        except RuntimeError as error:  # an operator whose result has a size that depends on its values
            raise UnsupportedModel(
                f"{config.path} cannot be planned without its weights: {first_line(error)}"
            ) from error
        _check_states(source, tried, step)
        step.states = [replace(each, dtype=source.dtype) if each.dtype is tried.dtype else each for each in step.states]
        model = cls._of(source, module, step, Reference(config.path, token_ids, token_ids, output), None)
        return replace(model, group=SizesOfRank(num_ranks)) if num_ranks > 1 else model

    @classmethod
    def _of(
        cls,
        source: ModelSource,
        module: PreTrainedModel,
        step: ProbeStep | CacheProbe,
        reference: Reference,
        mapped: MappedModel | None,
    ) -> TransformersModel:
        """Build the model from the shapes and rules that `step` has recorded in a trial pass over the module."""
        num_embeddings, embedding_size = module.get_input_embeddings().weight.shape
        model_info = ModelInfo(
            max_model_len=max_model_len(source.config, length_limit(module)),
            vocab_size=min(reference.own.logits.shape[-1], num_embeddings),
            eos_token_ids=eos_token_ids(module),
            embedding_size=None if module.base_model is module else embedding_size,
        )
        return cls(
            model_info=model_info,
            layers=step.layers,
            groups=LayerGroups(stored_by=step.stored_by),
            dtype=source.dtype,
            device=source.device,
            group=source.group,
            module=module,
            reference=reference,
            rules=step.rules,
            states=tuple(step.states),
            mapped=mapped,
            uses_own_attention=isinstance(step, CacheProbe),
        )

    @property
    def abilities_in_one_group(self) -> Abilities:
        has_windows = any(rules.sliding_window for rules in self.rules.values())
        return Abilities(
            architecture=type(self.module).__name__,
            has_states=bool(self.states),
            windows="kept" if has_windows else "none",
        )

    def with_window_groups(self) -> TransformersModel:
        if self.group is not None or self.states or self.uses_own_attention:
            return self
        # The CUDA kernels load whole tiles of keys, so they may read up to a tile of keys behind the window.
        has_tiles = self.device.type != "cpu" or TritonAttention.fits(self.device)
        windows = {layer: rules.sliding_window for layer, rules in self.rules.items()}
        return self.with_groups(
            windows, extra_kept_tokens=LARGEST_TILE - 1 if has_tiles else 0, is_of_one_shape=has_tiles
        )  # fmt: skip

    def ready(self, source: ModelSource) -> TransformersModel:
        """Return the model, ready to serve. Rereads the weights if a decoder took them and then failed verification."""
        model = self
        if self.module.get_input_embeddings().weight.is_meta:
            module = read_module(source) if source.group is None else part_of_rank(source)[0]
            model = replace(self, module=module, mapped=None)
        if source.device.type != "cpu" or TritonAttention.fits(source.device):
            return model
        if source.config.backend != "torch":
            pack_linear_layers(model.module)
        model._verify_on_cpu(source)
        return replace(model, reference=None)

    def _verify_on_cpu(self, source: ModelSource) -> None:
        """Verify steps with temporary KV memory, so that a wrong model is rejected before KV memory is allocated."""
        served, block_size = self.with_window_groups(), source.block_size
        blocks = TrialBlocks.enough(block_size, num_groups=served.groups.num_groups)
        if self.uses_own_attention:
            own = self.plain_attention(blocks.num_blocks, block_size)
            self.verify_steps(own, blocks, source.config.quantization)
            return
        num_blocks = blocks.num_blocks * blocks.num_groups
        attention: PagedAttention
        threads = None
        if served._why_no_native_attention(source.config, block_size) is None:
            threads = ThreadPool(torch.get_num_threads())
            pages = NativeKVCache(served.in_block, num_blocks=num_blocks, block_size=block_size, dtype=self.dtype)
            attention = NativeAttention(pages, threads, served.groups)
        else:
            attention = served.plain_attention(num_blocks, block_size)
        attention = served._with_states(attention, blocks.num_state_slots, threads)
        served.verify_steps(attention, blocks, source.config.quantization)

    def output_of_step(self, attention: PagedAttention, batch: StepBatch) -> Output:
        if self.uses_own_attention and len(batch.scheduled) > 1:
            parts = [batch.part(slice(at, at + 1)) for at in range(len(batch.scheduled))]
            return Output.joined([self.output_of_step(attention, part) for part in parts])
        inputs = build_inputs(batch, block_size=attention.block_size, device=self.device)
        return run_module(self.module, inputs.token_ids, inputs.positions, attention.begin_step(batch, inputs))

    @property
    def expected(self) -> Reference:
        """The reference output. Only available while the model is being loaded, because `ready` may drop it."""
        assert self.reference is not None, "the reference was dropped when the model was loaded"
        return self.reference

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (*self.module.parameters(), *self.module.buffers())

    def needs(self, config: EngineConfig, largest: StepBatch) -> MemoryNeeds:
        """Return the memory on a GPU. On a CPU, the memory of transformers' code is not counted."""
        return needs_on_gpu(config, self, largest)

    def runner(self, config: EngineConfig, *, num_blocks: int, num_threads: int) -> TorchModelRunner | GraphModelRunner:
        """See `LoadedModel.runner`. On a CPU, C++ computes the attention if it supports the model's layers."""
        cache, num_slots = config.cache, self.model_info.num_state_slots
        why_not_native = self._why_no_native_attention(config.model, cache.block_size)
        latents = "its layers store latents" if any(rules.is_latent for rules in self.rules.values()) else None
        check_kv_dtype(config, self.device, why_not_native or latents)
        if TritonAttention.fits(self.device):
            return verified_graph_runner(config, self, num_blocks)
        if config.model.batch_invariant:
            raise InvalidSetup(
                f"model.batch_invariant is set, but {config.model.path} on {self.device} runs on transformers' code, "
                f"where matrix products depend on the size of a step. It needs a CUDA device with triton or, on a CPU, "
                f"the native decoder (model.backend auto, a Llama-like model, cache.block_size a multiple of 16); see "
                f"the log for why it was not chosen"
            )
        if why_not_native is None:
            threads = ThreadPool(num_threads)
            pages = NativeKVCache.provided(cache, self.in_block, threads, num_blocks=num_blocks, dtype=self.dtype)
            native = self._with_states(NativeAttention(pages, threads, self.groups), num_slots, threads)
            return self._runner_on_cpu(native, NativeSampler(threads))
        return self._runner_on_cpu(
            self._with_states(self.plain_attention(num_blocks, cache.block_size), num_slots, None)
        )

    def _runner_on_cpu(self, attention: PagedAttention, sampler: Sampler | None = None) -> TorchModelRunner:
        states = attention.states if isinstance(attention, StatefulAttention) else ()
        return TorchModelRunner(self._forward(attention), self.device, sampler, states=states)

    def _with_states(self, attention: PagedAttention, num_slots: int, threads: ThreadPool | None) -> PagedAttention:
        """Add slots for recurrent states if the model has any. threads: for the C++ operators; None for plain torch."""
        if not self.states:
            return attention
        recurrence = TorchRecurrence() if threads is None else NativeRecurrence(threads)
        return StatefulAttention(attention, self.states, recurrence, num_slots=num_slots, device=self.device)

    def why_not_on(self, backend: str) -> str | None:
        if self.uses_own_attention and backend != TORCH:
            return "the model computes attention with its own code"
        if backend == LIBRARY:
            return LibraryAttention.why_not(self.layers, self.rules, self.dtype)
        return super().why_not_on(backend)

    def plain_attention(
        self, num_blocks: int, block_size: int, kind: type[TorchAttention] = TorchAttention
    ) -> PagedAttention:
        cache = KVCache(
            self.in_block, num_blocks=num_blocks, block_size=block_size, dtype=self.dtype, device=self.device
        )  # fmt: skip
        if self.uses_own_attention:
            return OwnAttention(cache, self.layers, self.device)
        return kind(cache, self.device, self.groups)

    def _forward(self, attention: PagedAttention) -> TransformersForward:
        return (SequentialForward if self.uses_own_attention else TransformersForward)(self.module, attention)

    def _why_no_native_attention(self, config: ModelConfig, block_size: int) -> str | None:
        if config.backend == "torch":
            return "model.backend is torch"
        if self.uses_own_attention:
            return "the model computes attention with its own code"
        return NativeKVCache.why_not(self.layers, block_size=block_size, dtype=self.dtype, device=self.device)

    def device_forward(self, attention: PagedAttention, *, num_layers: int = 0) -> DeviceForward:
        assert num_layers == 0, "transformers' code always runs all layers"
        return self._forward(attention)

    @property
    def num_own_kernels(self) -> int:
        return 4 * len(self.layers)  # attention kernels of a mixed step, which launches the most


def _verified_reference(source: ModelSource, module: PreTrainedModel) -> tuple[ProbeStep | CacheProbe, Reference]:
    """Verify our attention against the model's own. Return the verified step, and the model's output as the reference.

    A model that our attention does not support keeps its own attention if possible, see `own_attention.py`.
    """
    step, path = ProbeStep(), source.config.path
    reason, ours = _why_not_paged(source, module, step)
    if ours is not None:
        _check_states(source, module, step)
        reference = Reference.of(path, module, source.device)
        if any(rules.is_latent for rules in step.rules.values()) and (difference := reference.difference(ours)):
            logger.warning("%s: keys and values of all heads are stored, not latents: %s", path, difference)
            store_expanded(module)
            return _verified_reference(source, module)
        reference.verify("with paged attention", ours)
        return step, reference
    refusal = f"{path} ({module.config.model_type}) {reason}"
    if source.group is not None:
        raise UnsupportedModel(f"{refusal}. With its own attention, it may run in a single process")
    return _with_own_attention(source, module, refusal)


def _why_not_paged(source: ModelSource, module: PreTrainedModel, step: ProbeStep) -> tuple[str, Output | None]:
    """Run the module with our attention. Return ("", output), or (reason, None) if our attention does not fit."""
    try:
        ours = _probe(module, *tokens_to_try(module, source.device), step)
    except (UnknownAttention, TypeError, AttributeError, LookupError) as error:
        return f"cannot run on paged attention: {reason_of(error)}", None
    except (RuntimeError, ImportError) as error:
        if not getattr(module, "is_quantized", False) or is_out_of_memory(error):
            raise
        raise UnsupportedModel(
            f"the quantised layers of {source.config.path} cannot be computed on {source.device.type}: "
            f"{first_line(error)}. Serve the unquantised checkpoint"
        ) from error
    has_attention = bool(step.layers) or bool(step.states)
    return ("", ours) if has_attention else ("ignores the attention that it receives", None)


def _with_own_attention(source: ModelSource, module: PreTrainedModel, refusal: str) -> tuple[CacheProbe, Reference]:
    """Verify a model that keeps its own attention. refusal: why ours does not fit, quoted by an UnsupportedModel."""
    path, probe = source.config.path, CacheProbe()
    keep_own_attention(module)
    try:
        reference = Reference.of(path, module, source.device)
        ours = run_module(module, reference.token_ids, reference.positions, probe)
    except (UnknownAttention, TypeError, AttributeError, LookupError, RuntimeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        raise UnsupportedModel(f"{refusal}; with its own attention: {reason_of(error)}") from error
    reference.verify("with its keys and values in a cache object", ours)
    logger.info("%s: the sequences of a step run one after another, with the model's own attention", refusal)
    return probe, reference


def _probe(module: PreTrainedModel, token_ids: torch.Tensor, positions: torch.Tensor, step: ProbeStep) -> Output:
    try:
        return run_module(module, token_ids, positions, step)
    except NoStep:
        hand_steps_on(module)
        return run_module(module, token_ids, positions, step)


def _check_states(source: ModelSource, module: PreTrainedModel, step: ProbeStep) -> None:
    """Raise UnsupportedModel if the model has recurrent layers that do not call our operators."""
    path, kinds = source.config.path, ", ".join(sorted(source.layers_with_states))
    if kinds and not step.states:
        raise UnsupportedModel(f"{path} ({module.config.model_type}) {unsupported_recurrence(kinds)}")


def _verify_numbering(module: PreTrainedModel, reference: Reference, step: ProbeStep | CacheProbe) -> None:
    """Reject a model that does not number its tokens 0, 1, 2, … if no positions are passed."""
    found = run_module(module, reference.token_ids, None, step)
    reference.verify("with positions from 0 on", found)


def _verify_positions(module: PreTrainedModel, reference: Reference, max_model_len: int) -> None:
    """Reject a model whose positions depend on the step's other tokens, tested with a token at a very high position."""
    beside = torch.full_like(reference.positions[:, :1], max_model_len - 1)
    token_ids = torch.cat((reference.token_ids, reference.token_ids[:, :1]), dim=1)
    found = run_module(module, token_ids, torch.cat((reference.positions, beside), dim=1), ProbeStep())
    reference.verify("alongside a long sequence", found.part(0, token_ids.shape[1] - 1))


def eos_token_ids(module: PreTrainedModel) -> tuple[int, ...]:
    """Return the tokens that end generation. The generation config takes precedence over the model config."""
    generation = getattr(module, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:  # some configurations have no such field
        found = getattr(module.config.get_text_config(), "eos_token_id", None)
    return as_token_ids(found)
