"""Who held which slot at which step: the lanes of a Gantt chart, made of a step log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.engine.step_trace import Step


@dataclass(frozen=True, slots=True)
class Holding:
    """One request in one slot, from its first to its last step in a row. Seconds."""

    request_id: str
    slot: int
    began_s: float
    ended_s: float


def holdings(steps: Sequence[Step]) -> list[Holding]:
    """Each request in the lowest slot that was free when it came; one that was preempted comes again."""
    done: list[Holding] = []
    held: dict[str, Holding] = {}
    for step in steps:
        gone = [name for name in held if name not in step.num_tokens]
        done += [held.pop(name) for name in gone]
        taken = {holding.slot for holding in held.values()}
        for name in step.num_tokens:
            if name in held:
                began_s, slot = held[name].began_s, held[name].slot
            else:
                slot = next(number for number in range(len(taken) + 1) if number not in taken)
                began_s = step.began_s
                taken.add(slot)
            held[name] = Holding(name, slot, began_s, step.ended_s)
    return [*done, *held.values()]
