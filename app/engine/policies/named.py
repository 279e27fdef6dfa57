"""The policy that a config names."""

from __future__ import annotations

from app.config import DeadlineConfig, FairConfig, FcfsConfig, PolicyConfig, PriorityConfig, SjfConfig
from app.engine.policies.background import BackgroundLast
from app.engine.policies.deadline import EarliestDeadlineFirst
from app.engine.policies.fair import FairShare
from app.engine.policies.fcfs import FirstComeFirstServed
from app.engine.policies.policy import SchedulingPolicy
from app.engine.policies.priority import PriorityFirst
from app.engine.policies.sjf import ShortestJobFirst


def policy_of(config: PolicyConfig) -> SchedulingPolicy:
    """A new policy, with nothing of an earlier one's memory; background requests come last under each."""
    return BackgroundLast(_foreground_policy_of(config))


def _foreground_policy_of(config: PolicyConfig) -> SchedulingPolicy:
    match config:
        case FcfsConfig():
            return FirstComeFirstServed()
        case SjfConfig():
            return ShortestJobFirst(config)
        case PriorityConfig():
            return PriorityFirst(config)
        case FairConfig():
            return FairShare()
        case DeadlineConfig():
            return EarliestDeadlineFirst()
