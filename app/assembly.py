"""Joins an engine and a model; the only place that knows both.

The model room is imported when an engine is built, so that a process that only wants to know where a model lies does
not load torch.
"""

from __future__ import annotations

import filecmp
import json
import logging
import os
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4
from zlib import crc32

from app.child_process import PROJECT, child_command, child_environment
from app.config import (
    GIB,
    MAX_LOADED_ADAPTERS,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ReplicasConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from app.cores import memory_of_machine, num_cores
from app.disk import cache_folder
from app.engine.adapter_store import AdapterStore
from app.engine.async_engine import AsyncEngine
from app.engine.block_pool import BlockPool, NoBlocks
from app.engine.device_lease import DeviceLease
from app.engine.engine import Engine
from app.engine.largest_batch import largest_batch
from app.engine.matcher import Matchers
from app.engine.model_runner import ModelRunner
from app.engine.observer import StepObserver
from app.engine.overlapped_engine import OverlappedEngine
from app.engine.request import Adapter, ModelInfo
from app.engine.scheduler import Scheduler
from app.engine.sleep_controller import SleepController
from app.engine.speculation.draft_model import ModelDrafter
from app.engine.speculation.drafter import Drafter, LookupDrafter
from app.engine.trace.entries import Header
from app.engine.trace.recorder import StepRecorder
from app.engine.trace.redaction import Redactor
from app.engine.trace.step_log import LogFiles, StepLog
from app.errors import InvalidSetup, UnsupportedAdapter, UnsupportedModel, described
from app.versions import commit, versions

if TYPE_CHECKING:
    from app.model.cuda.graph_runner import GraphModelRunner
    from app.model.loader import LoadedModel
    from app.model.memory import MemoryNeeds
    from app.model.parallel.group import RankGroup
    from app.model.parallel.ranks import Ranks
    from app.model.runner import TorchModelRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The devices of one engine."""

    gpu_share: float = 1.0  # the part of the GPU that is this engine's; others on the same card have the rest
    tensor_parallel: int = 1  # devices that compute each step together, with a process for each
    step_timeout_s: float = 60.0  # for which one of these waits for the others
    sleep_after_s: float | None = None  # without a request; None: the engine keeps its memory
    memory_gib: float | None = None  # of all engines that sleep on the device; None: most of what there is

    @classmethod
    def of(cls, replicas: ReplicasConfig) -> Devices:
        """Those of one replica."""
        return cls(
            # Engines that sleep divide the memory by their turns.
            gpu_share=replicas.gpu_share if replicas.sleep_after_s is None else 1.0,
            tensor_parallel=replicas.tensor_parallel,
            step_timeout_s=replicas.step_timeout_s,
            sleep_after_s=replicas.sleep_after_s,
            memory_gib=replicas.device_memory_gib,
        )


ONE_DEVICE = Devices()


def build_engine(config: EngineConfig, devices: Devices = ONE_DEVICE) -> AsyncEngine:
    """Load the model, size its KV memory and start the engine's thread. Takes seconds to minutes.

    An engine that is to sleep first waits for memory that other engines of its device have.

    Raises:
        InvalidSetup: the configuration cannot be carried out on this machine.
        UnsupportedModel: the model cannot be served; the message says why.
    """
    if devices.sleep_after_s is None:
        return _in_a_thread(config, build_sync_engine(config, devices))
    turns = turns_of(config, devices)
    turns.wait()
    try:
        began_at = time.monotonic()
        engine = build_sync_engine(config, devices)
        started_in_s = time.monotonic() - began_at
        sleeper = SleepController(engine, turns, after_s=devices.sleep_after_s, started_in_s=started_in_s)
        return _in_a_thread(config, engine, sleeper)
    except BaseException:
        turns.close()
        raise


def _in_a_thread(config: EngineConfig, engine: Engine, sleeper: SleepController | None = None) -> AsyncEngine:
    # Prompt tokens that wait on one replica. `scheduler.max_waiting` bounds the requests; this bounds what they hold,
    # when each is a long prompt: 32 MB of token ids, and minutes of prefill even on a GPU.
    max_waiting_tokens = 1_000_000
    return AsyncEngine(
        engine,
        max_requests=config.scheduler.max_requests,
        max_waiting_tokens=max_waiting_tokens,
        matchers=build_matchers(config, engine.facts),
        sleeper=sleeper,
    )


def turns_of(config: EngineConfig, devices: Devices) -> DeviceLease:
    """The part that an engine will have in the turns of its device.

    Raises:
        InvalidSetup: it needs more than there is, or this model cannot sleep.
        UnsupportedModel: it cannot be served.
    """
    device = _device_memory(config)
    total_bytes = device.total_bytes if devices.memory_gib is None else int(devices.memory_gib * GIB)
    return DeviceLease(
        cache_folder() / "devices" / f"{socket.gethostname()}-{device.name}.json",
        name=config.model.path,
        num_bytes=total_bytes if device.needed_bytes is None else device.needed_bytes,
        total_bytes=total_bytes,
    )


@dataclass(frozen=True, slots=True)
class _DeviceMemory:
    """A device, and what one engine needs of it."""

    name: str
    total_bytes: int  # for all engines
    needed_bytes: int | None  # that sleep gives up; None: all that is left


def _device_memory(config: EngineConfig) -> _DeviceMemory:
    if config.model.simulated is not None:
        from app.model.simulated import SimulatedCosts

        costs = SimulatedCosts.model_validate(config.model.simulated)
        return _DeviceMemory("simulated", total_bytes=GIB * 1024, needed_bytes=int(costs.memory_gib * GIB))
    import torch

    from app.model.loader import device_of

    # Of the machine's memory, for the engines on its CPUs that sleep; the rest is for processes and the system.
    sleeping_share = 0.9
    if device_of(config.model).type == "cpu":
        return _DeviceMemory("cpu", int(sleeping_share * memory_of_machine()), _needs_on_cpu(config))
    card = torch.cuda.get_device_properties(0)
    planned, num_blocks = planned_memory(config), config.cache.num_blocks
    return _DeviceMemory(
        str(card.uuid),
        total_bytes=int(config.cache.gpu_memory_fraction * card.total_memory),
        needed_bytes=None if num_blocks is None else planned.needs.total + num_blocks * planned.block_bytes,
    )


def _needs_on_cpu(config: EngineConfig) -> int:
    """Bytes of weights, KV memory and the largest step."""
    cache, draft = config.cache, _of_draft_model(config)
    try:
        planned = _planned_by_check(config)
        planned = planned if draft is None else planned.beside(_planned_by_check(draft))
    except UnsupportedModel as error:
        raise InvalidSetup(f"replicas.sleep_after_s: {error}; set no sleep_after_s") from error
    kv = int(cache.memory_gib * GIB) if cache.num_blocks is None else cache.num_blocks * planned.block_bytes
    return planned.needs.weights + planned.needs.step + kv


def _planned_by_check(config: EngineConfig) -> PlannedMemory:
    """The sizes of the model itself. Of one that was checked before, without transformers."""
    from app.model.loader import model_of_check

    location = resolve_model_path(config.model.path)
    model = model_of_check(config.model, location, block_size=config.cache.block_size, checks=cache_folder())
    return _planned_by_config(config) if model is None else _planned_of_native(config, model)


def adapter_at(name: str, path: str) -> Adapter:
    """The adapter that lies there. Of a hub id the files are downloaded. Raises UnsupportedAdapter."""
    from app.model.adapter_files import adapter_digest, adapter_folder

    return Adapter(name=name, path=path, digest=adapter_digest(adapter_folder(_folder_seen_from_here(path))))


def digest_of_weights(config: EngineConfig) -> int:
    """A number that is equal on machines with the same weights; 0 where there are none or they cannot be read again."""
    from app.model.weights_digest import weights_digest

    model = config.model
    if model.simulated is not None:
        return 0
    location = resolve_model_path(model.path)
    try:
        digest = weights_digest(location, model.revision)
    except (OSError, ValueError) as error:
        logger.warning("the files of %s have no digest: %s", model.path, described(error))
        return 0
    # Weights of another type are other weights: one replica's tokens are not continued by the other's. The same holds
    # for KV memory.
    types = f"{_dtype_name(model, location)} {model.quantization} {config.cache.dtype}"
    return crc32(types.encode(), digest) if digest else 0


def _dtype_name(model: ModelConfig, location: str) -> str:
    """The type that this machine chooses, where it is not configured."""
    if model.dtype != "auto":
        return model.dtype
    from app.model.loader import dtype_of

    return dtype_of(model, location).name


def build_matchers(config: EngineConfig, facts: ModelInfo) -> Matchers:
    """What makes grammars of requests into matchers. The tokenizer is read when the first of them comes."""
    from app.grammar.grammars import Grammars
    from app.grammar.vocabulary import read_vocabulary

    model = config.model
    return Grammars(
        lambda: read_vocabulary(
            resolve_model_path(model.path),
            model.revision,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
        ),
    )


def build_sync_engine(config: EngineConfig, devices: Devices = ONE_DEVICE) -> Engine:
    """The same engine without its thread, for callers that run each step themselves."""
    return _build_simulated(config) if config.model.simulated is not None else _build_torch(config, devices)


def _build_torch(config: EngineConfig, devices: Devices) -> Engine:
    from app.model.description import sentence_settings
    from app.model.encoder_loader import is_encoder

    location = resolve_model_path(config.model.path)
    if is_encoder(config.model, location):
        return _build_encoder(config, devices, location)
    if devices.tensor_parallel == 1:
        loaded = load_runner(config, gpu_share=devices.gpu_share)
    else:
        _refuse_draft_model(config, f"replicas.tensor_parallel is {devices.tensor_parallel}")
        ranks = _start_ranks(config, devices)
        with ranks.loading():
            loaded = load_runner(config, group=ranks.group)
        loaded.runner.lead(ranks)
    sentences = sentence_settings(config.model, location)
    runner = _runner_of(config, loaded, devices)
    return assemble_recorded(
        config,
        num_blocks=loaded.num_blocks,
        runner=runner,
        facts=replace(loaded.model.facts, pooling=sentences.pooling),
        adapters=_adapters_of(config, runner) if devices.tensor_parallel == 1 else None,
        drafter=(
            drafter_of(config.speculation)
            if loaded.draft is None
            else _model_drafter(config, loaded.model.facts, loaded.draft, devices)
        ),
        # On a GPU the KV memory was sized by what such a step leaves of it.
        largest_step=config.scheduler if loaded.model.device.type == "cuda" else None,
    )


def _model_drafter(config: EngineConfig, facts: ModelInfo, draft: LoadedRunner, devices: Devices) -> ModelDrafter:
    """facts: of the model itself. Raises InvalidSetup where the draft model has other tokens."""
    of_draft = _of_draft_model(config)
    assert of_draft is not None, "it was loaded with these settings"
    _check_tokens(config.model, of_draft.model, facts, draft.model.facts)
    return ModelDrafter(
        _runner_of(of_draft, draft, devices),
        max_model_len=draft.model.facts.max_model_len,
        facts=facts,
    )


def _of_draft_model(config: EngineConfig) -> EngineConfig | None:
    """The settings with which the draft model is loaded; None where there is none."""
    path = config.speculation.model
    if path is None:
        return None
    model = config.model.model_copy(update={"path": path, "revision": None, "max_model_len": None})
    return config.model_copy(update={"model": model, "speculation": SpeculationConfig()})


def _check_tokens(model: ModelConfig, draft: ModelConfig, facts: ModelInfo, of_draft: ModelInfo) -> None:
    """Raises InvalidSetup where a draft model does not have the same token for every id. Takes seconds where their
    tokenizers are not equal files."""
    from app.grammar.vocabulary import read_vocabulary

    fix = f"choose a draft model of the family of {model.path}, or another speculation.method"
    number, of_draft_number = facts.vocab_size, of_draft.vocab_size
    if number != of_draft_number:
        raise InvalidSetup(
            f"speculation.model: {draft.path} has {of_draft_number:,} tokens and {model.path} {number:,}; a draft "
            f"model needs the same: {fix}"
        )
    file, other_file = (Path(resolve_model_path(each.path)) / "tokenizer.json" for each in (model, draft))
    if file.is_file() and other_file.is_file() and filecmp.cmp(file, other_file, shallow=False):
        return
    ours, theirs = (
        read_vocabulary(resolve_model_path(each.path), each.revision, vocab_size=number, eos_token_ids=()).tokens
        for each in (model, draft)
    )
    others = [token_id for token_id, (own, other) in enumerate(zip(ours, theirs, strict=True)) if own != other]
    if others:
        first = others[0]
        raise InvalidSetup(
            f"speculation.model: {len(others):,} of {number:,} tokens of {draft.path} are others than those of "
            f"{model.path}, the first with the id {first}: {theirs[first]!r}, not {ours[first]!r}; {fix}"
        )


def _refuse_draft_model(config: EngineConfig, reason: str) -> None:
    """Raises InvalidSetup where the settings name a draft model."""
    if config.speculation.model is not None:
        raise InvalidSetup(
            f"speculation.method is draft_model, and {reason}: a draft model needs a decoder on a CPU, computed by one "
            f"process; set speculation.method to off"
        )


def _runner_of(config: EngineConfig, loaded: LoadedRunner, devices: Devices) -> ModelRunner:
    return loaded.runner if devices.sleep_after_s is None else _that_sleeps(config, loaded)


def _that_sleeps(config: EngineConfig, loaded: LoadedRunner) -> ModelRunner:
    """The model's runner, or one that loads the model again. Raises InvalidSetup where there is neither."""
    from app.model.reloading import ReloadingRunner
    from app.model.runner import TorchModelRunner

    if loaded.runner.can_sleep:
        return loaded.runner
    if loaded.model.native is None or not isinstance(loaded.runner, TorchModelRunner):
        raise InvalidSetup(
            f"replicas.sleep_after_s: {config.model.path} runs on transformers' code, which keeps its weights; only "
            f"the native decoder gives them up (the log says why it was not chosen). Set no sleep_after_s"
        )
    cache = config.cache.model_copy(update={"num_blocks": loaded.num_blocks})
    again = config.model_copy(update={"cache": cache, "speculation": SpeculationConfig()})

    def load() -> TorchModelRunner:
        runner = load_runner(again).runner
        assert isinstance(runner, TorchModelRunner), "as at the start"
        return runner

    return ReloadingRunner(loaded.runner, load)


def _adapters_of(config: EngineConfig, runner: ModelRunner) -> AdapterStore | None:
    """None where the runner computes with no adapters."""
    if not runner.adapts:
        return None
    from app.model.adapter_files import adapter_digest, adapter_folder, another_base

    model = config.model
    served = (model.path, *_names_in_config(resolve_model_path(model.path)))

    def load(adapter: Adapter) -> object:
        folder = adapter_folder(_folder_seen_from_here(adapter.path))
        digest = adapter_digest(folder)
        if digest != adapter.digest:
            raise UnsupportedAdapter(
                f"the adapter {adapter.name} in {folder} is {digest} here and {adapter.digest} where it was named: "
                f"copy the same files to every machine, and load it again under /admin/adapters"
            )
        weights = runner.load_adapter(folder)
        difference = another_base(folder, served, model.revision)
        if difference is not None:
            logger.warning("the adapter %s fits by its sizes, but %s", adapter.name, difference)
        return weights

    max_loaded = model.max_loaded_adapters or MAX_LOADED_ADAPTERS
    return AdapterStore(load, unload=runner.unload_adapter, max_loaded=max_loaded)


def _names_in_config(location: str) -> list[str]:
    """What the config.json of a folder says that the model was loaded from."""
    file = Path(location) / "config.json"
    name = json.loads(file.read_bytes()).get("_name_or_path") if file.is_file() else None
    return [name] if isinstance(name, str) and name else []


def _build_encoder(config: EngineConfig, devices: Devices, location: str) -> Engine:
    import torch

    from app.model.encoder_loader import load_encoder
    from app.model.memory import refusing_to_run_short

    _refuse_draft_model(config, f"{config.model.path} is an encoder")
    if devices.tensor_parallel > 1:
        raise InvalidSetup(
            f"replicas.tensor_parallel is {devices.tensor_parallel}; {config.model.path} is an encoder, which is not "
            f"divided: set it to 1"
        )
    if devices.sleep_after_s is not None:
        raise InvalidSetup(
            f"replicas.sleep_after_s: {config.model.path} is an encoder, which keeps its weights; set no sleep_after_s"
        )
    num_threads = config.model.num_threads or num_cores()
    torch.set_num_threads(num_threads)
    with refusing_to_run_short("the weights", "Serve a smaller model, or set model.dtype: bfloat16"):
        model = load_encoder(config.model, location)
    logger.info("%s on %s in %s, threads: %d; an encoder, without KV memory",
                config.model.path, model.device, model.dtype, num_threads)  # fmt: skip
    return assemble_recorded(config, num_blocks=0, runner=model.runner, facts=model.facts)


def _start_ranks(config: EngineConfig, devices: Devices) -> Ranks:
    import torch

    from app.model.description import read_config
    from app.model.loader import device_of
    from app.model.parallel.ranks import Ranks, cards, check_cards, check_heads

    check_heads(read_config(config.model, resolve_model_path(config.model.path)), devices.tensor_parallel)
    device = device_of(config.model)
    if device.type == "cuda":
        check_cards(cards(), devices.tensor_parallel)
    own, size = os.getpid(), devices.tensor_parallel

    def start(descriptor: int) -> subprocess.Popen[bytes]:
        command = child_command("app.rank", str(descriptor), str(own))
        return subprocess.Popen(command, env=child_environment(), pass_fds=[descriptor], stdin=subprocess.DEVNULL)

    return Ranks(
        size=size,
        device=torch.device("cuda", 0) if device.type == "cuda" else device,
        settings={"config": config.model_dump(mode="json")},
        start=start,
        step_timeout_s=devices.step_timeout_s,
    )


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """A model, and what runs its steps."""

    model: LoadedModel
    runner: TorchModelRunner | GraphModelRunner
    num_blocks: int  # of its KV memory
    draft: LoadedRunner | None = None  # the draft model, with as many


def load_runner(config: EngineConfig, *, gpu_share: float = 1.0, group: RankGroup | None = None) -> LoadedRunner:
    """Load the model, or one rank's part of it, and its draft model, and size the KV memory of both.

    All ranks of a group call it.
    """
    from app.model.kv_cache import block_bytes, num_blocks_that_fit

    model, of_draft = _load_model(config, group), _of_draft_model(config)
    draft = None if of_draft is None else _load_model(of_draft, None)
    is_measured = model.device.type == "cuda" and config.cache.num_blocks is None
    num_blocks = num_blocks_that_fit(
        config.cache,
        model.layers,
        dtype=model.dtype,
        gpu_bytes=_gpu_bytes_for_kv(config, model, gpu_share) if is_measured else None,
        draft_bytes=0 if draft is None else block_bytes(config.cache, draft.layers, dtype=draft.dtype),
    )
    if group is not None:
        num_blocks = group.minimum(num_blocks)
    loaded = LoadedRunner(model, _with_kv_memory(config, model, num_blocks, group), num_blocks)
    if of_draft is None or draft is None:
        return loaded
    return replace(loaded, draft=LoadedRunner(draft, _with_kv_memory(of_draft, draft, num_blocks, None), num_blocks))


def _num_threads(config: EngineConfig, group: RankGroup | None) -> int:
    return config.model.num_threads or max(1, num_cores() // (1 if group is None else group.size))


def _load_model(config: EngineConfig, group: RankGroup | None) -> LoadedModel:
    import torch

    from app.model.backends import check_kv_device
    from app.model.loader import device_of, load_model
    from app.model.memory import refusing_to_run_short

    device = device_of(config.model)
    if device.type != "cpu":
        _refuse_draft_model(config, f"{config.model.path} runs on {device.type}")
    torch.set_num_threads(_num_threads(config, group))
    check_kv_device(config, device)
    with refusing_to_run_short("the weights", "Serve a smaller model, or set model.dtype: bfloat16"):
        return load_model(
            config.model,
            resolve_model_path(config.model.path),
            block_size=config.cache.block_size,
            checks=cache_folder(),
            group=group,
        )


def _with_kv_memory(
    config: EngineConfig, model: LoadedModel, num_blocks: int, group: RankGroup | None
) -> TorchModelRunner | GraphModelRunner:
    from app.model.backends import build_runner

    num_threads = _num_threads(config, group)
    logger.info(
        "%s on %s in %s%s%s, threads: %d, %d KV blocks of %d tokens",
        config.model.path, model.device, model.dtype,
        "" if config.model.quantization == "none" else f", weights in {config.model.quantization}",
        "" if config.cache.dtype == "auto" else f", KV memory in {config.cache.dtype}",
        num_threads, num_blocks, config.cache.block_size,
    )  # fmt: skip
    return build_runner(config, model, num_blocks=num_blocks, num_threads=num_threads)


def _gpu_bytes_for_kv(config: EngineConfig, model: LoadedModel, gpu_share: float) -> int:
    """What weights, the largest step and everything else leave of the engine's share of its GPU."""
    from app.model.kv_cache import block_bytes
    from app.model.largest_step import needs_of
    from app.model.memory import gpu_memory, refusing_to_run_short

    limits, block_size = config.scheduler, config.cache.block_size
    fix = (
        f"Lower scheduler.max_step_tokens ({limits.max_step_tokens:,}) or scheduler.max_running ({limits.max_running})"
    )
    with refusing_to_run_short("the weights and a step of the largest size", fix):
        needs = needs_of(config, model, largest_batch(limits, model.facts, block_size=block_size))
    gpu = gpu_memory(model.device, fraction=config.cache.gpu_memory_fraction, share=gpu_share)
    gpu.check(needs, block_bytes=block_bytes(config.cache, model.layers, dtype=model.dtype))
    left = gpu.left_for_kv(needs)
    logger.info("GPU memory: %.2f GiB granted of %.2f; %s; KV %.2f GiB",
                gpu.granted / GIB, gpu.total / GIB, needs, left / GIB)  # fmt: skip
    return left


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMemory:
    """What a replica would take of memory, in bytes, and what its KV memory consists of."""

    needs: MemoryNeeds
    block_bytes: int
    block_size: int
    context: int  # tokens of the longest sequence
    dtype: str  # of weights and KV memory that are not quantised

    @property
    def sequence_bytes(self) -> int:
        """KV memory of a sequence of the whole context."""
        return -(-self.context // self.block_size) * self.block_bytes

    def beside(self, draft: PlannedMemory) -> PlannedMemory:
        """With a draft model, which has KV memory in as many blocks."""
        needs = replace(
            self.needs, weights=self.needs.weights + draft.needs.weights, step=self.needs.step + draft.needs.step
        )
        return replace(self, needs=needs, block_bytes=self.block_bytes + draft.block_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAdapters:
    """LoRA adapters that a replica has loaded, of every linear layer that can be adapted."""

    number: int = 0
    rank: int = 16


def planned_cpu_memory(config: EngineConfig, adapters: PlannedAdapters = PlannedAdapters()) -> PlannedMemory:
    """The sizes of a replica on a CPU like this machine's, from the model's config.json alone.

    Raises:
        InvalidSetup: there is no such model, nothing says how long its context is, or adapters have too high a rank.
        UnsupportedModel: it cannot be served, or the native decoder does not compute it.
    """
    from app.model.adapters import MAX_RANK

    if adapters.rank > MAX_RANK:
        raise InvalidSetup(f"adapters of rank {adapters.rank}: at most {MAX_RANK} is computed")
    planned, of_draft = _planned_by_config(config, adapters), _of_draft_model(config)
    return planned if of_draft is None else planned.beside(_planned_by_config(of_draft))


def _planned_by_config(config: EngineConfig, adapters: PlannedAdapters = PlannedAdapters()) -> PlannedMemory:
    """The sizes of the model itself."""
    from app.model.cpu.adapters import AdaptedModel
    from app.model.loader import dtype_of, model_of_config

    location, block_size = resolve_model_path(config.model.path), config.cache.block_size
    dtype = dtype_of(config.model, location).dtype
    model = model_of_config(config.model, location, dtype=dtype, native_block_size=block_size)
    planned = _planned_of_native(config, model)
    assert model.native is not None, "planned above"
    loaded = adapters.number * AdaptedModel.of(model.native).adapter_bytes(adapters.rank)
    return replace(planned, needs=replace(planned.needs, adapters=loaded))


def _planned_of_native(config: EngineConfig, model: LoadedModel) -> PlannedMemory:
    from app.model.kv_cache import block_bytes
    from app.model.largest_step import needs_of_native

    block_size = config.cache.block_size
    return PlannedMemory(
        needs=needs_of_native(model, largest_batch(config.scheduler, model.facts, block_size=block_size)),
        block_bytes=block_bytes(config.cache, model.layers, dtype=model.dtype),
        block_size=block_size,
        context=model.facts.max_model_len,
        dtype=str(model.dtype).removeprefix("torch."),
    )


def planned_memory(config: EngineConfig, *, num_ranks: int = 1) -> PlannedMemory:
    """The same sizes as those of a replica, or of each of its ranks, at its start, from the model's config.json alone.
    Needs no GPU.

    Raises:
        InvalidSetup: there is no such model, nothing says how long its context is, or the ranks cannot share it.
        UnsupportedModel: it cannot be served, or its sizes do not follow from its configuration.
    """
    import torch

    from app.model.kv_cache import block_bytes
    from app.model.largest_step import needs_of
    from app.model.loader import model_of_config

    dtype = torch.float32 if config.model.dtype == "float32" else torch.bfloat16
    model = model_of_config(config.model, resolve_model_path(config.model.path), dtype=dtype, num_ranks=num_ranks)
    block_size = config.cache.block_size
    try:
        needs = needs_of(config, model, largest_batch(config.scheduler, model.facts, block_size=block_size))
    except RuntimeError as error:  # of an operator that the meta device does not have
        raise UnsupportedModel(f"{config.model.path} cannot be planned in {dtype}: {described(error)}") from error
    return PlannedMemory(
        needs=needs,
        block_bytes=block_bytes(config.cache, model.layers, dtype=dtype),
        block_size=block_size,
        context=model.facts.max_model_len,
        dtype=str(dtype).removeprefix("torch."),
    )


def _build_simulated(config: EngineConfig) -> Engine:
    """Without torch: a simulated replica starts in a moment and is small."""
    _refuse_draft_model(config, f"{config.model.path} is simulated")
    from app.model.description import read_description
    from app.model.simulated import SimulatedCosts, SimulatedModelRunner, num_simulated_blocks

    assert config.model.simulated is not None, "only a configured simulation is built"
    costs = SimulatedCosts.model_validate(config.model.simulated)
    model = read_description(config.model, resolve_model_path(config.model.path))
    num_blocks = num_simulated_blocks(config, model.facts)
    logger.info("%s is simulated: %s; %d KV blocks of %d tokens",
                config.model.path, costs, num_blocks, config.cache.block_size)  # fmt: skip
    runner = SimulatedModelRunner(
        costs,
        text_token_ids=model.text_token_ids,
        eos_token_ids=model.facts.eos_token_ids,
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
    )
    return assemble_recorded(
        config, num_blocks=num_blocks, runner=runner, facts=model.facts, drafter=drafter_of(config.speculation)
    )


def assemble_recorded(
    config: EngineConfig,
    *,
    num_blocks: int,
    runner: ModelRunner,
    facts: ModelInfo,
    largest_step: SchedulerConfig | None = None,
    adapters: AdapterStore | None = None,
    drafter: Drafter | None = None,
) -> Engine:
    """As `assemble`, with the step log that the config asks for. Raises InvalidSetup when it cannot be written."""
    return assemble(
        config.scheduler,
        config.cache,
        num_blocks=num_blocks,
        runner=runner,
        facts=facts,
        recorder=recorder_of(config, runner=runner, facts=facts, num_blocks=num_blocks),
        largest_step=largest_step,
        adapters=adapters,
        drafter=drafter,
    )


def drafter_of(settings: SpeculationConfig) -> Drafter | None:
    """What drafts without a draft model by these settings; None: nothing."""
    return LookupDrafter() if settings.method == "lookup" else None


def assemble(
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    *,
    num_blocks: int,
    runner: ModelRunner,
    facts: ModelInfo,
    clock: Callable[[], float] = time.monotonic,
    largest_step: SchedulerConfig | None = None,
    recorder: StepObserver | None = None,
    adapters: AdapterStore | None = None,
    drafter: Drafter | None = None,
) -> Engine:
    """An engine around any model runner. Requests are limited to what fits into the pool alone, if it has KV memory.

    Where the runner can launch steps, the engine prepares each while the one before it is computed. It speculates
    nothing then: the tokens that a draft follows would have to be known.
    """
    if facts.generates:
        pool = BlockPool(num_blocks=num_blocks, block_size=cache.block_size, prefix_caching=cache.prefix_caching)
        facts = replace(facts, max_model_len=min(facts.max_model_len, num_blocks * cache.block_size))
    else:
        pool = NoBlocks(max_model_len=facts.max_model_len)
    deciding = Scheduler(
        config=scheduler,
        pool=pool,
        eos_token_ids=facts.eos_token_ids,
        takes_whole_prompts=not facts.generates,
        drafter=None if runner.launches else drafter,
    )
    build: Callable[..., Engine] = OverlappedEngine if runner.launches else Engine
    return build(
        scheduler=deciding,
        runner=runner,
        facts=facts,
        clock=clock,
        largest_step=largest_step,
        recorder=recorder,
        adapters=adapters,
    )


def recorder_of(config: EngineConfig, *, runner: ModelRunner, facts: ModelInfo, num_blocks: int) -> StepRecorder | None:
    """The receiver of the engine's steps: a step log if the settings name a folder.

    Raises:
        InvalidSetup: that folder cannot be written.
    """
    settings = config.step_log
    if settings.path is None:
        return None
    header = log_header(config, runner=runner, facts=facts, num_blocks=num_blocks)
    folder = Path(settings.path).expanduser()
    # Files of a step log: with so many, a full log loses a sixteenth of its past when a new file begins.
    num_log_files = 16
    file_bytes = settings.max_megabytes * 1_000_000 // num_log_files
    files = LogFiles(folder, run=header.run, file_bytes=file_bytes, max_files=num_log_files)
    try:
        log = StepLog(files, header, redactor=None if settings.record_prompts else Redactor(config.cache.block_size))
    except OSError as error:
        raise InvalidSetup(f"step_log.path: got {settings.path}; it cannot be written: {error}") from error
    logger.info("every step is recorded in %s", folder)
    return StepRecorder(log.put, log.close)


def log_header(config: EngineConfig, *, runner: ModelRunner, facts: ModelInfo, num_blocks: int) -> Header:
    """What a step log begins with: all that is needed to build such an engine again, and to tell how it differs."""
    began = datetime.now(UTC)
    return Header(
        run=f"{began:%Y%m%dT%H%M%S}-{uuid4().hex[:8]}",
        began=began.isoformat(timespec="seconds"),
        launches_ahead=runner.launches,
        num_blocks=num_blocks,
        facts=asdict(facts),
        config=config.model_dump(mode="json"),
        versions=versions(),
        commit=commit(),
        settings=config.scheduler.version,
    )


def _places(path: str) -> tuple[Path, Path]:
    """What a path of the settings may mean: seen from the working directory, or from the project."""
    return Path(path).expanduser(), PROJECT / path


def _folder_seen_from_here(path: str) -> str:
    """The folder of that path; else the path itself, a hub id."""
    # Not Path.is_dir, which raises OSError for a name that is too long.
    return next((str(place) for place in _places(path) if os.path.isdir(place)), path)


def resolve_model_path(path: str) -> str:
    """Where a model lies: a folder seen from the working directory or from the project; else `path`, a hub id.

    Of a GGUF file, the folder that is made of it, which takes seconds to minutes the first time.

    Raises:
        InvalidSetup: there is no such file, or it cannot be read.
        UnsupportedModel: something in the file cannot be read; the message names it.
    """
    for place in _places(path):
        if place.is_dir():
            return str(place.resolve())
        if place.is_file():
            from app.model.gguf.checkpoint import checkpoint_of

            return str(checkpoint_of(place.resolve(), cache_folder() / "models"))
    if path.endswith(".gguf"):
        raise InvalidSetup(f"model.path: got {path!r}; there is no such file here")
    return path
