"""An engine's statistics: gauges and counters for each step, and distributions, which are too large for each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from msgspec import structs

from app.config import SchedulerConfig
from app.engine.adapter_store import AdapterStats
from app.engine.batch import StepBatch
from app.engine.histogram import SECONDS, SMALL_NUMBERS, TOKENS, Distribution, Histogram
from app.engine.observer import EndedStep, StepObserver
from app.engine.request import EngineTimes
from app.engine.sequence import EngineSequence
from app.engine.tuner import Tuning

# Engines are compared by their speed in steps of this size, because speed depends on the size of the steps.
SPEED_STEP_TOKENS = 64


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Current values, and `total_*` counters since the engine started. A struct, because each step creates one."""

    strategy: str  # strategy and policy by their names in the config
    policy: str
    settings: str  # `SchedulerConfig.version` of all scheduling settings
    batch_size: int  # the strategy's current target for the batch size, or 0 if it does not form batches
    num_running: int
    num_waiting: int
    num_waiting_tokens: int  # prompt tokens of waiting requests
    num_waiting_foreground_tokens: int  # prompt tokens of waiting foreground requests
    num_background: int  # background requests, running and waiting
    num_unpreemptible_background: int  # running background requests in a whole batch, which cannot be preempted
    estimated_wait_s: float  # expected wait of a request that arrives now
    ended_per_s: float  # recently ended requests per second of computing, which is how fast the queue drains
    mean_length_error_tokens: float  # recent mean absolute error of predicted output lengths
    num_free_blocks: int  # blocks that could be allocated now, including cached blocks without an owner
    num_blocks: int
    block_size: int  # tokens
    max_running: int  # maximum number of requests in one step
    speed: float  # recent tokens per second in steps of `SPEED_STEP_TOKENS`; 0 while unknown
    total_steps: int
    total_prompt_tokens: int  # prompt tokens of admitted requests, including cached tokens
    total_cached_tokens: int  # prompt tokens of admitted requests that were found in the prefix cache
    total_generated_tokens: int
    total_preemptions: int
    total_memory_preemptions: int  # preemptions because a running sequence needed blocks
    total_finished: int  # requests that ended by stop or length
    total_aborted: int
    total_failed: int
    total_missed: int  # requests that were rejected or ended because of their deadline
    total_drafted_tokens: int = 0  # tokens computed as drafts
    total_accepted_tokens: int = 0  # drafted tokens that became part of an output
    num_layer_groups: int = 1  # groups of layers, each with its own blocks for a token (see `block_pool.py`)
    num_state_slots: int = 0  # slots for the states of recurrent layers (see `state_pool.py`)
    num_free_state_slots: int = 0  # slots available to new sequences, including those of unused snapshots
    total_unresumable_tokens: int = 0  # prompt tokens with cached keys and values, but no snapshot from which to resume


class SleepState(StrEnum):
    """Whether an engine's weights and KV memory are on the device."""

    AWAKE = "awake"
    ASLEEP = "asleep"
    QUEUED = "queued"  # the engine has requests, but other engines on its device hold the memory
    WAKING = "waking"


class ChosenBackend(NamedTuple):
    """The backend that runs a model on a GPU (`app/model/gpu_backends.py`)."""

    name: str
    failed: Mapping[str, str] = MappingProxyType({})  # backends that failed before this one was chosen, with reasons


class SleepStats(NamedTuple):
    """An engine's sleep state, with counts and times in seconds since it started."""

    state: SleepState = SleepState.AWAKE
    num_wakes: int = 0
    waking_s: float = 0.0  # total time spent waking up, excluding the wait for memory
    sleeping_s: float = 0.0  # total time spent releasing the memory, not the time asleep
    queued_s: float = 0.0  # total time spent waiting for memory
    num_turns_ended: int = 0  # how often it went to sleep with requests, because other engines needed the memory
    last_wake_s: float = 0.0  # duration of the last wake, or of startup before the first wake

    @property
    def expected_wake_s(self) -> float:
        """Expected seconds until the engine is awake, excluding the wait for other engines; 0 if it is awake."""
        return 0.0 if self.state is SleepState.AWAKE else self.last_wake_s


AWAKE = SleepStats()  # for an engine that never sleeps


class StoreStats(NamedTuple):
    """Counts of a store for KV blocks (`block_store.py`) since it was created."""

    num_fetched_tokens: int = 0  # tokens that were fetched instead of computed
    num_given_up: int = 0  # fetches that took longer than computing would have
    num_read: int = 0  # blocks read
    num_written: int = 0
    num_received: int = 0  # blocks received from other replicas
    num_sent: int = 0  # blocks sent to other replicas
    block_bytes: int = 0  # size of one block
    num_snapshots: tuple[int, int, int, int] = (0, 0, 0, 0)  # state snapshots: read, written, received, sent
    snapshot_bytes: int = 0  # size of one snapshot

    @property
    def bytes_moved(self) -> dict[str, int]:
        """Bytes of blocks and snapshots, by direction."""
        directions = ("read", "written", "received", "sent")
        blocks = (self.num_read, self.num_written, self.num_received, self.num_sent)
        return {
            direction: of_blocks * self.block_bytes + of_snapshots * self.snapshot_bytes
            for direction, of_blocks, of_snapshots in zip(directions, blocks, self.num_snapshots, strict=True)
        }


@dataclass(slots=True)
class Totals:
    """The `total_*` counters of `EngineStats`, which describes them."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    memory_preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    missed: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    unresumable_tokens: int = 0

    def exported(self) -> dict[str, int]:
        """Return the counters by their names in `EngineStats`."""
        return {exported: getattr(self, name) for exported, name in _EXPORTED}


_EXPORTED = tuple((f"total_{each.name}", each.name) for each in fields(Totals))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMeasurements:
    """Current values, and distributions since the engine started."""

    max_running: int  # maximum number of requests in one step
    block_size: int  # token slots in one block
    num_outstanding_tokens: int  # prompt and predicted output tokens that remain to be computed for all requests
    queue_s: Distribution  # from a request's arrival to its first step
    prefill_s: Distribution  # from a request's first step to its first token
    step_s: Distribution
    step_tokens: Distribution  # tokens in one step, including prompt chunks
    step_requests: Distribution  # requests in one step
    num_padding_tokens: int = 0  # tokens computed only as padding, because CUDA graphs exist only for a few sizes
    num_steps_without_graph: int = 0  # steps launched kernel by kernel
    backend: ChosenBackend | None = None  # None on a CPU
    tuning: Tuning | None = None  # the tuner's state; None without targets
    adapters: AdapterStats | None = None  # None if the model runner does not support adapters
    sleep: SleepStats | None = None  # None if the engine never sleeps
    store: StoreStats | None = None  # None if no blocks are stored outside the KV memory


class MeasurementCollector(StepObserver):
    """Fills the distributions of `EngineMeasurements`, and adds `times` to deltas. Cheap: a few bisections per step."""

    def __init__(self, *, settings: str) -> None:
        self._settings = settings  # the current `SchedulerConfig.version`
        self._queue_s = Histogram(SECONDS)
        self._prefill_s = Histogram(SECONDS)
        self._step_s = Histogram(SECONDS)
        self._step_tokens = Histogram(TOKENS)
        self._step_requests = Histogram(SMALL_NUMBERS)
        # The running sequences without a first token: (sequence, tokens generated elsewhere, time of joining).
        self._prefilling: list[tuple[EngineSequence, int, float]] = []

    def reconfigured(self, config: SchedulerConfig) -> None:
        self._settings = config.version

    def scheduled(self, batch: StepBatch) -> None:
        for sequence in batch.decision.joined:
            if sequence.num_preemptions == 0:  # a preempted sequence has already joined before
                self._queue_s.observe(batch.began_at - sequence.arrived_at)
                self._prefilling.append((sequence, sequence.num_generated_tokens, batch.began_at))

    def step_ended(self, step: EndedStep) -> None:
        """Measure a step. Adds `times` to the delta of each request that got its first token or ended without one."""
        if not step.batch:
            return
        self.note_step(
            step.seconds, num_tokens=step.batch.num_scheduled_tokens, num_sequences=len(step.batch.sequences)
        )
        if self._prefilling and (times := self._note_first_tokens(step.at)):
            step.deltas[:] = [
                structs.replace(each, times=times[each.request_id]) if each.request_id in times else each
                for each in step.deltas
            ]

    def note_step(self, seconds: float, *, num_tokens: int, num_sequences: int) -> None:
        self._step_s.observe(seconds)
        self._step_tokens.observe(num_tokens)
        self._step_requests.observe(num_sequences)

    def _note_first_tokens(self, now: float) -> dict[str, EngineTimes]:
        still, times = [], {}
        for sequence, num_tokens, joined_at in self._prefilling:
            new = sequence.generated_token_ids[num_tokens : num_tokens + 1]
            has_token = bool(new) and new[0] >= 0  # a negative token is a placeholder (see `InFlight.commit`)
            if has_token:
                self._prefill_s.observe(now - joined_at)
            if has_token or sequence.is_finished:
                queue_s = joined_at - sequence.arrived_at
                times[sequence.request.request_id] = EngineTimes(
                    queue_s, now - joined_at, self._settings, sequence.fetch_s
                )
            else:
                still.append((sequence, num_tokens, joined_at))
        self._prefilling = still
        return times

    def distributions(self) -> dict[str, Distribution]:
        """Return the distributions of `EngineMeasurements`. Thread-safe, because counting is atomic."""
        return {
            "queue_s": self._queue_s.snapshot(),
            "prefill_s": self._prefill_s.snapshot(),
            "step_s": self._step_s.snapshot(),
            "step_tokens": self._step_tokens.snapshot(),
            "step_requests": self._step_requests.snapshot(),
        }
