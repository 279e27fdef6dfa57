"""Priority classes, with ageing."""

from __future__ import annotations

from app.config import PriorityConfig
from app.engine.policies.policy import Rank, SchedulingPolicy
from app.engine.sequence import Sequence


class PriorityFirst(SchedulingPolicy):
    """The lowest priority number first, then arrival; waiting buys priority.

    One class outweighs `ageing_s` seconds of waiting, so a request is only overtaken by one that is `n` classes
    better when that one arrives at most `n * ageing_s` seconds later: the bound on starvation.
    """

    def __init__(self, config: PriorityConfig) -> None:
        self._config = config
        self.preempts = config.preemption

    def rank(self, sequence: Sequence) -> Rank:
        handicap_s = sequence.request.priority * self._config.ageing_s
        return (sequence.arrived_at + handicap_s, sequence.request.priority, sequence.arrival)

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        # Both: a better class, and a better rank even so. By its rank alone the other would come back at once.
        return waiting.request.priority < running.request.priority and waiting.rank < running.rank
