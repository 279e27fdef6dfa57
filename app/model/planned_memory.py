"""Predicts a replica's memory from its model's config.json alone, for the planner and for engines that sleep.

The predictions use the same code (`LoadedModel.needs`) that sizes a replica with loaded weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from app.config import GIB, EngineConfig
from app.cores import memory_of_machine
from app.disk import cache_folder
from app.engine.block_pool import BlockPool
from app.engine.largest_batch import largest_batch
from app.errors import InvalidSetup, UnsupportedModel, described
from app.model.abilities import Abilities
from app.model.adapters import MAX_RANK
from app.model.cpu.adapters import AdaptedModel
from app.model.device import device_of, dtype_of, refused_quantization
from app.model.gpu_backends import WITHOUT_DECODER
from app.model.implementations.cuda_decoder import CudaModel
from app.model.implementations.loaded_model import LoadedModel
from app.model.implementations.native_decoder import NativeModel
from app.model.implementations.transformers_code import TransformersModel
from app.model.kv_cache import block_bytes, num_state_slots
from app.model.location import resolve_model_path
from app.model.memory import MemoryNeeds, state_bytes
from app.model.source import ModelSource, unsupported_if_fails


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMemory:
    """The memory that a replica would need, with the sizes of its KV blocks and state slots."""

    needs: MemoryNeeds
    block_bytes: int
    sequence_blocks: int  # blocks of a sequence of full length, over all groups of layers
    context: int  # tokens of the longest sequence
    dtype: str  # the type of weights and KV memory unless they are quantised
    abilities: Abilities
    state_bytes: int = 0  # bytes of one state slot; 0 without recurrent layers

    @property
    def sequence_bytes(self) -> int:
        """The bytes of KV memory that a sequence of full length needs."""
        return self.sequence_blocks * self.block_bytes

    def num_slots(self, config: EngineConfig, memory_bytes: int) -> int:
        """Return the number of state slots. memory_bytes: the bytes for slots and KV memory together."""
        if not self.state_bytes:
            return 0
        max_running = config.scheduler.max_running
        return num_state_slots(self.state_bytes, max_running=max_running, memory_bytes=memory_bytes)

    def beside(self, draft: PlannedMemory) -> PlannedMemory:
        """Return the memory of this model and a draft model together. The draft adds to every block's bytes."""
        needs = replace(
            self.needs, weights=self.needs.weights + draft.needs.weights, step=self.needs.step + draft.needs.step
        )
        return replace(self, needs=needs, block_bytes=self.block_bytes + draft.block_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAdapters:
    """A number of loaded LoRA adapters of one rank. Each is assumed to change every adaptable layer."""

    number: int = 0
    rank: int = 16


def planned_cpu_memory(
    config: EngineConfig, adapters: PlannedAdapters = PlannedAdapters(), *, has_peers: bool = False
) -> PlannedMemory:
    """Plan a replica on a CPU of the same kind as this machine's.

    has_peers: whether replicas fetch prefixes from one another, which requires blocks behind windows to be kept.

    Raises:
        InvalidSetup: the model does not exist, its context length is unknown, or the adapters' rank is not supported.
        UnsupportedModel: the model cannot be served, or the native decoder does not support it.
    """
    if adapters.rank > MAX_RANK:
        raise InvalidSetup(f"adapters of rank {adapters.rank} are not supported; the highest rank is {MAX_RANK}")
    model = planned_native_model(config)
    draft = config.draft_model_config
    planned = _planned(config, model, keeps_all=has_peers)
    loaded = adapters.number * AdaptedModel.of(model.weights).adapter_bytes(adapters.rank)
    planned = replace(planned, needs=replace(planned.needs, adapters=loaded))
    return planned if draft is None else planned.beside(_planned(draft, planned_native_model(draft), keeps_all=True))


class DeviceMemory(NamedTuple):
    """A device that engines share by sleeping, and the memory that one of them needs."""

    name: str
    total_bytes: int  # for all engines on the device
    needed_bytes: int | None  # the bytes that the engine frees when it sleeps, or None for all free memory


def memory_to_sleep(config: EngineConfig, *, has_peers: bool = False) -> DeviceMemory:
    """Predict the memory of an engine that may sleep. Fast for a verified model on a CPU, which needs no transformers.

    has_peers: as in `planned_cpu_memory`. Raises InvalidSetup if its memory cannot be planned.
    """
    cache = config.cache
    if device_of(config.model).type == "cpu":
        share = 0.9  # leave the rest to processes and the system
        return DeviceMemory("cpu", int(share * memory_of_machine()), _needs_to_sleep_on_cpu(config, has_peers))
    card, planned = torch.cuda.get_device_properties(0), planned_memory(config)
    total, needed = int(cache.gpu_memory_fraction * card.total_memory), None
    if cache.num_blocks is not None:
        needed = planned.needs.total + _bytes_of_blocks(config, planned, total - planned.needs.total)
    return DeviceMemory(str(card.uuid), total_bytes=total, needed_bytes=needed)


def _needs_to_sleep_on_cpu(config: EngineConfig, has_peers: bool) -> int:
    """Return the bytes of weights, KV memory and the largest step, including those of a draft model."""
    cache, of_draft = config.cache, config.draft_model_config
    try:
        planned = _planned_by_cache(config, keeps_all=has_peers)
        planned = planned if of_draft is None else planned.beside(_planned_by_cache(of_draft, keeps_all=True))
    except UnsupportedModel as error:
        raise InvalidSetup(f"replicas.sleep_after_s: {error}; remove sleep_after_s") from error
    kv = int(cache.memory_gib * GIB)
    if cache.num_blocks is not None:
        kv = _bytes_of_blocks(config, planned, kv)
    return planned.needs.weights + planned.needs.step + kv


def _bytes_of_blocks(config: EngineConfig, planned: PlannedMemory, memory_bytes: int) -> int:
    """Return the bytes of the configured number of blocks and of the state slots. memory_bytes: as in `num_slots`."""
    cache = config.cache
    assert cache.num_blocks is not None, "cache.num_blocks is not set"
    num_slots = planned.num_slots(config, memory_bytes)
    return cache.num_blocks * planned.block_bytes + num_slots * planned.state_bytes


def planned_memory(config: EngineConfig, *, num_ranks: int = 1) -> PlannedMemory:
    """Plan a replica on a GPU, or each of its ranks. Does not need a GPU.

    Raises:
        InvalidSetup: the model does not exist, its context length is unknown, or the ranks cannot share it.
        UnsupportedModel: the model cannot be served, or its config.json does not determine its sizes.
    """
    dtype = torch.float32 if config.model.dtype == "float32" else torch.bfloat16
    model = planned_gpu_model(config, dtype=dtype, num_ranks=num_ranks)
    try:
        return _planned(config, model)
    except RuntimeError as error:  # the meta device lacks an operator
        raise UnsupportedModel(f"{config.model.path} cannot be planned in {dtype}: {described(error)}") from error


@torch.inference_mode()
def planned_gpu_model(config: EngineConfig, *, dtype: torch.dtype, num_ranks: int = 1) -> CudaModel | TransformersModel:
    """Build a model, or one rank's part, on the meta device, without weights. Prefers our decoder for CUDA."""
    source = _source(config, dtype)
    with unsupported_if_fails(config.model.path):
        own = TransformersModel.planned(source, num_ranks=num_ranks)
    reason = CudaModel.why_not(source, own)
    if config.model.quantization == "fp8" and reason is not None:
        raise refused_quantization(config.model, reason)
    is_ours = reason is None and config.model.backend not in WITHOUT_DECODER
    return CudaModel.planned(source, own) if is_ours else own


@torch.inference_mode()
def planned_native_model(config: EngineConfig) -> NativeModel:
    """Build the model for the C++ decoder, without weights. Raises UnsupportedModel if it is not supported."""
    source = _source(config, _dtype_on_cpu(config))
    with unsupported_if_fails(config.model.path):
        return NativeModel.planned(source, TransformersModel.planned(source))


@torch.inference_mode()
def _planned_by_cache(config: EngineConfig, *, keeps_all: bool) -> PlannedMemory:
    model = NativeModel.load_if_verified(_source(config, _dtype_on_cpu(config)))
    return _planned(config, planned_native_model(config) if model is None else model, keeps_all=keeps_all)


def _dtype_on_cpu(config: EngineConfig) -> torch.dtype:
    return dtype_of(config.model, resolve_model_path(config.model.path)).dtype


def _source(config: EngineConfig, dtype: torch.dtype) -> ModelSource:
    return ModelSource(
        config=config.model,
        location=resolve_model_path(config.model.path),
        device=torch.device("meta"),
        dtype=dtype,
        block_size=config.cache.block_size,
        cache=cache_folder(),
    )


def _planned(config: EngineConfig, model: LoadedModel, *, keeps_all: bool = False) -> PlannedMemory:
    """keeps_all: whether blocks behind windows are kept, as tiers and draft models require anyway."""
    if not (keeps_all or config.cache.tiers or config.draft_model_config):
        model = model.with_window_groups()
    block_size, model_info = config.cache.block_size, model.model_info
    pool = BlockPool.of(model_info, config.scheduler, num_blocks=0, block_size=block_size)
    return PlannedMemory(
        needs=model.needs(config, largest_batch(config.scheduler, model_info, block_size=block_size)),
        block_bytes=block_bytes(config.cache, model.in_block, dtype=model.dtype),
        sequence_blocks=pool.num_blocks_after((), model_info.max_model_len),
        context=model_info.max_model_len,
        dtype=str(model.dtype).removeprefix("torch."),
        abilities=model.abilities,
        state_bytes=state_bytes(model.states),
    )
