"""The replica that would be done with the request first."""

from __future__ import annotations

import random
from collections.abc import Sequence

from app.fleet.dispatch.decision import Candidate, Decision, candidates_from
from app.fleet.dispatch.load import ReplicaLoad, RequestSize


class LeastLoaded:
    """The fewest tokens to compute until this request would have ended, by the speed of each replica.

    Outstanding tokens tell neither whether there is a free place nor how fast they go: whoever must wait for a place
    is charged for the wait, and everything is weighed by the replica's speed. So an idle slow replica is left alone
    while a fast one would be done earlier (shortest expected delay), and where all have queues each gets its share of
    the speed. Equals come in random order: several ingresses that know the same would else all choose the same one.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def decide(self, loads: Sequence[ReplicaLoad], size: RequestSize) -> Decision:
        ranked = self.ranked(candidates_from(loads, size))
        return Decision(policy="least_loaded", rule="the least work", reasons=tuple(ranked))

    def ranked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The candidates, the least loaded first."""
        return sorted(candidates, key=lambda each: (each.is_full, each.score, self._rng.random()))
