"""An engine from a config; the only place that knows the engine and the model.

The model room is imported when an engine is built, so that a process that only wants to know where a model lies does
not load torch.
"""

from __future__ import annotations

import filecmp
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
from app.engine.device_lease import DeviceLease
from app.engine.engine import Engine
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
from app.errors import InvalidSetup
from app.model.location import resolve_model_path
from app.versions import commit, versions

if TYPE_CHECKING:
    from app.model.loader import LoadedRunner
    from app.model.parallel.ranks import Ranks

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
        """The devices of one replica."""
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
    lease = _lease_of(config, devices)
    lease.wait()
    try:
        began_at = time.monotonic()
        engine = build_sync_engine(config, devices)
        started_in_s = time.monotonic() - began_at
        sleeper = SleepController(engine, lease, after_s=devices.sleep_after_s, started_in_s=started_in_s)
        return _in_a_thread(config, engine, sleeper)
    except BaseException:
        lease.close()
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


def _lease_of(config: EngineConfig, devices: Devices) -> DeviceLease:
    """The engine's part in the turns of its device.

    Raises:
        InvalidSetup: it needs more than there is, or this model cannot sleep.
        UnsupportedModel: it cannot be served.
    """
    if config.model.simulated is None:
        from app.model.planned_memory import memory_to_sleep

        device, total_bytes, needed_bytes = memory_to_sleep(config)
    else:
        from app.model.simulated import SimulatedCosts

        costs = SimulatedCosts.model_validate(config.model.simulated)
        device, total_bytes, needed_bytes = "simulated", GIB * 1024, int(costs.memory_gib * GIB)
    if devices.memory_gib is not None:
        total_bytes = int(devices.memory_gib * GIB)
    return DeviceLease(
        cache_folder() / "devices" / f"{socket.gethostname()}-{device}.json",
        name=config.model.path,
        num_bytes=total_bytes if needed_bytes is None else needed_bytes,
        total_bytes=total_bytes,
    )


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
    from app.model.device import device_of
    from app.model.loader import load_runner
    from app.model.ways.encoder import is_encoder

    location = resolve_model_path(config.model.path)
    if is_encoder(config.model, location):
        return _build_encoder(config, devices, location)
    device = device_of(config.model)
    if device.type != "cpu":
        _refuse_draft_model(config, f"{config.model.path} runs on {device.type}")
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
    of_draft = config.of_draft_model
    assert of_draft is not None, "it was loaded with these settings"
    _check_tokens(config.model, of_draft.model, facts, draft.model.facts)
    return ModelDrafter(
        _runner_of(of_draft, draft, devices),
        max_model_len=draft.model.facts.max_model_len,
        facts=facts,
    )


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
    if devices.sleep_after_s is None:
        return loaded.runner
    from app.model.reloading import runner_that_sleeps

    return runner_that_sleeps(config, loaded)


def _adapters_of(config: EngineConfig, runner: ModelRunner) -> AdapterStore | None:
    """None where the runner computes with no adapters."""
    if not runner.adapts:
        return None
    from app.model.adapter_files import another_base, check_digest, folder_of_adapter, names_in_config

    model = config.model
    served = (model.path, *names_in_config(resolve_model_path(model.path)))

    def load(adapter: Adapter, make_room: Callable[[], None]) -> object:
        folder = folder_of_adapter(adapter)

        def check_and_make_room() -> None:
            check_digest(adapter, folder)  # after they were read: the files may be replaced at any moment
            difference = another_base(folder, served, model.revision)
            if difference is not None:
                logger.warning("the adapter %s fits by its sizes, but %s", adapter.name, difference)
            make_room()

        return runner.load_adapter(folder, check_and_make_room)

    max_loaded = model.max_loaded_adapters or MAX_LOADED_ADAPTERS
    return AdapterStore(load, unload=runner.unload_adapter, max_loaded=max_loaded)


def _build_encoder(config: EngineConfig, devices: Devices, location: str) -> Engine:
    import torch

    from app.model.memory import refusing_to_run_short
    from app.model.ways.encoder import load_encoder

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
    from app.model.device import device_of
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
    facts = replace(model.facts, embedding_size=costs.embedding_size or None)
    return assemble_recorded(
        config, num_blocks=num_blocks, runner=runner, facts=facts, drafter=drafter_of(config.speculation)
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
    scheduler_class: type[Scheduler] = Scheduler,
    engine_class: type[Engine] | None = None,
) -> Engine:
    """An engine around any model runner. Requests are limited to what fits into the pool alone, if it has KV memory.

    Where the runner can launch steps, the engine prepares each while the one before it is computed. It speculates
    nothing then: the tokens that a draft follows would have to be known.
    """
    if facts.generates:
        pool = BlockPool(num_blocks=num_blocks, block_size=cache.block_size)
        facts = replace(facts, max_model_len=min(facts.max_model_len, num_blocks * cache.block_size))
    else:
        pool = NoBlocks(max_model_len=facts.max_model_len)
    deciding = scheduler_class(
        config=scheduler,
        pool=pool,
        eos_token_ids=facts.eos_token_ids,
        takes_whole_prompts=not facts.generates,
        drafter=None if runner.launches else drafter,
    )
    build: Callable[..., Engine] = engine_class or (OverlappedEngine if runner.launches else Engine)
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
