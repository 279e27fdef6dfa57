"""Shortest job first, with ageing."""

from __future__ import annotations

from app.config import SjfConfig
from app.engine.policies.policy import Rank, SchedulingPolicy
from app.engine.sequence import Sequence


class ShortestJobFirst(SchedulingPolicy):
    """The least estimated work (prompt and predicted output tokens) first; waiting buys priority.

    The rank is the arrival plus a handicap in seconds that grows with the work. A sequence can only be overtaken by
    one that arrives within its own handicap, and no handicap exceeds `max_overtaking_s`: that is the bound on
    starvation, whatever arrives.
    """

    def __init__(self, config: SjfConfig) -> None:
        self._config = config
        self.length_quantile = config.length_quantile

    def rank(self, sequence: Sequence) -> Rank:
        handicap_s = sequence.estimated_work / self._config.ageing_tokens_per_s
        return (sequence.arrived_at + min(handicap_s, self._config.max_overtaking_s), sequence.arrival)
