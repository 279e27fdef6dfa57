"""What a replica sends to an ingress: one frame for whatever has happened since the last. It crosses processes."""

from __future__ import annotations

from typing import NamedTuple

from app.engine.request import TokenDelta
from app.engine.stats import EngineStats


class Report(NamedTuple):
    """How a replica is. It rides on every frame, so whoever dispatches by it is late by a step, not by a poll."""

    group: str  # of an A/B trial; "" for none
    num_requests: int  # running and waiting, of all ingresses
    num_background: int  # of these, background requests
    num_staying_background: int  # of these, such as make way for nobody
    max_requests: int  # more are refused, not counting background that makes way
    max_running: int  # the others wait
    num_waiting_tokens: int  # of the prompts that wait
    num_kv_tokens: int  # that fit into its KV memory
    speed: float  # tokens a second in steps of one size, the same on all replicas; 0 while not known
    ended_per_s: float  # requests that end in a second of computing
    step_age_s: float  # for how long the step that runs now has been running

    @classmethod
    def of(cls, stats: EngineStats, *, group: str, max_requests: int, step_age_s: float) -> Report:
        """What an engine's snapshot says, with what it does not."""
        return cls(
            group=group,
            num_requests=stats.num_running + stats.num_waiting,
            num_background=stats.num_background,
            num_staying_background=stats.num_staying_background,
            max_requests=max_requests,
            max_running=stats.max_running,
            num_waiting_tokens=stats.num_waiting_tokens,
            num_kv_tokens=stats.num_blocks * stats.block_size,
            speed=stats.speed,
            ended_per_s=stats.ended_per_s,
            step_age_s=step_age_s,
        )


class Frame(NamedTuple):
    """A stream's frames are numbered from 0; a number that is missing means lost tokens."""

    number: int
    report: Report
    deltas: tuple[TokenDelta, ...]  # at most one for each request; empty in a heartbeat
