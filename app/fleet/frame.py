"""What a replica sends to an ingress: one frame for whatever has happened since the last. It crosses processes."""

from __future__ import annotations

from typing import NamedTuple

from app.engine.request import TokenDelta


class Report(NamedTuple):
    """How a replica is. It rides on every frame, so whoever dispatches by it is late by a step, not by a poll."""

    group: str  # of an A/B trial; "" for none
    num_requests: int  # running and waiting, of all ingresses
    max_requests: int  # more are refused
    max_running: int  # the others wait
    num_waiting_tokens: int  # of the prompts that wait
    num_kv_tokens: int  # that fit into its KV memory
    kv_use: float  # share of it that running requests hold, 0 to 1
    speed: float  # tokens a second in steps of one size, the same on all replicas; 0 while not known
    ended_per_s: float  # requests that end in a second of computing
    step_age_s: float  # for how long the step that runs now has been running


class Frame(NamedTuple):
    """A stream's frames are numbered from 0; a number that is missing means lost tokens."""

    number: int
    report: Report
    deltas: tuple[TokenDelta, ...]  # at most one for each request; empty in a heartbeat
