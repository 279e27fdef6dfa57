"""Shortest job first, with ageing."""

from __future__ import annotations

from app.config import SjfConfig
from app.engine.policies.policy import Rank, SchedulingPolicy
from app.engine.sequence import Sequence

# A second of waiting outweighs so many tokens of work. This rate only orders requests within `max_overtaking_s`, the
# bound on starvation that an operator chooses.
AGEING_TOKENS_PER_S = 1000.0


class ShortestJobFirst(SchedulingPolicy):
    """The least estimated work (prompt and predicted output tokens) first; waiting buys priority.

    The rank is the arrival plus a handicap in seconds that grows with the work. A sequence can only be overtaken by
    one that arrives within its own handicap, and no handicap exceeds `max_overtaking_s`: that is the bound on
    starvation, whatever arrives.
    """

    def __init__(self, config: SjfConfig) -> None:
        self._config = config

    def rank(self, sequence: Sequence) -> Rank:
        handicap_s = sequence.estimated_work / AGEING_TOKENS_PER_S
        return (sequence.arrived_at + min(handicap_s, self._config.max_overtaking_s), sequence.arrival)
