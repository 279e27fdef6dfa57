"""What an engine did with its slots, step by step: the requests computed, those left waiting, the seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from app.engine.batch import SchedulingDecision, StepBatch
from app.engine.engine import Engine
from app.engine.observer import EndedStep, StepObserver
from app.engine.sequence import Sequence
from app.engine.stats import EngineStats
from app.engine.trace.entries import FailureKind


@dataclass(frozen=True, slots=True)
class Step:
    """One step, or (without requests) a time in which the engine waited. Seconds after the start."""

    began_s: float
    ended_s: float
    num_tokens: Mapping[str, int]  # computed in it, by request id
    num_running: int  # that held a slot, whether or not they took part
    num_waiting: int  # left outside

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


class StepTrace(StepObserver):
    """All steps of one run, in order, seen as the engine's observer."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._start_s = 0.0
        self._stats: Callable[[], EngineStats] | None = None
        self._held: deque[tuple[int, int]] = deque()  # running and waiting, of steps that have not ended

    def start(self, engine: Engine) -> None:
        """The run of this engine begins now."""
        self._start_s, self._stats = engine.now(), engine.stats

    def scheduled(self, batch: StepBatch, decision: SchedulingDecision) -> None:
        assert self._stats is not None, "started before the first step"
        if batch.scheduled:
            self._held.append((self._stats().num_running, decision.num_waiting))

    def failed(self, how: FailureKind, sequences: Iterable[Sequence] = ()) -> None:
        self._held.clear()

    def step_ended(self, step: EndedStep) -> None:
        if self._held and step.batch.scheduled:
            num_running, num_waiting = self._held.popleft()
            num_tokens = {item.request_id: len(item.token_ids) for item in step.batch.scheduled}
            self._add(step.at - step.seconds, step.at, num_tokens, num_running, num_waiting)

    def waited(self, began_at: float, ended_at: float, stats: EngineStats) -> None:
        """The engine had nothing to do between these times of its clock, with these requests."""
        self._add(began_at, ended_at, {}, stats.num_running, stats.num_waiting)

    def _add(
        self, began_at: float, ended_at: float, num_tokens: Mapping[str, int], num_running: int, num_waiting: int
    ) -> None:
        # A step that was launched ahead begins when the one before it is done.
        began_s = max(began_at - self._start_s, self.steps[-1].ended_s if self.steps else 0.0)
        ended_s = max(began_s, ended_at - self._start_s)
        self.steps.append(Step(began_s, ended_s, num_tokens, num_running, num_waiting))

    def joined_s(self) -> dict[str, float]:
        """When each request was first computed."""
        joined: dict[str, float] = {}
        for step in self.steps:
            for request_id in step.num_tokens:
                joined.setdefault(request_id, step.began_s)
        return joined

    def bubble_share(self, num_slots: int) -> float | None:
        """Slot time held by nothing while requests waited, of all slot time; None without steps."""
        whole_s = sum(step.seconds for step in self.steps) * num_slots
        empty_s = sum(step.seconds * max(0, num_slots - step.num_running) for step in self.steps if step.num_waiting)
        return empty_s / whole_s if whole_s else None

    def mean_running(self) -> float | None:
        """Requests computed in a step, on average over the steps."""
        sizes = [len(step.num_tokens) for step in self.steps if step.num_tokens]
        return sum(sizes) / len(sizes) if sizes else None
