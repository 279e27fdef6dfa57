"""Loads a model in the first implementation that supports it, and verifies it against transformers' code.

`implementations/` has one file for each implementation. `load_runner` also sizes and allocates the KV memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from app.config import CacheConfig, EngineConfig, ModelConfig
from app.cores import num_cores
from app.disk import cache_folder
from app.errors import CarouselError
from app.model.attention import StateShape
from app.model.crash_notes import ending_hangs
from app.model.cuda.attention import TritonAttention
from app.model.cuda.graph_runner import GraphModelRunner
from app.model.device import (
    ChosenDtype,
    check_backend_on_cpu,
    check_kv_device,
    device_of,
    driver_version,
    dtype_of,
    refused_quantization,
    warn_without_mps,
    why_no_triton,
)
from app.model.gpu_backends import TORCH, WITHOUT_DECODER, BackendFailed, Ladder, cause_of, config_for, is_lost
from app.model.host_memory import allocating_host_memory
from app.model.implementations.cuda_decoder import CudaModel
from app.model.implementations.gpu import bytes_for_kv, why_plain_draws
from app.model.implementations.loaded_model import LoadedModel
from app.model.implementations.native_decoder import NativeModel
from app.model.implementations.transformers_code import TransformersModel
from app.model.kv_cache import block_bytes, num_blocks_that_fit, num_state_slots_that_fit
from app.model.language_model import check_text_weights
from app.model.location import resolve_model_path
from app.model.memory import explaining_out_of_memory, is_out_of_memory, loading_weights, state_bytes
from app.model.parallel.group import RankGroup
from app.model.runner import LeadingRunner
from app.model.source import ModelSource, module_without_weights, unsupported_if_fails
from app.progress import report_step

logger = logging.getLogger(__name__)

MIN_INTERVAL_TOKENS = 256  # the smallest distance between two snapshots of recurrent states in a long prompt


CheckStates = Callable[[Sequence[StateShape]], object]


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """A loaded model, and a runner with its KV memory."""

    config: EngineConfig  # on a GPU, with the settings of the backend that was chosen
    model: LoadedModel
    runner: LeadingRunner
    num_blocks: int  # blocks of KV memory
    draft: LoadedRunner | None = None  # the draft model, with the same number of blocks


def load_runner(
    config: EngineConfig, *, gpu_share: float = 1.0, group: RankGroup | None = None, keeps_all: bool = False
) -> LoadedRunner:
    """Load the model, or one rank's part of it, and its draft model, if any, and allocate KV memory for both.

    Must be called on all ranks of a group. Sets torch's number of threads for this process. keeps_all: whether to keep
    the blocks behind layers' windows, which is necessary if prefixes are also stored elsewhere.
    """
    num_threads = config.model.num_threads or max(1, num_cores() // (1 if group is None else group.size))
    torch.set_num_threads(num_threads)
    device = device_of(config.model)
    check_kv_device(config, device)
    if device.type == "cuda" and gpu_share < 1:
        warn_without_mps(gpu_share)
    load = partial(_with_memory, num_threads=num_threads, gpu_share=gpu_share, group=group, keeps_all=keeps_all)
    if not TritonAttention.fits(device):
        check_backend_on_cpu(config.model)
        return load(config, _load(config, group))
    ladder = Ladder.of(
        config, device, driver=driver_version(), why_no_triton=why_no_triton(device), is_shared=group is not None
    )
    if group is not None:
        ladder.agree(group.minimum)
    model: LoadedModel | None = None
    for backend in ladder.backends():
        chosen = config_for(config, backend)
        with ladder.trying(backend):
            if model is None or (backend in WITHOUT_DECODER and not isinstance(model, TransformersModel)):
                model = None  # free this model's memory before another one is loaded
                model = _load(chosen, group)
            ladder.has_weights, ladder.has_own_decoder = True, not isinstance(model, TransformersModel)
            ladder.note("decoder", model.why_not_ours)
            if (reason := model.why_not_on(backend)) is not None:
                ladder.skipped[backend] = reason
                continue
            with ending_hangs():
                if backend != TORCH:
                    model = replace(model, why_plain_draws=why_plain_draws(model))
                    ladder.note("sampler", model.why_plain_draws)
                loaded = load(chosen, model)
            assert isinstance(loaded.runner, GraphModelRunner), "all backends of a GPU use this runner"
            loaded.runner.report(ladder, backend)
            return loaded
    raise AssertionError("`Ladder.backends` raises if no backend works")


def _with_memory(
    config: EngineConfig,
    model: LoadedModel,
    *,
    num_threads: int,
    gpu_share: float,
    group: RankGroup | None,
    keeps_all: bool,
) -> LoadedRunner:
    """Load the draft model, if any, and allocate KV memory for both models."""
    of_draft = config.draft_model_config
    draft = None if of_draft is None else _load(of_draft, None)
    if draft is None and not keeps_all:  # a draft model uses the same block ids, so no blocks may be freed early
        model = model.with_window_groups()
    is_measured = model.device.type == "cuda" and (config.cache.num_blocks is None or bool(model.states))
    gpu_bytes = bytes_for_kv(config, model, gpu_share) if is_measured else None
    model, num_state_bytes = _with_state_slots(config, model, gpu_bytes)
    draft_bytes = 0 if draft is None else block_bytes(config.cache, draft.in_block, dtype=draft.dtype)
    num_blocks = num_blocks_that_fit(
        config.cache,
        model.in_block,
        dtype=model.dtype,
        num_groups=model.groups.num_groups,
        gpu_bytes=gpu_bytes,
        draft_bytes=draft_bytes,
        taken_bytes=num_state_bytes,
    )
    if group is not None:
        num_blocks = group.minimum(num_blocks)
    of_block = block_bytes(config.cache, model.in_block, dtype=model.dtype) + draft_bytes
    with _allocating_on(model.device, config.cache, num_blocks * of_block + num_state_bytes):
        loaded = _with_kv_memory(config, model, num_blocks, num_threads)
        if of_draft is None or draft is None:
            return loaded
        return replace(loaded, draft=_with_kv_memory(of_draft, draft, num_blocks, num_threads))


def _allocating_on(device: torch.device, config: CacheConfig, num_bytes: int) -> AbstractContextManager[None]:
    """Return a context manager for the allocation of KV memory and state slots, which explains a lack of memory."""
    if device.type != "cpu":
        return explaining_out_of_memory(
            "the KV memory", "Lower cache.num_blocks, or cache.gpu_memory_fraction if num_blocks is not set"
        )
    setting = "memory_gib" if config.num_blocks is None else "num_blocks"
    return allocating_host_memory(
        f"cache.{setting}={getattr(config, setting):.15g}: KV memory takes",
        num_bytes,
        f"set a smaller engine.cache.{setting}, or raise the limit of the container",
    )


def _with_state_slots(config: EngineConfig, model: LoadedModel, gpu_bytes: int | None) -> tuple[LoadedModel, int]:
    """Return the model with state slots, if needed, and their bytes. gpu_bytes: as in `num_state_slots_that_fit`."""
    number, of_state = _num_state_slots(config, model.states, gpu_bytes), state_bytes(model.states)
    if not of_state:
        return model, 0
    # Space snapshots so that the keys and values of the tokens between two of them need as much memory as a snapshot.
    block_size, of_block = config.cache.block_size, block_bytes(config.cache, model.in_block, dtype=model.dtype)
    num_blocks = max(-(-MIN_INTERVAL_TOKENS // block_size), of_state // of_block)
    model_info = replace(model.model_info, num_state_slots=number, state_interval_tokens=num_blocks * block_size)
    return replace(model, model_info=model_info), number * of_state


def _num_state_slots(config: EngineConfig, states: Sequence[StateShape], gpu_bytes: int | None = None) -> int:
    """Return the number of state slots, 0 without recurrent layers. Raises InvalidSetup if they do not fit."""
    if not states:
        return 0
    max_running = config.scheduler.max_running
    return num_state_slots_that_fit(config.cache, state_bytes(states), max_running=max_running, gpu_bytes=gpu_bytes)


def _load(config: EngineConfig, group: RankGroup | None) -> LoadedModel:
    with loading_weights():
        return load_model(
            config.model,
            resolve_model_path(config.model.path),
            block_size=config.cache.block_size,
            checks=cache_folder(),
            group=group,
            check_states=partial(_num_state_slots, config),
        )


def _with_kv_memory(config: EngineConfig, model: LoadedModel, num_blocks: int, num_threads: int) -> LoadedRunner:
    logger.info(
        "%s is loaded on %s in %s%s%s, with %d threads and %d KV blocks of %d tokens",
        config.model.path, model.device, model.dtype,
        "" if config.model.quantization == "none" else f", weights in {config.model.quantization}",
        "" if config.cache.dtype == "auto" else f", KV memory in {config.cache.dtype}",
        num_threads, num_blocks, config.cache.block_size,
    )  # fmt: skip
    logger.info("%s", model.abilities)
    report_step("allocating the KV memory")
    runner = model.runner(config, num_blocks=num_blocks, num_threads=num_threads)
    return LoadedRunner(config, model, runner, num_blocks)


@torch.inference_mode()
def load_model(
    config: ModelConfig,
    location: str,
    *,
    block_size: int = 16,
    checks: Path | None = None,
    group: RankGroup | None = None,
    check_states: CheckStates | None = None,
) -> LoadedModel:
    """Load weights from safetensors and verify the model on a few tokens. Code from a model repository never runs.

    block_size: tokens in a block of KV memory; native code supports only some sizes.
    checks: a folder for locks on shared weights, and for a record of verified models, which are not verified again.
    group: the ranks that each load one part of the model; all of them must call this function.
    check_states: called on a CPU with the model's recurrent states, if any, before weights are read; may raise.

    Raises:
        InvalidSetup: the model or the device does not exist, or the model cannot be quantised as configured.
        UnsupportedModel: the model is not decoder-only or its attention cannot be paged; the message says why.
    """
    chosen = dtype_of(config, location)
    source = ModelSource(
        config=config, location=location, device=device_of(config), dtype=chosen.dtype, block_size=block_size,
        cache=checks, group=group,
    )  # fmt: skip
    with unsupported_if_fails(config.path, group):
        return _load_in_first_implementation(source, chosen, check_states)


def _load_in_first_implementation(
    source: ModelSource, chosen: ChosenDtype, check_states: CheckStates | None
) -> LoadedModel:
    """Load the model in the first implementation that supports it. chosen: the type and its reason, for the log."""
    config = source.config
    way = _decoder_for(config, source.device)
    reason = way.why_not_here(source)
    if reason is not None and config.quantization != "none":
        raise refused_quantization(config, reason)
    logger.info("%s: the number type is %s: %s", config.path, chosen.name, chosen.reason)
    if reason is None and way is NativeModel and (before := NativeModel.load_if_verified(source)) is not None:
        return before
    _check_before_weights(source, check_states)
    if reason is not None:
        return _on_transformers_code(source, TransformersModel.load(source), reason)
    own = TransformersModel.load(source, from_files=way is NativeModel or config.quantization == "fp8")
    reason = way.why_not(source, own)
    if reason is None:
        verified = _verified(way, source, own)
        return replace(own.ready(source), why_not_ours=verified) if isinstance(verified, str) else verified
    if config.quantization != "none":
        raise refused_quantization(config, reason)
    return _on_transformers_code(source, own, reason)


def _check_before_weights(source: ModelSource, check_states: CheckStates | None) -> None:
    """Reject an unsupported checkpoint early, by its configuration and weight names, before any weights are read."""
    folder = Path(source.location)
    if source.whole.get_text_config() is not source.whole and folder.is_dir():
        module = module_without_weights(source, source.dtype)
        tied = getattr(module, "all_tied_weights_keys", None) or {}
        check_text_weights(source.config.path, folder, source.whole, module.state_dict().keys() - set(tied))
    if source.layers_with_states and check_states is not None and source.device.type == "cpu":
        check_states(TransformersModel.planned(replace(source, device=torch.device("meta"))).states)


def _decoder_for(config: ModelConfig, device: torch.device) -> type[CudaModel | NativeModel]:
    if config.quantization != "none":
        return CudaModel if config.quantization == "fp8" else NativeModel
    return CudaModel if TritonAttention.fits(device) else NativeModel


def _on_transformers_code(source: ModelSource, own: TransformersModel, reason: str) -> TransformersModel:
    logger.info("%s runs on transformers' code: %s", source.config.path, reason)
    return own.ready(source)


def _verified(
    way: type[CudaModel | NativeModel], source: ModelSource, own: TransformersModel
) -> CudaModel | NativeModel | str:
    """Load a model into our decoder and verify it. Returns the model, or the reason if its outputs are wrong.

    The reason is also logged. Must be called on all ranks: if outputs differ on one rank, no rank uses the decoder.
    """
    report_step("comparing its outputs with those of transformers' code (once)")
    expected = own.expected.with_first_logits(own.module)
    try:
        model = way.load(source, own, expected)
        with ending_hangs():
            difference = model.difference(source)
    except Exception as error:
        if (
            way is NativeModel
            or source.group is not None
            or isinstance(error, CarouselError)
            or is_out_of_memory(error)
            or is_lost(source.device)
        ):
            raise
        difference = cause_of(error)
    if source.group is not None and not source.group.minimum(int(difference is None)):
        difference = difference or "the output differs on another rank"
    if difference is None:
        return model.when_verified(source, own)
    if source.config.quantization != "none":
        if way is CudaModel:
            raise BackendFailed(f"in {way.name} {difference}")
        raise refused_quantization(source.config, difference)
    logger.warning("%s runs on transformers' code, which is slower: in %s %s", source.config.path, way.name, difference)
    return f"in {way.name} {difference}"
