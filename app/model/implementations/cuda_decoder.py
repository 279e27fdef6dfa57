"""Runs Llama-like models on a GPU with our own decoder: Triton kernels and cuBLAS, replayed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from app.config import EngineConfig
from app.engine.batch import StepBatch
from app.model.abilities import Abilities
from app.model.attention import PagedAttention
from app.model.cpu.checkpoint import add_positions
from app.model.cuda.adapters import AdapterSlots
from app.model.cuda.attention import TritonAttention
from app.model.cuda.decoder import CudaDecoder, num_kernels_of
from app.model.cuda.fp8 import why_no_fp8, why_not_in_fp8
from app.model.cuda.graph_runner import GraphModelRunner
from app.model.cuda.weights import CudaWeights, fuse_weights
from app.model.device import check_kv_device
from app.model.gpu_backends import WITHOUT_DECODER
from app.model.implementations.gpu import needs_on_gpu, verified_graph_runner
from app.model.implementations.loaded_model import LoadedModel
from app.model.implementations.transformers_code import TransformersModel
from app.model.inputs import build_inputs
from app.model.llama import settings_of, why_attention_is_not_llama_like, why_not_llama_like
from app.model.memory import MemoryNeeds
from app.model.source import ModelSource
from app.model.verification import Output, Reference, TrialBlocks, step_of


@dataclass(frozen=True, kw_only=True)
class CudaModel(LoadedModel):
    """A Llama-like model, or one rank's part of the model, with its weights fused for `CudaDecoder`."""

    weights: CudaWeights
    name = "the decoder for CUDA"

    @staticmethod
    def why_not_here(source: ModelSource) -> str | None:
        """Return the reason why the machine or the settings rule out this decoder, or None if they do not.

        Does not inspect the model.
        """
        if source.config.quantization == "fp8":
            return why_no_fp8(source.device, on_a_cpu="model.quantization: int8 and int4")
        backend = source.config.backend
        return f"model.backend is {backend}" if backend in WITHOUT_DECODER else None

    @staticmethod
    def why_not(source: ModelSource, own: TransformersModel) -> str | None:
        """Return the reason why this decoder does not support the model's structure, or None if it does."""
        reason = why_not_llama_like(own.module, "cuda") or why_attention_is_not_llama_like(
            own.module, own.rules, "cuda"
        )
        if reason is not None or source.config.quantization != "fp8":
            return reason
        return why_not_in_fp8(own.module, 1 if own.group is None else own.group.size)

    @classmethod
    def load(cls, source: ModelSource, own: TransformersModel, expected: Reference) -> CudaModel:
        """Fuse the weights of transformers' module and move the module to the meta device.

        expected: the reference output with which the model will be verified.
        """
        settings = settings_of(own.module, own.rules)
        max_adapters, group = source.config.max_loaded_adapters, own.group
        weights = fuse_weights(
            own.module,
            settings if group is None else settings.of_rank(group.size),
            num_positions=max(own.model_info.max_model_len, expected.token_ids.shape[1]),
            quantised=source.config.quantization == "fp8",
            mapped=own.mapped,
        )
        # Slots use memory even while no adapter is loaded, so they are allocated only if `max_loaded_adapters` is set.
        num_ranks = 1 if group is None else group.size
        adapters = None if max_adapters is None else AdapterSlots(weights, max_adapters, num_ranks=num_ranks)
        return cls.converted_from(own, weights=weights, reference=expected, group=group, adapters=adapters)

    @classmethod
    def planned(cls, source: ModelSource, own: TransformersModel) -> CudaModel:
        """Build the model on the meta device, where tensors have sizes but no data, to plan its memory."""
        add_positions(own.module)
        return cls.load(source, own, own.expected)

    def difference(self, source: ModelSource) -> str | None:
        """Return how one step's output differs from the reference, or None if it is close enough.

        This checks only one step. `verified_graph_runner` later checks several more, with the runner's own attention
        and full KV memory.
        """
        assert self.reference is not None, "a model without a reference cannot be verified"
        difference = self.reference.difference(self.output(source), source.config.quantization)
        if difference is None and self.adapters is not None:
            return self.adapters.difference(has_fp8=source.config.quantization == "fp8")
        return difference

    def output(self, source: ModelSource) -> Output:
        """Run the reference's tokens in one step with temporary KV memory.

        In the result, `first_layer` holds the logits that follow from the first layer alone.
        """
        assert self.reference is not None, "a model without a reference cannot be verified"
        blocks = TrialBlocks.enough(source.block_size)
        attention = TritonAttention(
            self.layers, num_blocks=blocks.max_blocks, block_size=source.block_size, max_rows=1,
            max_blocks=blocks.max_blocks, dtype=self.dtype, device=self.device,
        )  # fmt: skip
        return self.output_of_step(attention, step_of(blocks.piece("own", self.reference.token_ids[0].tolist(), 0)))

    def output_of_step(self, attention: PagedAttention, batch: StepBatch) -> Output:
        assert isinstance(attention, TritonAttention), "CudaModel only uses TritonAttention"
        inputs = build_inputs(batch, block_size=attention.block_size, device=self.device)
        step = attention.begin_step(batch, inputs)
        first, whole = (
            self.device_forward(attention, num_layers=num_layers).compute(inputs.token_ids, inputs.positions, step)
            for num_layers in (1, 0)
        )
        return Output(first.logits[None], whole.logits[None])

    def when_verified(self, source: ModelSource, own: TransformersModel) -> CudaModel:
        """Return this model, with its reference.

        `verified_graph_runner` needs the reference after the full KV memory has been allocated.
        """
        return self

    @property
    def abilities_in_one_group(self) -> Abilities:
        return self.weights.settings.abilities

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.weights.tensors()
        if self.adapters is not None:
            yield from self.adapters.tensors()

    def needs(self, config: EngineConfig, largest: StepBatch) -> MemoryNeeds:
        return needs_on_gpu(config, self, largest)

    def runner(self, config: EngineConfig, *, num_blocks: int, num_threads: int) -> GraphModelRunner:
        check_kv_device(config, self.device)
        return verified_graph_runner(config, self, num_blocks)

    def device_forward(self, attention: PagedAttention, *, num_layers: int = 0) -> CudaDecoder:
        assert isinstance(attention, TritonAttention), "CudaModel only uses TritonAttention"
        return CudaDecoder(self.weights, attention, num_layers=num_layers, group=self.group)

    @property
    def num_own_kernels(self) -> int:
        return num_kernels_of(self.weights)
