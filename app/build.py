"""Builds an engine from a config. This is the only module that imports both the engine and the model.

`app.model` is only imported when an engine is built, to avoid loading torch in processes that only need a model's
location.
"""

from __future__ import annotations

import filecmp
import logging
import os
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.child_process import child_command, child_environment
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
from app.cores import num_cores
from app.disk import cache_folder
from app.engine.adapter_store import AdapterStore
from app.engine.async_engine import AsyncEngine
from app.engine.block_pool import BlockPool, NoBlocks
from app.engine.block_store import BlockStore
from app.engine.device_lease import DeviceLease
from app.engine.engine import Engine
from app.engine.matcher import Matchers
from app.engine.model_runner import ModelRunner
from app.engine.observer import StepObserver
from app.engine.request import Adapter, ModelInfo
from app.engine.scheduler import Scheduler
from app.engine.sleep_controller import SleepController
from app.engine.speculation.draft_model import ModelDrafter
from app.engine.speculation.drafter import Drafter, LookupDrafter
from app.engine.trace.step_log import recorder_of
from app.errors import InvalidSetup
from app.kv_tiers.tier_store import TierStore, open_folder
from app.model.location import resolve_model_path

if TYPE_CHECKING:
    from app.model.loader import LoadedRunner
    from app.model.parallel.ranks import Ranks

logger = logging.getLogger(__name__)


ONE_DEVICE = ReplicasConfig(num_replicas=1)


def build_engine(config: EngineConfig, replicas: ReplicasConfig = ONE_DEVICE) -> AsyncEngine:
    """Load the model, size its KV memory and start the engine's thread. Takes seconds to minutes.

    If `sleep_after_s` is set, first waits until other engines on the device have released enough memory.

    Raises:
        InvalidSetup: this machine cannot run the configuration.
        UnsupportedModel: the model cannot be served; the message explains why.
    """
    if replicas.sleep_after_s is None:
        return _start_engine(config, build_sync_engine(config, replicas))
    lease = _lease_of(config, replicas)
    lease.wait()
    try:
        began_at = time.monotonic()
        engine = build_sync_engine(config, replicas)
        startup_s = time.monotonic() - began_at
        sleeper = SleepController(engine, lease, after_s=replicas.sleep_after_s, startup_s=startup_s)
        return _start_engine(config, engine, sleeper)
    except BaseException:
        lease.close()
        raise


def _start_engine(config: EngineConfig, engine: Engine, sleeper: SleepController | None = None) -> AsyncEngine:
    # `scheduler.max_waiting` limits how many requests wait on a replica. This limits the memory that long prompts take
    # to 32 MB of token ids, which are minutes of prefill even on a GPU.
    max_waiting_tokens = 1_000_000
    return AsyncEngine(
        engine,
        max_requests=config.scheduler.max_requests,
        max_waiting_tokens=max_waiting_tokens,
        matchers=build_matchers(config, engine.model_info),
        sleeper=sleeper,
    )


def _lease_of(config: EngineConfig, replicas: ReplicasConfig) -> DeviceLease:
    """Return the lease through which engines that sleep share a device's memory.

    Raises:
        InvalidSetup: the engine needs more memory than the device has, or the model cannot sleep.
        UnsupportedModel: the model cannot be served.
    """
    if config.model.simulated is None:
        from app.model.device import device_of
        from app.model.planned_memory import memory_to_sleep

        has_peers = _has_peers(replicas, device_of(config.model).type)
        device, total_bytes, needed_bytes = memory_to_sleep(config, has_peers=has_peers)
    else:
        from app.model.simulated import SimulatedCosts

        costs = SimulatedCosts.model_validate(config.model.simulated)
        device, total_bytes, needed_bytes = "simulated", GIB * 1024, int(costs.memory_gib * GIB)
    if replicas.device_memory_gib is not None:
        total_bytes = int(replicas.device_memory_gib * GIB)
    return DeviceLease(
        cache_folder() / "devices" / f"{socket.gethostname()}-{device}.json",
        name=config.model.path,
        num_bytes=total_bytes if needed_bytes is None else needed_bytes,
        total_bytes=total_bytes,
    )


def build_matchers(config: EngineConfig, model_info: ModelInfo) -> Matchers:
    """Return a factory for matchers. The tokenizer is only read by `prepare` or for the first grammar."""
    from app.grammar.grammars import Grammars
    from app.grammar.vocabulary import read_vocabulary

    model = config.model
    return Grammars(
        lambda: read_vocabulary(
            resolve_model_path(model.path),
            model.revision,
            vocab_size=model_info.vocab_size,
            eos_token_ids=model_info.eos_token_ids,
        ),
    )


def build_sync_engine(
    config: EngineConfig, replicas: ReplicasConfig = ONE_DEVICE, *, keeps_all: bool = False
) -> Engine:
    """Build an engine without a thread, for callers that run each step themselves.

    keeps_all: whether layers with a sliding window keep the blocks that have left the window.
    """
    if config.model.simulated is not None:
        return _build_simulated(config)
    return _build_torch(config, replicas, keeps_all=keeps_all)


def _build_torch(config: EngineConfig, replicas: ReplicasConfig, *, keeps_all: bool) -> Engine:
    from app.model.description import is_encoder, sentence_settings
    from app.model.device import device_of
    from app.model.loader import load_runner

    location = resolve_model_path(config.model.path)
    if is_encoder(config.model, location):
        return _build_encoder(config, replicas, location)
    device = device_of(config.model)
    if device.type != "cpu":
        _refuse_draft_model(config, f"{config.model.path} runs on {device.type}")
    if replicas.tensor_parallel == 1:
        # Engines that sleep take turns, so each may use all of the memory during its turn.
        loaded = load_runner(
            config,
            gpu_share=replicas.gpu_share if replicas.sleep_after_s is None else 1.0,
            keeps_all=keeps_all or bool(config.cache.tiers) or _has_peers(replicas, device.type),
        )
    else:
        _refuse_draft_model(config, f"replicas.tensor_parallel is {replicas.tensor_parallel}")
        ranks = _start_ranks(config, replicas)
        with ranks.loading():
            loaded = load_runner(config, group=ranks.group)
        loaded.runner.lead(ranks)
    sentences = sentence_settings(config.model, location)
    _check_drafts(config, loaded)
    runner = _runner_of(config, loaded, replicas)
    model_info = replace(loaded.model.model_info, pooling=sentences.pooling)
    store = _store_of(config, replicas, loaded, runner)
    return assemble(
        config.scheduler,
        config.cache,
        num_blocks=loaded.num_blocks,
        runner=runner,
        model_info=model_info,
        recorder=recorder_of(config, runner=runner, model_info=model_info, num_blocks=loaded.num_blocks),
        adapters=_adapters_of(config, runner),
        drafter=(
            drafter_of(config.speculation)
            if loaded.draft is None
            else _model_drafter(config, loaded.model.model_info, loaded.draft, replicas)
        ),
        # On a GPU, KV memory gets the memory that the largest step leaves free.
        largest_step=config.scheduler if loaded.model.device.type == "cuda" else None,
        store=store,
    )


def _check_drafts(config: EngineConfig, loaded: LoadedRunner) -> None:
    """Raise InvalidSetup if the draft model has recurrent layers."""
    of_draft = config.draft_model_config
    if of_draft is not None and loaded.draft is not None and loaded.draft.model.states:
        _refuse_draft_model(config, f"the draft model {of_draft.model.path} has recurrent layers")


def _has_peers(replicas: ReplicasConfig, device_type: str) -> bool:
    """Whether the settings let replicas fetch KV blocks from one another."""
    fetches = replicas.fetch_prefixes
    if fetches is None:
        fetches = device_type == "cpu" or replicas.prefill_replicas is not None
    return fetches and replicas.max_replicas > 1


def _store_of(
    config: EngineConfig, replicas: ReplicasConfig, loaded: LoadedRunner, runner: ModelRunner
) -> BlockStore | None:
    """Return the store that finds prefixes in a folder or on other replicas, or None if neither is configured.

    If the runner's KV memory cannot be copied, logs the reason and returns None, but raises InvalidSetup if
    `prefill_replicas` is set, because replicas with roles need a store.
    """
    tiers, has_peers = config.cache.tiers, _has_peers(replicas, loaded.model.device.type)
    if not (tiers or has_peers):
        return None
    memory = runner.kv_memory()
    if memory is None:
        reason = _why_not_copyable(loaded, replicas)
        if replicas.prefill_replicas is not None:
            raise InvalidSetup(
                f"replicas.prefill_replicas: replicas for prefill and decode fetch KV blocks from one another, which "
                f"is not possible here: {reason}; remove replicas.prefill_replicas"
            )
        level = logging.WARNING if tiers else logging.INFO
        logger.log(level, "prefixes are neither stored in a folder nor fetched from other replicas: %s", reason)
        return None
    namespace = loaded.model.kv_namespace(loaded.config)
    snapshot_bytes = 0 if memory.states is None else memory.states.block_bytes
    folder = None
    if tiers:
        folder = open_folder(
            tiers[0], namespace=namespace, block_bytes=memory.block_bytes, snapshot_bytes=snapshot_bytes
        )
    if folder is None and not has_peers:
        return None
    return TierStore(folder, runner.kv_memory, namespace=namespace)


def _why_not_copyable(loaded: LoadedRunner, replicas: ReplicasConfig) -> str:
    """Return the reason why the runner's KV memory cannot be copied."""
    if replicas.tensor_parallel > 1:
        return f"replicas.tensor_parallel is {replicas.tensor_parallel}, but the KV memory must be in one process"
    if not loaded.model.layers:
        return "the model has only recurrent layers, so its blocks have no content"
    if loaded.model.states:
        return "the states of recurrent layers cannot be copied from a GPU, and blocks are useless without a state"
    return f"blocks cannot be copied on {loaded.model.device.type}"


def _model_drafter(
    config: EngineConfig, model_info: ModelInfo, draft: LoadedRunner, replicas: ReplicasConfig
) -> ModelDrafter:
    """Return a drafter for the model that `model_info` describes. Raises InvalidSetup if the models' tokens differ."""
    of_draft = config.draft_model_config
    assert of_draft is not None, "the draft model was loaded with these settings"
    _check_tokens(config.model, of_draft.model, model_info, draft.model.model_info)
    return ModelDrafter(
        _runner_of(of_draft, draft, replicas),
        max_model_len=draft.model.model_info.max_model_len,
        model_info=model_info,
    )


def _check_tokens(model: ModelConfig, draft: ModelConfig, model_info: ModelInfo, of_draft: ModelInfo) -> None:
    """Raise InvalidSetup if a token differs between the models. Takes seconds if the tokenizer files differ."""
    from app.grammar.vocabulary import read_vocabulary

    fix = f"choose a draft model from the same family as {model.path}, or another speculation.method"
    number, of_draft_number = model_info.vocab_size, of_draft.vocab_size
    if number != of_draft_number:
        raise InvalidSetup(
            f"speculation.model: {draft.path} has {of_draft_number:,} tokens, but {model.path} has {number:,}, and "
            f"both models need the same tokens; {fix}"
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
            f"speculation.model: {len(others):,} of the {number:,} tokens in {draft.path} differ from those in "
            f"{model.path}; the first one is id {first}: {theirs[first]!r} instead of {ours[first]!r}; {fix}"
        )


def _refuse_draft_model(config: EngineConfig, reason: str) -> None:
    """Raise InvalidSetup with this reason if a draft model is configured."""
    if config.speculation.model is not None:
        raise InvalidSetup(
            f"speculation.method is draft_model, but {reason}: a draft model only works with a decoder that runs in "
            f"one process on a CPU; set speculation.method to off"
        )


def _runner_of(config: EngineConfig, loaded: LoadedRunner, replicas: ReplicasConfig) -> ModelRunner:
    if replicas.sleep_after_s is None:
        return loaded.runner
    from app.model.reloading import runner_that_sleeps

    return runner_that_sleeps(config, loaded)


def _adapters_of(config: EngineConfig, runner: ModelRunner) -> AdapterStore | None:
    """Return the store of adapters, or None if the runner does not support adapters."""
    if not runner.adapts:
        return None
    from app.model.adapter_files import another_base, check_digest, folder_of_adapter, names_in_config

    model = config.model
    served = (model.path, *names_in_config(resolve_model_path(model.path)))

    def load(adapter: Adapter, make_room: Callable[[], None]) -> object:
        folder = folder_of_adapter(adapter)

        def check_and_make_room() -> None:
            check_digest(adapter, folder)  # must follow reading, because the files may be replaced at any time
            difference = another_base(folder, served, model.revision)
            if difference is not None:
                logger.warning("the adapter %s has the right sizes, but %s", adapter.name, difference)
            make_room()

        return runner.load_adapter(folder, check_and_make_room)

    max_loaded = model.max_loaded_adapters or MAX_LOADED_ADAPTERS
    return AdapterStore(load, unload=runner.unload_adapter, max_loaded=max_loaded)


def _build_encoder(config: EngineConfig, replicas: ReplicasConfig, location: str) -> Engine:
    import torch

    from app.model.implementations.encoder import load_encoder
    from app.model.memory import loading_weights

    _refuse_draft_model(config, f"{config.model.path} is an encoder")
    if replicas.tensor_parallel > 1:
        raise InvalidSetup(
            f"replicas.tensor_parallel is {replicas.tensor_parallel}, but {config.model.path} is an encoder, which "
            f"cannot be divided; set replicas.tensor_parallel to 1"
        )
    if replicas.sleep_after_s is not None:
        raise InvalidSetup(
            f"replicas.sleep_after_s: {config.model.path} is an encoder, which cannot sleep; remove the setting"
        )
    num_threads = config.model.num_threads or num_cores()
    torch.set_num_threads(num_threads)
    with loading_weights():
        model = load_encoder(config.model, location)
    logger.info("%s is loaded on %s in %s, with %d threads; it is an encoder, without KV memory",
                config.model.path, model.device, model.dtype, num_threads)  # fmt: skip
    recorder = recorder_of(config, runner=model.runner, model_info=model.model_info, num_blocks=0)
    return assemble(
        config.scheduler,
        config.cache,
        num_blocks=0,
        runner=model.runner,
        model_info=model.model_info,
        recorder=recorder,
    )


def _start_ranks(config: EngineConfig, replicas: ReplicasConfig) -> Ranks:
    import torch

    from app.model.description import read_config
    from app.model.device import device_of
    from app.model.parallel.ranks import Ranks, cards, check_cards, check_heads

    check_heads(read_config(config.model, resolve_model_path(config.model.path)), replicas.tensor_parallel)
    device = device_of(config.model)
    if device.type == "cuda":
        check_cards(cards(), replicas.tensor_parallel)
    own, size = os.getpid(), replicas.tensor_parallel

    def start(descriptor: int) -> subprocess.Popen[bytes]:
        command = child_command("app.rank", str(descriptor), str(own))
        return subprocess.Popen(command, env=child_environment(), pass_fds=[descriptor], stdin=subprocess.DEVNULL)

    return Ranks(
        size=size,
        device=torch.device("cuda", 0) if device.type == "cuda" else device,
        settings={"config": config.model_dump(mode="json")},
        start=start,
        step_timeout_s=replicas.step_timeout_s,
    )


def _build_simulated(config: EngineConfig) -> Engine:
    """Build a simulated engine without importing torch, so that simulated replicas start fast and stay small."""
    _refuse_draft_model(config, f"{config.model.path} is simulated")
    from app.model.description import read_description
    from app.model.simulated import SimulatedCosts, SimulatedModelRunner, num_simulated_blocks

    assert config.model.simulated is not None, "only a configured simulation is built"
    costs = SimulatedCosts.model_validate(config.model.simulated)
    model = read_description(config.model, resolve_model_path(config.model.path))
    num_blocks = num_simulated_blocks(config, model.model_info)
    logger.info("%s is simulated: %s, with %d KV blocks of %d tokens",
                config.model.path, costs, num_blocks, config.cache.block_size)  # fmt: skip
    runner = SimulatedModelRunner(
        costs,
        text_token_ids=model.text_token_ids,
        eos_token_ids=model.model_info.eos_token_ids,
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
    )
    model_info = replace(
        model.model_info,
        embedding_size=costs.embedding_size or None,
        num_state_slots=costs.num_state_slots,
        state_interval_tokens=16 * config.cache.block_size,
    )
    return assemble(
        config.scheduler,
        config.cache,
        num_blocks=num_blocks,
        runner=runner,
        model_info=model_info,
        recorder=recorder_of(config, runner=runner, model_info=model_info, num_blocks=num_blocks),
        drafter=drafter_of(config.speculation),
    )


def drafter_of(settings: SpeculationConfig) -> Drafter:
    """Return a drafter without a draft model, for all requests or only for requests with a prediction."""
    return LookupDrafter(only_predictions=settings.method != "lookup")


def assemble(
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    *,
    num_blocks: int,
    runner: ModelRunner,
    model_info: ModelInfo,
    clock: Callable[[], float] = time.monotonic,
    largest_step: SchedulerConfig | None = None,
    recorder: StepObserver | None = None,
    adapters: AdapterStore | None = None,
    drafter: Drafter | None = None,
    store: BlockStore | None = None,
    scheduler_class: type[Scheduler] = Scheduler,
    engine_class: type[Engine] = Engine,
) -> Engine:
    """Return an engine for any model runner. Lowers `max_model_len` if the KV memory cannot hold such a request."""
    if model_info.generates:
        pool = BlockPool.of(model_info, scheduler, num_blocks=num_blocks, block_size=cache.block_size)
        model_info = replace(model_info, max_model_len=min(model_info.max_model_len, pool.max_sequence_tokens))
    else:
        pool = NoBlocks(max_model_len=model_info.max_model_len)
    if model_info.num_state_slots:
        assert not runner.launches, "with recurrent layers, steps cannot be launched ahead"
    deciding = scheduler_class(
        config=scheduler,
        pool=pool,
        eos_token_ids=model_info.eos_token_ids,
        computes_whole_prompts=not model_info.generates,
        drafter=drafter,
        store=store,
        launches_ahead=runner.launches,
    )
    return engine_class(
        scheduler=deciding,
        runner=runner,
        model_info=model_info,
        clock=clock,
        largest_step=largest_step,
        recorder=recorder,
        adapters=adapters,
    )
