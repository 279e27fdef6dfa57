"""What a dispatch policy is. Whoever sends the request tries the replicas in its order until one accepts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from app.fleet.dispatch.decision import Decision
from app.fleet.dispatch.load import ReplicaLoad, RequestSize


class DispatchPolicy(Protocol):
    """Orders replicas for one request. Called on one thread, once for each time a request is to be placed."""

    def decide(self, loads: Sequence[ReplicaLoad], size: RequestSize) -> Decision:
        """All of `loads`, most preferred first; those that are full come last."""
        ...
