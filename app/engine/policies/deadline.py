"""Earliest feasible deadline first."""

from __future__ import annotations

from app.engine.policies.policy import Rank, SchedulingPolicy
from app.engine.sequence import Sequence

# A request without a deadline stands in the order as one with this deadline, so that it does not starve.
DEFAULT_DEADLINE_S = 60.0


class EarliestDeadlineFirst(SchedulingPolicy):
    """The earliest deadline first (Liu and Layland, 1973), among those that can still be met.

    Without refusing, this order is the worst of all under overload: it serves what is about to be late. So what can
    no longer be done in time is refused, and a deadline that has passed makes no request more urgent. A request without
    a deadline is never refused.
    """

    def rank(self, sequence: Sequence) -> Rank:
        at = sequence.deadline_at
        return (sequence.arrived_at + DEFAULT_DEADLINE_S if at is None else at, sequence.arrival)

    def give_up_at(self, sequence: Sequence, service_s: float) -> float | None:
        return None if sequence.deadline_at is None else sequence.deadline_at - service_s
