"""Scheduling policies: which waiting sequence goes first, and which running one is preempted first."""

from __future__ import annotations

from typing import Protocol

from app.engine.sequence import Sequence


class SchedulingPolicy(Protocol):
    """An order over sequences: the lowest key is admitted first and preempted last."""

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        """Where the sequence stands; must not change while it waits or runs."""
        ...


class FirstComeFirstServed:
    """By arrival. A preempted sequence keeps its place, so nothing starves."""

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        return (sequence.arrival,)
