"""Batching strategies: when waiting sequences may join the running ones, and how many."""

from __future__ import annotations

from typing import Protocol


class BatchingStrategy(Protocol):
    """Decides at every step how far the door is open."""

    def num_admissible(self, *, num_running: int, num_waiting: int) -> int:
        """How many waiting sequences may join in this step, budget and memory permitting."""
        ...


class Continuous:
    """At every step, as slots allow: iteration-level scheduling (Orca, Yu et al., 2022)."""

    def __init__(self, *, max_running: int) -> None:
        self._max_running = max_running

    def num_admissible(self, *, num_running: int, num_waiting: int) -> int:
        return min(self._max_running - num_running, num_waiting)
