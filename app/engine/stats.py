"""One frozen snapshot of an engine, for health, dispatch, metrics and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

# Engines are compared by how fast steps of this size are: their usual ones say as much of how full they were.
SPEED_STEP_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges are of this moment; `total_*` count since the engine started."""

    strategy: str  # by their names in the config
    policy: str
    batch_size: int  # that the strategy aims at now; 0 where it makes no batches
    num_running: int
    num_waiting: int
    num_waiting_tokens: int  # of their prompts
    num_waiting_foreground_tokens: int  # of these, of prompts that are no background work
    num_background: int  # of all that run or wait
    num_staying_background: int  # of these, in a whole batch, so that they make way for nobody
    estimated_wait_s: float  # of a request that arrived now
    ended_per_s: float  # requests that ended in a second of computing, of late: how fast the queue drains
    mean_length_error_tokens: float  # by how much output lengths are predicted wrong, of late
    num_free_blocks: int  # blocks that could be allocated now, cached ones without an owner included
    num_blocks: int
    block_size: int  # tokens
    max_running: int  # requests computed in one step, at most
    speed: float  # tokens a second in steps of `SPEED_STEP_TOKENS`, of late; 0 while not known
    total_steps: int
    total_prompt_tokens: int  # prompt tokens of admitted requests, cached ones included
    total_cached_tokens: int  # of these, found in the prefix cache
    total_generated_tokens: int
    total_preemptions: int
    total_finished: int  # ended by stop or length
    total_aborted: int
    total_failed: int
    total_missed: int  # refused or ended because of their deadline
