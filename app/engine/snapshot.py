"""The live view of an engine for people: its slots, queue, memory and steps. A view contains no prompts or outputs.

Between processes, views are encoded as arrays of their fields, so new fields must come last and have a default. Times
are in milliseconds before the view was created, because the clocks of two machines may differ.
"""

from __future__ import annotations

import msgspec


class SlotUse(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """A request's use of a slot, from when it joined until it left. A preempted request has several entries."""

    request_id: str
    tenant: str
    priority: int
    is_background: bool
    slot: int  # the lowest slot that was free when the request joined
    arrived_ms: int
    joined_ms: int
    first_token_ms: int | None  # the first token since the request joined; None while its prompt is being computed
    left_ms: int | None  # None while the request is running
    why_left: str  # "preempted", or the finish reason
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    num_computed_tokens: int
    num_given_tokens: int  # output tokens that another replica has already generated
    num_generated_tokens: int  # including `num_given_tokens`
    num_blocks: int
    num_preemptions: int
    num_fetched_tokens: int = 0  # prompt tokens fetched from a store before the request joined
    fetch_ms: int = 0  # how long the request waited for this fetch


class QueueEntry(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """A waiting request and its expected remaining wait."""

    request_id: str
    tenant: str
    priority: int
    is_background: bool
    arrived_ms: int
    expected_ms: int  # from now until the request joins; 0 while the throughput is unknown
    num_prompt_tokens: int
    num_generated_tokens: int
    num_preemptions: int


class StepSums(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Totals of all steps since the previous view."""

    num_steps: int = 0
    num_tokens: int = 0
    num_drawn_tokens: int = 0  # output tokens drawn by the steps
    num_sequences: int = 0
    busy_ms: float = 0.0
    longest_ms: float = 0.0
    most_tokens: int = 0  # number of tokens in the largest step
    ended_ms: tuple[int, ...] = ()  # when each step ended; only the last ones if there were many


class TuningView(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The reason for the current limits, and the latencies of the last half minute."""

    reason: str  # a value of `TuningReason`
    num_changes: int
    ttft_p99_ms: float  # 0 without first tokens
    itl_p99_ms: float
    is_missed: bool  # whether a target is missed and other limits would not help


class EngineSnapshot(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """An engine's current state, and the slots that requests have left since the previous view.

    A full view contains a `SlotUse` for every slot in use. In later views, three numbers in `reported` replace the
    `SlotUse` of a request that has only gained tokens and blocks.
    """

    strategy: str
    policy: str
    max_running: int
    max_step_tokens: int
    num_running: int
    num_waiting: int
    wait_reason: str  # why the first waiting request waits; "" if no request waits
    num_blocks: int
    num_cached_blocks: int  # free blocks with content that can be shared
    num_free_blocks: int  # free blocks without content
    steps: StepSums
    slots: tuple[SlotUse, ...]  # slots in use that are not in `reported`, and slots that requests have left
    waiting: tuple[QueueEntry, ...]  # the first waiting requests, in the order in which they would join now
    settings: str = ""  # `SchedulerConfig.version` of all scheduling settings
    reported: tuple[int, ...] = ()  # `slot`, `num_generated_tokens` and `num_blocks`, one slot after another
    prefill_chunk_tokens: int = 0  # the current limit, like `max_running` and `max_step_tokens`
    tuning: TuningView | None = None  # None without targets
