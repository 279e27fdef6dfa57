"""Runs Llama-like models on a CPU with our C++ decoder, whose packed weights several processes can share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from app.config import EngineConfig
from app.engine.batch import StepBatch
from app.errors import UnsupportedModel
from app.model.abilities import Abilities
from app.model.allocated_bytes import num_bytes_of
from app.model.cpu.checkpoint import Checkpoint, add_positions
from app.model.cpu.decoder import NativeDecoder, buffer_bytes
from app.model.cpu.kv_cache import NativeKVCache
from app.model.cpu.library import ThreadPool, in_large_pages, is_fast, library
from app.model.cpu.sampling import NativeSampler
from app.model.cpu.shared_weights import Sharing, shared_weights
from app.model.cpu.verification_cache import VerifiedModel, digest_of_files, read_verified, write_verified
from app.model.cpu.weights import (
    BITS,
    STORED,
    Allocate,
    NativeWeights,
    PackableWeights,
    pack_weights,
    why_not_native,
)
from app.model.description import max_model_len
from app.model.device import check_kv_dtype
from app.model.implementations.loaded_model import LoadedModel
from app.model.implementations.transformers_code import TransformersModel
from app.model.inputs import build_inputs
from app.model.kv_cache import LayerGroups
from app.model.llama import DecoderSettings, by_expert, settings_of, why_attention_is_not_llama_like
from app.model.memory import PROCESS_BYTES, MemoryNeeds
from app.model.runner import TorchModelRunner
from app.model.source import ModelSource, length_limit
from app.model.verification import Output, Reference, TrialBlocks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NativeModel(LoadedModel):
    """A Llama-like model with its weights packed for the C++ decoder."""

    weights: NativeWeights
    name = "C++"

    @staticmethod
    def why_not_here(source: ModelSource) -> str | None:
        """Return the reason why the machine or the settings rule out this decoder, or None if they do not.

        Does not inspect the model.
        """
        if source.group is not None:
            if source.config.quantization != "none":
                return "its ranks run transformers' code on a CPU; set replicas.tensor_parallel to 1"
            return "ranks on a CPU always run it"
        if source.device.type != "cpu":
            return f"it runs on {source.device.type}; set model.device to cpu"
        if source.config.backend == "torch":
            return "model.backend is torch"
        if library() is None:
            return "the native code could not be built; install a C++ compiler (see the log)"
        return None

    @staticmethod
    def why_not(source: ModelSource, own: TransformersModel) -> str | None:
        """Return the reason why this decoder does not support the model's structure, or None if it does."""
        return (
            why_not_native(own.module)
            or why_attention_is_not_llama_like(own.module, own.rules, "cpu")
            or NativeKVCache.why_not(
                own.layers, block_size=source.block_size, dtype=own.dtype, device=torch.device("cpu")
            )
        )

    @classmethod
    def load(cls, source: ModelSource, own: TransformersModel, expected: Reference) -> NativeModel:
        """Pack the module's weights, or read them from its files if the module has none.

        expected: the reference output with which the model will be verified.
        """
        settings, bits = settings_of(own.module, own.rules), BITS[source.config.quantization]

        def pack(allocate: Allocate) -> NativeWeights:
            if own.mapped is None:
                return pack_weights(by_expert(own.module.state_dict()).get, settings, bits=bits, allocate=allocate)
            files = own.mapped.checkpoint
            return pack_weights(
                files.to_pack, settings, bits=_bits(source, files), release=files.release, allocate=allocate
            )

        source.log_gguf(is_kept=not bits)
        weights = shared_weights(pack, _sharing(source, settings))
        return cls.converted_from(own, weights=weights, states=own.states, reference=expected)

    @classmethod
    def load_if_verified(cls, source: ModelSource) -> NativeModel | None:
        """Load the model if it was verified at an earlier start, or return None. On the meta device, reads no weights.

        Does not import transformers, which would take longer than importing torch.
        """
        file = _file_of_result(source)
        verified = None if file is None else read_verified(file)
        if verified is None:
            return None
        settings, is_planned = verified.settings, source.device.type == "meta"
        if not is_planned:
            source.log_multiplied_out()
            source.log_gguf(is_kept=source.config.quantization == "none")
        files = source.checkpoint(Path(source.location))
        weights, bits = _sizes_of(files) if is_planned else files.to_pack, _bits(source, files)

        def pack(allocate: Allocate) -> NativeWeights:
            return pack_weights(weights, settings, bits=bits, release=files.release, allocate=allocate)

        return cls(
            weights=pack(in_large_pages) if is_planned else shared_weights(pack, _sharing(source, settings)),
            model_info=replace(
                verified.model_info, max_model_len=max_model_len(source.config, verified.model_info.max_model_len)
            ),
            layers=settings.attention_layers(),
            groups=LayerGroups(stored_by=settings.stored_by),
            states=settings.states(source.dtype),
            dtype=source.dtype,
            device=torch.device("cpu"),
        )

    @classmethod
    def planned(cls, source: ModelSource, own: TransformersModel) -> NativeModel:
        """Build the model on the meta device, without weights. Raises UnsupportedModel if it is not supported."""
        reason = cls.why_not(source, own)
        if reason is not None:
            raise UnsupportedModel(
                f"the memory of {source.config.path} on a CPU cannot be planned, because the native decoder does not "
                f"support it: {reason}"
            )
        add_positions(own.module)
        settings = settings_of(own.module, own.rules)
        weights: PackableWeights = by_expert(own.module.state_dict()).get
        bits = BITS[source.config.quantization]
        if source.gguf is not None:
            files = source.checkpoint(Path(source.location))
            weights, bits = _sizes_of(files), _bits(source, files)
        return cls.converted_from(own, weights=pack_weights(weights, settings, bits=bits), states=own.states)

    def difference(self, source: ModelSource) -> str | None:
        """Run trial steps with temporary KV memory and describe how they differ from the reference, if they do.

        The first layer is compared by the logits that follow from its output.
        """
        assert self.reference is not None, "a model without a reference cannot be verified"
        served, threads = self.with_window_groups(), ThreadPool(torch.get_num_threads())
        blocks = TrialBlocks.enough(source.block_size, num_groups=served.groups.num_groups)
        pages = NativeKVCache(
            served.in_block, num_blocks=blocks.num_blocks * blocks.num_groups, block_size=source.block_size,
            dtype=self.dtype,
        )  # fmt: skip
        decoders = [
            NativeDecoder(
                self.weights, pages, threads, groups=served.groups, num_slots=blocks.num_state_slots,
                num_layers=num_layers,
            )
            for num_layers in (1, 0)
        ]  # fmt: skip

        def compute(batch: StepBatch) -> Output:
            inputs = build_inputs(batch, block_size=source.block_size, device=self.device)
            first, whole = (decoder.predict(batch, inputs) for decoder in decoders)
            return Output(first.logits[None], whole.logits[None])

        quantization = source.config.quantization
        if quantization == "none" and self.weights.weight_bits:  # exact stored weights, but inputs are rounded to int8
            quantization = "int8"
        return self.reference.difference_in_steps(compute, blocks, quantization)

    def with_window_groups(self) -> NativeModel:
        windows = {index: layer.sliding_window for index, layer in enumerate(self.weights.settings.layers)}
        return self if self.states else self.with_groups(windows)

    @property
    def abilities_in_one_group(self) -> Abilities:
        return self.weights.settings.abilities

    def when_verified(self, source: ModelSource, own: TransformersModel) -> NativeModel:
        """Drop the reference, and record on disk that the model is verified, so that the next start skips the trial.

        Nothing is recorded if transformers changes the weights when it reads them, because later starts only read them.
        """
        file, limit = _file_of_result(source), length_limit(own.module)
        if file is not None and limit is not None and own.mapped is not None:
            model_info = replace(self.model_info, max_model_len=limit)
            write_verified(file, VerifiedModel(settings=self.weights.settings, model_info=model_info))
        return replace(self, reference=None)

    def tensors(self) -> Iterator[torch.Tensor]:
        return self.weights.tensors()

    def needs(self, config: EngineConfig, largest: StepBatch) -> MemoryNeeds:
        """Compute the memory on a CPU from tensor sizes alone, because the weights may be on the meta device."""
        num_sampled, vocab_size = len(largest.sampled), self.model_info.vocab_size
        num_rows = num_sampled + sum(len(item.targets) for item in largest.scheduled)
        # Logits of all rows, a copy of the sampled rows if prompts are scored, and a copy for penalties and grammars.
        logits = (num_rows + 2 * num_sampled) * vocab_size * torch.float32.itemsize
        num_tokens, num_positions = largest.num_scheduled_tokens, self.model_info.max_model_len
        kept = buffer_bytes(self.weights, num_tokens=num_tokens, num_positions=num_positions)
        weights = num_bytes_of(self.tensors())
        return MemoryNeeds(weights=weights, step=kept + logits, graphs=0, workspaces=0, context=PROCESS_BYTES)

    def runner(self, config: EngineConfig, *, num_blocks: int, num_threads: int) -> TorchModelRunner:
        check_kv_dtype(config, self.device, None)
        threads = ThreadPool(num_threads)
        pages = NativeKVCache.provided(config.cache, self.in_block, threads, num_blocks=num_blocks, dtype=self.dtype)
        decoder = NativeDecoder(
            self.weights, pages, threads, groups=self.groups, num_slots=self.model_info.num_state_slots
        )  # fmt: skip
        torch.set_num_threads(1)  # torch has almost nothing to compute, but its spinning threads would slow down ours
        return TorchModelRunner(decoder, self.device, NativeSampler(threads), states=decoder.states)


def _bits(source: ModelSource, files: Checkpoint) -> int:
    """Return the bits per packed weight, or `STORED` to keep the types of the files."""
    is_as_stored = source.config.quantization == "none" and files.has_stored
    return STORED if is_as_stored else BITS[source.config.quantization]


def _sizes_of(files: Checkpoint) -> PackableWeights:
    """Return a lookup of weights without data, to plan their memory. A tied head has the size of the embedding."""
    size_of = cache(files.size_to_pack)
    return lambda name: size_of(files.own_name(name))


def _file_of_result(source: ModelSource) -> Path | None:
    """Return the file that records a successful verification, or None for a hub id or if native code is slow here."""
    config, location = source.config, Path(source.location)
    if source.cache is None or not location.is_dir() or not (config.quantization != "none" or is_fast(source.dtype)):
        return None
    return (
        source.cache
        / f"verified-{digest_of_files(location, source.dtype, config.quantization, source.block_size)}.json"
    )


def _sharing(source: ModelSource, settings: DecoderSettings) -> Sharing | None:
    if source.cache is None or source.folder is None:
        return None
    digest = digest_of_files(source.folder, source.dtype, source.config.quantization, settings)
    return Sharing(digest, source.cache)
