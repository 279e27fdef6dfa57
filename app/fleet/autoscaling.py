"""How many replicas a model should have: a pure rule over what they have to do. No Ray, no clock.

It looks at work, not at requests: one request may be ten tokens or ten thousand. When to act on what it says (only
after so many seconds, only so far) is for whoever asks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from app.config import AutoscalingConfig

# Fewer replicas only if they would be loaded to so much of their targets: what shrinks at once would grow again.
SHRINK_TO = 0.8
# Share of a replica's KV memory that should be in use: the rest is for requests that grow while another replica starts.
TARGET_KV_USE = 0.8
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaUse:
    """What one replica has to do."""

    num_outstanding_tokens: float  # still to compute, of prompts and of outputs as far as they are predicted
    num_requests: float  # running and waiting
    kv_use: float  # share of its blocks that requests own, 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known when a number is wanted."""

    target: int  # replicas there should be by the last decision
    num_running: int  # that are there
    uses: Sequence[ReplicaUse]  # of those that have told
    num_queued: float  # requests that no replica has taken yet
    num_slots: int  # requests that one replica can compute in one step

    @property
    def num_requests(self) -> float:
        return self.num_queued + sum(use.num_requests for use in self.uses)


def desired_replicas(situation: Situation, config: AutoscalingConfig) -> int:
    """The number of replicas that brings each to its targets, within the limits.

    It rises with the load. For any load there is a number with which it agrees, and around that number the load may
    vary by a fifth before it asks for another. It is 0 only when there is no request anywhere.
    """
    need = needed(situation, config)
    wanted = _whole(need)
    if wanted < situation.target:
        # Whoever has not told yet may be full.
        knows_all = len(situation.uses) >= situation.num_running
        wanted = min(situation.target, _whole(need / SHRINK_TO)) if knows_all else situation.target
    lowest = config.min_replicas if _may_sleep(situation) else max(1, config.min_replicas)
    return min(max(wanted, lowest), config.max_replicas)


def _may_sleep(situation: Situation) -> bool:
    """Whether nobody wants anything. One that is still starting was wanted by somebody: it is let come up first."""
    is_starting = situation.target > 0 and situation.num_running == 0
    return situation.num_requests == 0 and not is_starting


def needed(situation: Situation, config: AutoscalingConfig) -> float:
    """How many replicas the load would fill to their targets: by tokens, by memory or by slots, whichever is most."""
    num_tokens = sum(use.num_outstanding_tokens for use in situation.uses)
    kv_use = sum(use.kv_use for use in situation.uses)
    return max(
        num_tokens / config.target_tokens,
        kv_use / TARGET_KV_USE,
        situation.num_requests / situation.num_slots,
    )


def _whole(need: float) -> int:
    return math.ceil(need - _ROUNDING)
