"""How many replicas a model should have: a pure rule over what they have to do. No Ray, no clock.

It looks at seconds of work, not at requests or tokens: one request may be ten tokens or ten thousand, and one replica
a hundred times as fast as another. The caller decides when to act on the number (only after so many seconds, only so
far).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from app.config import AutoscalingConfig

# Fewer replicas only if they would be loaded to so much of their targets: what shrinks at once would grow again.
SHRINK_TO = 0.8
# Share of a replica's KV memory that should be in use: the rest is for requests that grow while another replica starts.
TARGET_KV_USE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalingLoad:
    """What is known of a model when the number of its replicas is to be decided."""

    target: int  # replicas there should be by the last decision
    num_running: int  # replicas that are there
    num_reporting: int  # of these, replicas that have reported; the sums are theirs
    num_outstanding_tokens: float  # still to compute, of prompts and of outputs as far as they are predicted
    speeds: Sequence[float]  # tokens a second of each that has reported; 0: it has not measured yet
    num_replica_requests: float  # running and waiting
    kv_use: float  # the sum of each replica's share of blocks that requests own, 0 to 1
    num_queued: float  # requests that no replica has taken yet
    num_slots: int  # requests that one replica can compute in one step
    num_missing: int = 0  # of those that have reported, busy ones that miss their targets at the best limits

    @property
    def num_requests(self) -> float:
        return self.num_queued + self.num_replica_requests

    @property
    def tokens_per_s(self) -> float:
        """Of one replica: the median of what they have measured; 0: none has."""
        return median([speed for speed in self.speeds if speed > 0] or [0.0])


class WantedReplicas(NamedTuple):
    """How many replicas there should be, and why."""

    number: int
    cause: str  # "tokens", "kv", "requests", "targets", "idle", "reports": replicas whose load is not known
    reason: str  # in words, with the numbers


def decide(load: AutoscalingLoad, config: AutoscalingConfig) -> WantedReplicas:
    """The number of replicas that brings each to its targets, within the limits.

    It rises with the load. For any load there is a number with which it agrees, and around that number the load may
    vary by a fifth before it asks for another. It is 0 only when there is no request anywhere. Where half of the
    replicas miss their targets, it is one more than before.
    """
    need, cause, reason = needed(load, config)
    wanted = _whole(need)
    if wanted < load.target:
        # A replica that has not reported yet may be full.
        if load.num_reporting < load.num_running:
            wanted, cause = load.target, "reports"
            reason = f"{load.num_reporting} of {load.num_running} replicas have reported"
        else:
            wanted = min(load.target, _whole(need / SHRINK_TO))
    if _misses_targets(load) and wanted <= load.target:
        wanted, cause = load.target + 1, "targets"
        reason = f"{load.num_missing} of {load.num_reporting} replicas miss their targets at the best limits"
    lowest = config.min_replicas if _may_sleep(load) else max(1, config.min_replicas)
    number = min(max(wanted, lowest), config.max_replicas)
    if number != wanted:
        limit = "min_replicas" if wanted < number else "max_replicas"
        reason += f"; {limit} is {getattr(config, limit)}, else {wanted}"
    return WantedReplicas(number, cause, reason)


def _may_sleep(load: AutoscalingLoad) -> bool:
    """Whether there is no request. A replica that is still starting was started for one: it is let come up first."""
    is_starting = load.target > 0 and load.num_running == 0
    return load.num_requests == 0 and not is_starting


def _misses_targets(load: AutoscalingLoad) -> bool:
    """Once all replicas are there: what a new one changes shows only then."""
    are_all_there = load.num_reporting >= load.num_running >= load.target > 0
    return are_all_there and load.num_missing > 0 and 2 * load.num_missing >= load.num_reporting


def needed(load: AutoscalingLoad, config: AutoscalingConfig) -> tuple[float, str, str]:
    """How many replicas the load would fill to their targets, by which of tokens, memory and slots is most; why."""
    if load.num_requests == 0:
        return 0.0, "idle", "no request"
    tokens, kv, requests = load.num_outstanding_tokens, load.kv_use, load.num_requests
    need, cause, reason = max(
        (kv / TARGET_KV_USE, "kv", f"KV memory of {kv:.2f} replicas in use, {TARGET_KV_USE:g} of each"),
        (requests / load.num_slots, "requests", f"{requests:,.0f} requests, {load.num_slots:,} slots each"),
    )
    speed = load.tokens_per_s
    if not speed:
        return need, cause, f"{reason}; no replica has measured its speed yet"
    work_s = tokens / speed
    words = f"{tokens:,.0f} tokens to compute, {speed:,.0f} tokens/s each: {work_s:,.1f} s of work, "
    return max((work_s / config.target_s, "tokens", f"{words}{config.target_s:g} s each"), (need, cause, reason))


def _whole(need: float) -> int:
    return math.ceil(need - 1e-9)  # a quotient may be a rounding error too large
