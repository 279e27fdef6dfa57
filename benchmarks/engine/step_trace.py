"""What an engine did with its slots, step by step: the requests computed, those left waiting, the seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from app.engine.batch import StepBatch, StepResult
from app.engine.model_runner import ModelRunner, PendingStep
from app.engine.stats import EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(slots=True)
class StepTrace:
    """All steps of one run, in order. `now` gives seconds of any steady clock, `stats` the state of the engine."""

    now: Callable[[], float]
    stats: Callable[[], EngineStats] | None = None
    steps: list[Step] = field(default_factory=list)
    _started_at: float = 0.0

    def start(self) -> None:
        self._started_at = self.now()

    def elapsed_s(self) -> float:
        return self.now() - self._started_at

    def begin(self, batch: StepBatch | None = None) -> Callable[[], None]:
        """A step of this batch begins, or a wait for something to do; call what is returned at its end."""
        began_s = self.elapsed_s()
        assert self.stats is not None, "a log is joined to its engine before the first step"
        stats = self.stats()
        num_tokens = {} if batch is None else {item.request_id: len(item.token_ids) for item in batch.scheduled}

        def end() -> None:
            # A step that was launched ahead begins when the one before it is done.
            first_s = max(began_s, self.steps[-1].ended_s) if self.steps else began_s
            self.steps.append(
                Step(
                    began_s=first_s,
                    ended_s=max(first_s, self.elapsed_s()),
                    num_tokens=num_tokens,
                    num_running=stats.num_running,
                    num_waiting=stats.num_waiting,
                )
            )

        return end

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


class LoggedRunner(ModelRunner):
    """A model runner that notes its steps in a trace."""

    def __init__(self, runner: ModelRunner, log: StepTrace) -> None:
        self._runner = runner
        self._log = log
        self.launches = runner.launches

    def run(self, batch: StepBatch) -> StepResult:
        end = self._log.begin(batch)
        result = self._runner.run(batch)
        end()
        return result

    def prepare(self) -> None:
        self._runner.prepare()

    def launch(self, batch: StepBatch) -> PendingStep:
        end = self._log.begin(batch)
        return _LoggedStep(self._runner.launch(batch), end)


@dataclass(frozen=True, slots=True)
class _LoggedStep:
    step: PendingStep
    end: Callable[[], None]

    def draw(self, batch: StepBatch) -> None:
        self.step.draw(batch)

    def result(self) -> StepResult:
        result = self.step.result()
        self.end()
        return result
