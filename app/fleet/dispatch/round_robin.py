"""Each replica in its turn."""

from __future__ import annotations

from collections.abc import Sequence

from app.fleet.dispatch.decision import Decision, candidates_from
from app.fleet.dispatch.load import ReplicaLoad, RequestSize


class RoundRobin:
    """Each in turn, whatever its load. A replica that joins or leaves does not make another lose or repeat its turn."""

    def __init__(self) -> None:
        self._last = ""  # sorts before every id: the first turn goes to the lowest

    def decide(self, loads: Sequence[ReplicaLoad], size: RequestSize) -> Decision:
        turn = sorted(
            candidates_from(loads, size),
            key=lambda candidate: (candidate.is_full, candidate.replica_id <= self._last, candidate.replica_id),
        )
        if turn:
            self._last = turn[0].replica_id
        return Decision(policy="round_robin", rule="whose turn it is", reasons=tuple(turn))
