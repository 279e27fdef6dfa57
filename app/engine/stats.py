"""One frozen snapshot of an engine, for health, dispatch, metrics and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges are of this moment; `total_*` count since the engine started."""

    num_running: int
    num_waiting: int
    num_free_blocks: int  # blocks that could be allocated now, cached ones without an owner included
    num_blocks: int
    total_steps: int
    total_prompt_tokens: int  # prompt tokens of admitted requests, cached ones included
    total_cached_tokens: int  # of these, found in the prefix cache
    total_generated_tokens: int
    total_preemptions: int
    total_finished: int  # ended by stop or length
    total_aborted: int
    total_failed: int
