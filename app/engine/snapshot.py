"""What an engine shows to people that look: its slots, queue, memory and steps. No prompt, no output.

Views cross processes by position: new fields go to the end and need a default. Times are milliseconds before the view
was made: the clocks of two machines need not agree.
"""

from __future__ import annotations

import msgspec


class SlotUse(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """One request in one slot, from when it joined until it left. A preempted request has several of these."""

    request_id: str
    tenant: str
    priority: int
    is_background: bool
    slot: int  # the lowest that was free when it joined
    arrived_ms: int
    joined_ms: int
    first_token_ms: int | None  # the first since it joined; None while its prompt is computed
    left_ms: int | None  # None while it runs
    why_left: str  # "preempted", or the finish reason
    num_prompt_tokens: int
    num_cached_tokens: int  # of these, found in the prefix cache
    num_computed_tokens: int
    num_given_tokens: int  # generated at another replica before
    num_generated_tokens: int  # these included
    num_blocks: int
    num_preemptions: int
    num_fetched_tokens: int = 0  # of its prompt, read from a store before it joined
    fetch_ms: int = 0  # that took so long


class QueueEntry(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """One request that waits, with what it will probably wait still."""

    request_id: str
    tenant: str
    priority: int
    is_background: bool
    arrived_ms: int
    expected_ms: int  # from now until it joins; 0 while the throughput is not known
    num_prompt_tokens: int
    num_generated_tokens: int
    num_preemptions: int


class StepSums(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """All steps since the view before."""

    num_steps: int = 0
    num_tokens: int = 0
    num_drawn_tokens: int = 0  # the others are of prompts
    num_sequences: int = 0
    busy_ms: float = 0.0
    longest_ms: float = 0.0
    most_tokens: int = 0  # of one step
    ended_ms: tuple[int, ...] = ()  # when each step ended, the last of them where they are many


class TuningView(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Why the limits are as they are, and how the targets were held in the last half minute."""

    reason: str  # of `TuningReason`
    num_changes: int
    ttft_p99_ms: float  # 0 without first tokens
    itl_p99_ms: float
    is_missed: bool  # a target, and other limits would not help


class EngineSnapshot(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """An engine at one moment, and the slots that were left since the view before.

    A full view says everything about every slot in use. Of what has only grown since the view before, any other has
    three numbers.
    """

    strategy: str
    policy: str
    max_running: int
    max_step_tokens: int
    num_running: int
    num_waiting: int
    wait_reason: str  # why the first waiting request waits; "" when none does
    num_blocks: int
    num_cached_blocks: int  # free, with content that can be shared
    num_free_blocks: int  # with nothing in them
    steps: StepSums
    slots: tuple[SlotUse, ...]  # those in use that `reported` does not have, and those that were left
    waiting: tuple[QueueEntry, ...]  # the first, in the order in which they would join now
    settings: str = ""  # `SchedulerConfig.version` of all settings of scheduling
    reported: tuple[int, ...] = ()  # slot, num_generated_tokens, num_blocks; the same of the next slot, and so on
    prefill_chunk_tokens: int = 0  # these three limits are those in force
    tuning: TuningView | None = None  # None without targets
