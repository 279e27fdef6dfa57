"""What an engine reports: a snapshot after every step, and measurements that are too large to copy that often."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from msgspec import structs

from app.config import SchedulerConfig
from app.engine.adapter_store import AdapterStats
from app.engine.batch import SchedulingDecision, StepBatch
from app.engine.histogram import SECONDS, SMALL_NUMBERS, TOKENS, Distribution, Histogram
from app.engine.observer import EndedStep, StepObserver
from app.engine.request import EngineTimes
from app.engine.sequence import Sequence
from app.engine.tuner import Tuning

# Engines are compared by their speed in steps of this size: the speed of usual steps depends on how full they were.
SPEED_STEP_TOKENS = 64


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Gauges are of this moment; `total_*` count since the engine started. A struct, as every step makes one."""

    strategy: str  # by their names in the config
    policy: str
    settings: str  # `SchedulerConfig.version` of all settings of scheduling
    batch_size: int  # that the strategy aims at now; 0 where it makes no batches
    num_running: int
    num_waiting: int
    num_waiting_tokens: int  # of their prompts
    num_waiting_foreground_tokens: int  # of these, of foreground requests
    num_background: int  # background requests, running and waiting
    num_staying_background: int  # of these, in a whole batch, which is not preempted for others
    estimated_wait_s: float  # of a request that arrived now
    ended_per_s: float  # requests that ended in a second of computing, recently: how fast the queue drains
    mean_length_error_tokens: float  # mean error of predicted output lengths, recently
    num_free_blocks: int  # blocks that could be allocated now, cached ones without an owner included
    num_blocks: int
    block_size: int  # tokens
    max_running: int  # requests computed in one step, at most
    speed: float  # tokens a second in steps of `SPEED_STEP_TOKENS`, recently; 0 while not known
    total_steps: int
    total_prompt_tokens: int  # prompt tokens of admitted requests, cached ones included
    total_cached_tokens: int  # of these, found in the prefix cache
    total_generated_tokens: int
    total_preemptions: int
    total_memory_preemptions: int  # of these, because blocks were short for a sequence that ran
    total_finished: int  # ended by stop or length
    total_aborted: int
    total_failed: int
    total_missed: int  # refused or ended because of their deadline
    total_drafted_tokens: int = 0  # computed as drafts of the next tokens
    total_accepted_tokens: int = 0  # of these, tokens that the sequences went on with
    num_layer_groups: int = 1  # each with blocks of its own for a token, see `block_pool.py`
    num_state_slots: int = 0  # of a model with recurrent layers, see `state_pool.py`
    num_free_state_slots: int = 0  # a new sequence could have these, the slots of unread snapshots included
    total_unresumable_tokens: int = 0  # prompt tokens with cached keys and values, but without a snapshot of the state


class SleepState(StrEnum):
    """Where an engine's weights and KV memory are."""

    AWAKE = "awake"
    ASLEEP = "asleep"
    QUEUED = "queued"  # it has requests, and waits for memory that other engines of its device have
    WAKING = "waking"


class TakenBackend(NamedTuple):
    """The code that computes a model on a GPU (`app/model/gpu_backends.py`)."""

    name: str
    failed: Mapping[str, str] = MappingProxyType({})  # what has failed before it, each with the reason


class SleepStats(NamedTuple):
    """What a sleeper has done since the start. Times in seconds."""

    state: SleepState = SleepState.AWAKE
    num_wakes: int = 0
    waking_s: float = 0.0  # all wakes together, without the wait for memory
    sleeping_s: float = 0.0  # giving the memory up, all together
    queued_s: float = 0.0  # all waits for memory together
    num_turns_ended: int = 0  # it slept though it had requests, as other engines waited for the memory
    last_wake_s: float = 0.0  # of the start, while there was no other

    @property
    def expected_wake_s(self) -> float:
        """How long it takes until a request is computed, without the wait for other engines; 0: awake."""
        return 0.0 if self.state is SleepState.AWAKE else self.last_wake_s


AWAKE = SleepStats()  # of an engine that never sleeps


class StoreStats(NamedTuple):
    """What a store of KV blocks (`block_store.py`) has done since its start."""

    num_fetched_tokens: int = 0  # that were not computed, as their blocks were fetched
    num_given_up: int = 0  # fetches that took longer than computing would have
    num_read: int = 0  # blocks
    num_written: int = 0
    num_received: int = 0  # from other replicas
    num_sent: int = 0  # to them
    block_bytes: int = 0  # of each
    num_snapshots: tuple[int, int, int, int] = (0, 0, 0, 0)  # of recurrent layers: read, written, received, sent
    snapshot_bytes: int = 0  # of each

    @property
    def bytes_moved(self) -> dict[str, int]:
        """By direction."""
        directions = ("read", "written", "received", "sent")  # the last two: from other replicas and to them
        blocks = (self.num_read, self.num_written, self.num_received, self.num_sent)
        return {
            direction: of_blocks * self.block_bytes + of_snapshots * self.snapshot_bytes
            for direction, of_blocks, of_snapshots in zip(directions, blocks, self.num_snapshots, strict=True)
        }


@dataclass(slots=True)
class Totals:
    """Counters that only grow; `EngineStats` says what each means."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMeasurements:
    """Distributions since the engine started; the other fields are of this moment."""

    max_running: int  # requests that one step can have
    block_size: int  # token slots in one block
    num_outstanding_tokens: int  # still to compute for all requests here: prompts, and outputs as far as predicted
    queue_s: Distribution  # from a request's arrival to its first step
    prefill_s: Distribution  # from there to its first token
    step_s: Distribution
    step_tokens: Distribution  # computed in one step, prompt chunks and single tokens together
    step_requests: Distribution  # in one step
    num_padding_tokens: int = 0  # computed for nothing, as steps run from graphs of a few sizes
    num_steps_without_graph: int = 0  # launched kernel by kernel
    backend: TakenBackend | None = None  # None on a CPU
    tuning: Tuning | None = None  # what the tuner does; None without targets
    adapters: AdapterStats | None = None  # None where the model runner computes with none
    sleep: SleepStats | None = None  # None where the engine never sleeps
    store: StoreStats | None = None  # None where no blocks are kept beside the KV memory


class MeasurementCollector(StepObserver):
    """Fills the distributions. Costs a bisection for each step and each request."""

    def __init__(self, *, settings: str) -> None:
        """`settings`: the version of those in force."""
        self._settings = settings
        self._queue_s = Histogram(SECONDS)
        self._prefill_s = Histogram(SECONDS)
        self._step_s = Histogram(SECONDS)
        self._step_tokens = Histogram(TOKENS)
        self._step_requests = Histogram(SMALL_NUMBERS)
        self._prefilling: list[tuple[Sequence, int, float]] = []  # with tokens and time when they joined

    def reconfigured(self, config: SchedulerConfig) -> None:
        self._settings = config.version

    def scheduled(self, batch: StepBatch, decision: SchedulingDecision) -> None:
        for sequence in decision.joined:
            if sequence.num_preemptions == 0:  # else it has joined before
                self._queue_s.observe(batch.began_at - sequence.arrived_at)
                self._prefilling.append((sequence, sequence.num_generated_tokens, batch.began_at))

    def step_ended(self, step: EndedStep) -> None:
        """Adds their times to the deltas of requests that got their first token, or that ended without one."""
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
        """Measure the size and the time of a step."""
        self._step_s.observe(seconds)
        self._step_tokens.observe(num_tokens)
        self._step_requests.observe(num_sequences)

    def _note_first_tokens(self, now: float) -> dict[str, EngineTimes]:
        still, times = [], {}
        for sequence, num_tokens, joined_at in self._prefilling:
            new = sequence.generated_token_ids[num_tokens : num_tokens + 1]
            has_token = bool(new) and new[0] >= 0  # a placeholder is negative: a step that still runs draws the token
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
        """Those of `EngineMeasurements` now. Any thread may call: each value is counted as a whole."""
        return {
            "queue_s": self._queue_s.snapshot(),
            "prefill_s": self._prefill_s.snapshot(),
            "step_s": self._step_s.snapshot(),
            "step_tokens": self._step_tokens.snapshot(),
            "step_requests": self._step_requests.snapshot(),
        }
