"""Which replica a request goes to: pure rules over what is known of each replica. No Ray, no engine, no clock.

A policy gives an order of preference; whoever sends the request tries the replicas in that order until one accepts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from app.errors import InvalidSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What dispatch knows of one replica: the work sent to it that has not ended."""

    replica_id: str
    num_requests: int
    num_tokens: int  # prompt + max_tokens of those requests


class DispatchPolicy(Protocol):
    """Orders replicas for one request. Called once per request, on one thread."""

    def order(self, loads: Sequence[ReplicaLoad]) -> list[str]:
        """The ids of all `loads`, most preferred first."""
        ...


class RoundRobin:
    """Each in turn, whatever its load. A replica that joins or leaves does not make another lose or repeat its turn."""

    def __init__(self) -> None:
        self._last = ""  # sorts before every id: the first turn goes to the lowest

    def order(self, loads: Sequence[ReplicaLoad]) -> list[str]:
        replica_ids = sorted(load.replica_id for load in loads)
        later = [replica_id for replica_id in replica_ids if replica_id > self._last]
        turn = later + replica_ids[: len(replica_ids) - len(later)]
        if turn:
            self._last = turn[0]
        return turn


class LeastLoaded:
    """Fewest outstanding tokens first, then fewest requests; equals in random order, so that none is always first."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def order(self, loads: Sequence[ReplicaLoad]) -> list[str]:
        ranked = sorted(loads, key=lambda load: (load.num_tokens, load.num_requests, self._rng.random()))
        return [load.replica_id for load in ranked]


def make_policy(name: str, rng: random.Random) -> DispatchPolicy:
    """The policy that the config calls `name`. Raises InvalidSetup for a name that is none."""
    if name == "round_robin":
        return RoundRobin()
    if name == "least_loaded":
        return LeastLoaded(rng)
    raise InvalidSetup(f"replicas.dispatch: got {name!r}; must be 'round_robin' or 'least_loaded'")
