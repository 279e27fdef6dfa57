"""What a replica reports. A report comes with every frame, so dispatch is late by one step and never polls."""

from __future__ import annotations

import msgspec

AWAKE = "awake"


class ReplicaReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One replica at one moment, with the work of all ingresses.

    It crosses processes by position: new fields go to the end and need a default, for replicas of an older version.
    """

    group: str  # of an A/B trial; "" for none
    num_requests: int  # running and waiting
    num_background: int  # of these, background requests
    num_staying_background: int  # of these, background requests that are not preempted for others
    max_requests: int  # more are refused, not counting background requests that can be preempted
    max_running: int  # computed at once; the others wait
    num_waiting_tokens: int  # prompt tokens of waiting requests
    num_kv_tokens: int  # that fit into its KV memory
    tokens_per_s: float  # in steps of one size, the same on all replicas; 0 while not known
    ended_per_s: float  # requests that end in a second of computing
    step_age_s: float  # how long the current step has been running
    weights: int = 0  # a digest of the model's files; 0 while not known
    sends_views: bool = False  # it understands WatchEngine
    num_own: int | None = None  # of num_requests, those of the ingress that gets this report; None: not known
    # Digests of the adapters that it has loaded; None: it computes with none, or is of a version that knows none.
    adapters: tuple[str, ...] | None = None
    state: str = AWAKE  # of `app.engine.stats.SleepState`
    wake_s: float = 0.0  # how long it should take until it computes; 0: it is awake

    @property
    def is_awake(self) -> bool:
        return self.state == AWAKE
