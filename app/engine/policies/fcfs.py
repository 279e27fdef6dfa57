"""First come, first served."""

from __future__ import annotations

from app.engine.policies.policy import Rank, SchedulingPolicy
from app.engine.sequence import Sequence


class FirstComeFirstServed(SchedulingPolicy):
    """By arrival. A preempted sequence keeps its place, so nothing starves."""

    def rank(self, sequence: Sequence) -> Rank:
        return (sequence.arrival,)
