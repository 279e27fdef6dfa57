"""Decides how many replicas a model needs. The result is a pure function of their load, without Ray or a clock.

The load is measured in seconds of work, not in requests or tokens, because one request may need ten tokens or ten
thousand, and one replica may be a hundred times as fast as another. The caller decides how quickly to apply the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from app.config import AutoscalingConfig

# The fleet shrinks only if this leaves the remaining replicas at no more than this share of their target load.
# Otherwise it would soon grow again.
SHRINK_TO = 0.8
# Share of a replica's KV memory that should be in use. Running requests grow into the rest while a new replica starts.
TARGET_KV_USE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalingLoad:
    """A model's load at the time of a decision."""

    target: int  # the number of replicas according to the last decision
    num_running: int  # running replicas
    num_reporting: int  # running replicas that have reported; the sums below include only these
    num_outstanding_tokens: float  # uncomputed prompt tokens and predicted output tokens
    speeds: Sequence[float]  # tokens per second of each reporting replica; 0 before its first measurement
    num_replica_requests: float  # running and waiting requests
    kv_use: float  # sum of the replicas' shares (0 to 1) of blocks that requests own
    num_queued: float  # requests that no replica has accepted yet
    num_slots: int  # requests that one replica can compute in one step
    num_missing: int = 0  # busy reporting replicas that miss their latency targets with the best limits

    @property
    def num_requests(self) -> float:
        return self.num_queued + self.num_replica_requests

    @property
    def tokens_per_s(self) -> float:
        """A replica's typical speed: the median of the measured speeds, or 0 if none has been measured."""
        return median([speed for speed in self.speeds if speed > 0] or [0.0])


class WantedReplicas(NamedTuple):
    """The number of replicas that the model should run, and the reason."""

    number: int
    cause: str  # "tokens", "kv", "requests", "targets", "idle", or "reports" (the load of some replicas is unknown)
    reason: str  # a readable explanation with the numbers


def decide(load: AutoscalingLoad, config: AutoscalingConfig) -> WantedReplicas:
    """Return the number of replicas, within the configured limits, that brings each replica to its target load.

    The number grows with the load. It is stable: the load may fall by a fifth before the number falls. The number is 0
    only if there are no requests. If half of the replicas miss their latency targets, it is at least one more than the
    last target.
    """
    need, cause, reason = needed(load, config)
    wanted = _whole(need)
    if wanted < load.target:
        # The fleet does not shrink before all replicas have reported, because the missing replicas may be full.
        if load.num_reporting < load.num_running:
            wanted, cause = load.target, "reports"
            reason = f"only {load.num_reporting} of {load.num_running} replicas have reported"
        else:
            wanted = min(load.target, _whole(need / SHRINK_TO))
    if _misses_targets(load) and wanted <= load.target:
        wanted, cause = load.target + 1, "targets"
        reason = f"{load.num_missing} of {load.num_reporting} replicas miss their latency targets with the best limits"
    lowest = config.min_replicas if _may_sleep(load) else max(1, config.min_replicas)
    number = min(max(wanted, lowest), config.max_replicas)
    if number != wanted:
        limit = "min_replicas" if wanted < number else "max_replicas"
        reason += f"; the number would be {wanted}, but {limit} is {getattr(config, limit)}"
    return WantedReplicas(number, cause, reason)


def _may_sleep(load: AutoscalingLoad) -> bool:
    """Whether the model may scale to zero: it has no requests, and no first replica is starting."""
    is_starting = load.target > 0 and load.num_running == 0
    return load.num_requests == 0 and not is_starting


def _misses_targets(load: AutoscalingLoad) -> bool:
    """Whether half of the replicas miss their targets. False until all replicas, including new ones, have reported."""
    are_all_there = load.num_reporting >= load.num_running >= load.target > 0
    return are_all_there and load.num_missing > 0 and 2 * load.num_missing >= load.num_reporting


def needed(load: AutoscalingLoad, config: AutoscalingConfig) -> tuple[float, str, str]:
    """Return how many replicas the load fills (the maximum for tokens, memory and slots), the cause and the reason."""
    if load.num_requests == 0:
        return 0.0, "idle", "no requests"
    tokens, kv, requests = load.num_outstanding_tokens, load.kv_use, load.num_requests
    need, cause, reason = max(
        (
            kv / TARGET_KV_USE,
            "kv",
            f"the KV memory of {kv:.2f} replicas is in use, with a target of {TARGET_KV_USE:g} per replica",
        ),
        (
            requests / load.num_slots,
            "requests",
            f"{requests:,.0f} requests need slots, and each replica has {load.num_slots:,}",
        ),
    )
    speed = load.tokens_per_s
    if not speed:
        return need, cause, f"{reason}; no replica has measured its speed yet"
    work_s = tokens / speed
    words = f"{tokens:,.0f} tokens at {speed:,.0f} tokens/s per replica are {work_s:,.1f} s of work, with a target of "
    return max((work_s / config.target_s, "tokens", f"{words}{config.target_s:g} s per replica"), (need, cause, reason))


def _whole(need: float) -> int:
    return math.ceil(need - 1e-9)  # a rounding error in the quotient must not add a replica
