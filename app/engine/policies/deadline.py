"""Earliest feasible deadline first."""

from __future__ import annotations

from app.config import DeadlineConfig
from app.engine.policies.policy import Rank, SchedulingPolicy
from app.engine.sequence import Sequence


class EarliestDeadlineFirst(SchedulingPolicy):
    """The earliest deadline first (Liu and Layland, 1973), among those that can still be met.

    Without refusing, this order is the worst of all under overload: it serves what is about to be late. So what can
    no longer be done in time is refused, and a deadline that has passed raises nobody's urgency. Requests without a
    deadline stand in the order as if they had `default_deadline_s`, so that they do not starve; nobody refuses them.
    """

    def __init__(self, config: DeadlineConfig) -> None:
        self._config = config
        self.length_quantile = config.length_quantile

    def rank(self, sequence: Sequence) -> Rank:
        at = sequence.deadline_at
        return (sequence.arrived_at + self._config.default_deadline_s if at is None else at, sequence.arrival)

    def give_up_at(self, sequence: Sequence, service_s: float) -> float | None:
        return None if sequence.deadline_at is None else sequence.deadline_at - service_s
