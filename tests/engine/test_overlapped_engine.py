"""An engine that is a step ahead of its device, on a fake device that computes as late as it may."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from app.engine.batch import Batch, ScheduledSequence
from app.engine.engine import Engine, StepError
from app.engine.overlapped_engine import OverlappedEngine
from app.engine.request import FinishReason
from tests.engine.test_invariants import EngineMachine, FailingOnDemand
from tests.fakes import build_fake_engine, expected_tokens, make_request, run_to_end


class LateRunner(FailingOnDemand):
    """Computes a step only when its result is asked for: by then the next one has been scheduled.

    `fails_next` fails a launch; `fails_later` fails the step that is launched next when it is waited for.
    """

    def __init__(self, block_size: int = 4) -> None:
        super().__init__(block_size)
        self.fails_later = False
        self.num_ahead = 0  # steps launched while another ran
        self._launched: deque[LateStep] = deque()
        self._drawn: list[int] = []  # by the step before
        self._has_failed = False

    def launch(self, batch: Batch) -> LateStep:
        if self.fails_next:
            self.fails_next = False
            raise RuntimeError("asked to fail")
        self.num_ahead += bool(self._launched)
        step = LateStep(self, batch, fails=self.fails_later)
        self.fails_later = False
        self._launched.append(step)
        assert len(self._launched) <= 2, "more than one step ahead"
        return step

    def compute(self, step: LateStep) -> list[int]:
        assert self._launched.popleft() is step, "steps are waited for in their order"
        if step.fails:
            self._drawn, self._has_failed = [2] * len(step.batch.sampled), True
            raise RuntimeError("asked to fail later")
        self._drawn = self.run(Batch(tuple(map(self._known, step.batch.scheduled)), step.batch.sequences))
        return self._drawn

    def _known(self, item: ScheduledSequence) -> ScheduledSequence:
        """With the tokens that the step before drew."""
        if item.history is not None:
            assert all(token >= 0 for token in item.history.generated), "penalties need known tokens"
        if min(item.token_ids) >= 0:
            return item
        assert len(item.token_ids) == 1, "only a token that was just drawn is unknown"
        return replace(item, token_ids=(self._drawn[-1 - item.token_ids[0]],))

    def _draw(self, block_ids: list[int], end: int) -> int:
        try:
            return super()._draw(block_ids, end)
        except KeyError:  # the step before failed, and with it the sequence
            assert self._has_failed
            return 2


class LateStep:
    def __init__(self, runner: LateRunner, batch: Batch, *, fails: bool) -> None:
        self.batch, self.fails = batch, fails
        self._runner = runner

    def result(self) -> list[int]:
        return self._runner.compute(self)


class OverlappedMachine(EngineMachine):
    """The same random workloads, and failures that come to light late."""

    runner_class = LateRunner
    runner: LateRunner

    @precondition(lambda self: self.engine.has_work)
    @rule(is_late=st.booleans())
    def fail_a_step(self, is_late: bool) -> None:
        self.runner.fails_next, self.runner.fails_later = not is_late, is_late
        for _ in range(3):
            try:
                if self.engine.has_work:
                    self.outcome.book(self.engine.step())
            except StepError as error:
                self.ended_otherwise.update(error.request_ids)
        self.runner.fails_next = self.runner.fails_later = False


TestOverlappedMachine = OverlappedMachine.TestCase
TestOverlappedMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip


def test_a_runner_that_launches_gets_an_engine_that_is_ahead() -> None:
    runner = LateRunner()
    engine = build_fake_engine(runner=runner)
    assert isinstance(engine, OverlappedEngine)
    request = make_request((5, 6, 7), max_tokens=6)
    engine.add(request)
    assert engine.step() == []  # launched, and nothing to wait for yet
    outcome = run_to_end(engine)
    assert outcome.token_ids[request.request_id] == expected_tokens((5, 6, 7), 6)
    assert runner.num_ahead == 5
    assert len(runner.batches) == 6  # the last token is known to be the last, so no step too many


def test_the_token_after_the_end_token_is_thrown_away() -> None:
    tokens = expected_tokens((5, 6, 7), 4)
    runner = LateRunner()
    engine = build_fake_engine(runner=runner)
    request = make_request((5, 6, 7), max_tokens=9, stop_token_ids=(tokens[2],))
    outcome = run_to_end(engine, request)
    assert outcome.token_ids[request.request_id] == tokens[:3]
    assert outcome.reasons[request.request_id] is FinishReason.STOP
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert engine.stats().total_generated_tokens == 3


def test_penalties_are_waited_for_and_nothing_else_is() -> None:
    for penalty, num_ahead in ((0.5, 0), (0.0, 5)):
        runner = LateRunner()
        run_to_end(build_fake_engine(runner=runner), make_request(max_tokens=6, presence_penalty=penalty))
        assert runner.num_ahead == num_ahead


def test_a_failed_step_is_heard_of_once_and_the_next_goes_on() -> None:
    runner = LateRunner()
    engine = build_fake_engine(runner=runner, max_running=2)
    first, second = make_request((5, 6), max_tokens=8), make_request((7, 8), max_tokens=8)
    engine.add(first)
    runner.fails_later = True
    engine.step()
    engine.add(second)
    with pytest.raises(StepError) as failed:
        engine.step()  # launches a step with both, then hears that the one before failed
    assert failed.value.request_ids == [first.request_id]
    assert run_to_end(engine).token_ids == {second.request_id: expected_tokens((7, 8), 8)}
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


class FailsAfterPreemption(LateRunner):
    """Its first launch after a preemption fails."""

    def launch(self, batch: Batch) -> LateStep:
        self.fails_next = not self.has_failed and self.engine.stats().total_preemptions > 0
        self.has_failed = self.has_failed or self.fails_next
        return super().launch(batch)

    has_failed = False
    engine: Engine


def test_whoever_is_preempted_while_its_token_is_drawn_joins_again_only_when_that_is_known() -> None:
    """The failed launch gives the blocks back at once, so that there is room before the token is known."""
    runner = FailsAfterPreemption()
    engine = runner.engine = build_fake_engine(num_blocks=5, runner=runner)
    first, second = make_request((5, 6, 7), max_tokens=12), make_request((7, 8, 9), max_tokens=12)
    engine.add(first)
    engine.add(second)
    tokens: list[int] = []
    failed: list[str] = []
    while engine.has_work:
        try:
            tokens += [token for d in engine.step() if d.request_id == second.request_id for token in d.token_ids]
        except StepError as error:
            failed += error.request_ids
    assert failed == [first.request_id]
    assert tokens == expected_tokens((7, 8, 9), 12)
