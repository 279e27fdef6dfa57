"""An engine that is a step ahead of its device, on a fake device that computes as late as it may."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from msgspec import structs

from app.config import SchedulerConfig
from app.engine.batch import DeviceLost, ScheduledSequence, StepBatch, StepResult
from app.engine.engine import StepError
from app.engine.request import FinishReason, Pooling
from app.errors import DeadlineMissed
from tests.engine.test_invariants import EngineMachine, FailingOnDemand
from tests.kit.engine import (
    POOLINGS_OF_DECODERS,
    BrokenPromise,
    FakeClock,
    Outcome,
    build_fake_engine,
    expected_embedding,
    expected_tokens,
    make_request,
    run_to_end,
)


class LateRunner(FailingOnDemand):
    """Computes a step only when its result is asked for: by then the next one has been scheduled.

    `fails_next` fails a launch; `fails_later` fails the step that is launched next when it is waited for.
    """

    fails_next = False
    launches = True
    fails_drawing = False  # of the next step of which the tokens are drawn after its launch

    def __init__(self, clock: FakeClock | None = None, *, block_size: int = 4) -> None:
        super().__init__(clock or FakeClock(), block_size=block_size)
        self.fails_later = False
        self.num_ahead = 0  # steps launched while another ran
        self._launched: deque[LateStep] = deque()
        self._drawn: list[int] = []  # by the step before
        self._has_failed = False
        self._behind_failure: list[LateStep] = []  # launched before a failure came to light; the engine discards them
        self.num_prepared = 0

    def prepare(self) -> None:
        self.num_prepared += 1

    def launch(self, batch: StepBatch) -> LateStep:
        if self.fails_next:
            self.fails_next = False
            raise RuntimeError("asked to fail")
        self.num_ahead += bool(self._launched)
        step = LateStep(self, batch, fails=self.fails_later)
        self.fails_later = False
        self._launched.append(step)
        assert len(self._launched) <= 2, "more than one step ahead"
        return step

    def forget(self, step: LateStep) -> None:
        self._launched.remove(step)

    def compute(self, step: LateStep) -> StepResult:
        assert self._launched.popleft() is step, "steps are waited for in their order"
        known = replace(step.batch, scheduled=tuple(map(self._known, step.batch.scheduled)))
        try:
            if step.fails:
                raise RuntimeError("asked to fail later")
            result = self.run(known)
        except (RuntimeError, BrokenPromise) as error:
            self._drawn, self._has_failed = [2] * len(known.sampled), True
            if isinstance(error, BrokenPromise) and step in self._behind_failure:
                raise RuntimeError("the step before has not written what this one reads") from error
            self._behind_failure = list(self._launched)
            raise
        self._drawn = result.token_ids
        return result

    def _known(self, item: ScheduledSequence) -> ScheduledSequence:
        """With the tokens that the step before drew."""
        if min(item.token_ids) >= 0:
            return item
        assert len(item.token_ids) == 1, "only a token that was just drawn is unknown"
        return structs.replace(item, token_ids=(self._drawn[-1 - item.token_ids[0]],))

    def _draw(self, item: ScheduledSequence) -> int:
        try:
            return super()._draw(item)
        except KeyError:  # the step before failed, and with it the sequence
            assert self._has_failed
            return 2


class LateStep:
    def __init__(self, runner: LateRunner, batch: StepBatch, *, fails: bool) -> None:
        self.batch, self.fails = batch, fails
        self._runner = runner

    def draw(self, batch: StepBatch) -> None:
        assert self.batch.lacks_history
        assert not batch.lacks_history
        if self._runner.fails_drawing:
            self._runner.fails_drawing = False
            self._runner.forget(self)
            raise RuntimeError("asked to fail when tokens are drawn")
        self.batch = batch

    def result(self) -> StepResult:
        assert not self.batch.lacks_history, "its tokens were never drawn"
        return self._runner.compute(self)


class OverlappedMachine(EngineMachine):
    """The same random workloads, and failures that come to light late."""

    runner_class = LateRunner
    runner: LateRunner

    @precondition(lambda self: self.engine.has_work)
    @rule(when=st.sampled_from(["launch", "draw", "result"]))
    def fail_a_step(self, when: str) -> None:
        self.runner.fails_next, self.runner.fails_later = when == "launch", when == "result"
        self.runner.fails_drawing = when == "draw"
        for _ in range(3):
            if self.engine.has_work:
                self.outcome.book(self.engine.step())
        self.runner.fails_next = self.runner.fails_later = self.runner.fails_drawing = False


TestOverlappedMachine = OverlappedMachine.TestCase
TestOverlappedMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip


def test_a_runner_that_launches_gets_an_engine_that_is_ahead() -> None:
    runner = LateRunner()
    engine = build_fake_engine(runner=runner)
    assert engine.runner.launches
    request = make_request((5, 6, 7), max_tokens=6)
    engine.add(request)
    assert engine.step() == []  # launched, and nothing to wait for yet
    run_to_end(engine).check(request)
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


@pytest.mark.parametrize("is_late", [False, True])
def test_a_lost_device_is_not_tried_again(*, is_late: bool) -> None:
    class LosingRunner(LateRunner):
        num_losses = 0

        def launch(self, batch: StepBatch) -> LateStep:
            self.num_losses += not is_late
            if not is_late:
                raise DeviceLost("gone")
            return super().launch(batch)

        def compute(self, step: LateStep) -> StepResult:
            self.num_losses += 1
            raise DeviceLost("gone")

    runner = LosingRunner()
    engine = build_fake_engine(runner=runner)
    with pytest.raises(DeviceLost):
        run_to_end(engine, make_request((5, 6, 7), max_tokens=6))
    assert runner.num_losses == 1


def test_the_runner_is_prepared_with_its_engine() -> None:
    runner = LateRunner()
    build_fake_engine(runner=runner).prepare()
    assert runner.num_prepared == 1


@pytest.mark.parametrize("fails_drawing", [False, True])
def test_a_penalty_stops_no_launch_and_its_draws_know_all_tokens_before_them(*, fails_drawing: bool) -> None:
    """The runner checks what is deducted at every draw."""
    runner = LateRunner()
    runner.fails_drawing = fails_drawing
    engine = build_fake_engine(runner=runner)
    penalised = make_request((5, 6, 7), max_tokens=6, presence_penalty=0.5)
    others = [make_request((5, 6, 8 + n), max_tokens=6) for n in range(3)]
    outcome = run_to_end(engine, penalised, *others)
    assert not outcome.errors
    outcome.check(penalised, *others)
    assert runner.num_ahead == 5 - fails_drawing
    assert len(runner.deductions) >= 6
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_request_that_ends_is_drawn_for_once_more_without_its_penalties() -> None:
    tokens = expected_tokens((5, 6, 7), 4)
    engine = build_fake_engine(runner=LateRunner())
    request = make_request((5, 6, 7), max_tokens=9, presence_penalty=0.5, stop_token_ids=(tokens[2],))
    assert run_to_end(engine, request).token_ids[request.request_id] == tokens[:3]
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_step_that_fails_once_is_computed_again_with_the_same_tokens() -> None:
    for fails in ("fails_next", "fails_later"):
        runner = LateRunner()
        engine = build_fake_engine(runner=runner, max_running=2)
        first, second = make_request((5, 6), max_tokens=8), make_request((7, 8), max_tokens=8)
        engine.add(first)
        engine.step()
        setattr(runner, fails, True)
        outcome = run_to_end(engine, second)
        assert not outcome.errors
        outcome.check(first, second)
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
        assert engine.stats().total_generated_tokens == 16


def test_a_poisonous_request_fails_alone_though_steps_were_launched_ahead() -> None:
    runner = LateRunner()
    engine = build_fake_engine(runner=runner)
    good = [make_request((5, 6, n), max_tokens=9) for n in range(4)]
    bad = make_request((7, 8), max_tokens=9)
    for request in (*good[:2], bad, *good[2:]):
        engine.add(request)
    outcome = Outcome()
    for _ in range(4):
        outcome.book(engine.step())
    runner.poison = bad.request_id  # after some tokens
    run_to_end(engine, outcome=outcome)
    assert set(outcome.errors) == {bad.request_id}
    assert outcome.token_ids[bad.request_id] == expected_tokens((7, 8), 9)[: len(outcome.token_ids[bad.request_id])]
    outcome.check(*good)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_broken_device_fails_the_requests_of_its_step_and_no_others() -> None:
    runner = LateRunner()
    engine = build_fake_engine(runner=runner, max_running=1)
    first, second = make_request((5, 6), max_tokens=8), make_request((7, 8), max_tokens=8)
    engine.add(first)
    engine.add(second)
    engine.step()
    runner.is_broken = True
    failed: list[str] = []
    while not failed:
        try:
            engine.step()
        except StepError as error:
            failed = error.request_ids
    runner.is_broken = False
    assert failed == [first.request_id]
    assert run_to_end(engine).token_ids == {second.request_id: expected_tokens((7, 8), 8)}


def test_a_missed_deadline_ends_a_request_while_steps_are_launched_ahead() -> None:
    clock = FakeClock()
    engine = build_fake_engine(runner=LateRunner(clock), clock=clock)
    slow, other = make_request((5, 6), max_tokens=90, deadline_s=0.055), make_request((7, 8), max_tokens=9)
    outcome = run_to_end(engine, slow, other, clock=clock)
    assert isinstance(outcome.errors[slow.request_id], DeadlineMissed)
    assert 0 < len(outcome.token_ids[slow.request_id]) <= 5
    outcome.check(other)


@pytest.mark.parametrize("pooling", POOLINGS_OF_DECODERS)
def test_an_embedding_is_whole_though_its_request_is_preempted_while_its_last_step_is_computed(
    pooling: Pooling,
) -> None:
    num_preempted = 0
    for num_generated in range(1, 12):
        engine = build_fake_engine(runner=LateRunner(), num_blocks=5, prefill_chunk_tokens=4, policy="fcfs")
        first = make_request((5, 6, 7), max_tokens=16)  # takes a block more, now and then
        pooled = make_request(tuple(range(8, 20)), pooling=pooling, max_tokens=0)
        engine.add(first)
        outcome = Outcome()
        for _ in range(num_generated):
            outcome.book(engine.step())
        engine.add(pooled)
        outcome = run_to_end(engine)
        num_preempted += engine.stats().total_preemptions
        assert outcome.embeddings == {pooled.request_id: expected_embedding(pooled.prompt_token_ids, pooling)}
    assert num_preempted


def test_the_tokens_of_a_step_do_not_count_for_a_sequence_that_was_preempted_since() -> None:
    """The sequence joins the next step before the result of the first step is there."""
    limits = {"max_step_tokens": 8, "prefill_chunk_tokens": 4}
    engine = build_fake_engine(runner=LateRunner(), max_running=2, **limits)
    first, second = make_request(tuple(range(5, 15)), max_tokens=3), make_request(tuple(range(6, 16)), max_tokens=3)
    engine.add(first)
    engine.add(second)
    engine.step()
    for max_running in (1, 2):
        engine.reconfigure(SchedulerConfig(max_running=max_running, **limits))
    engine.step()
    current, preempted = engine.running
    assert (current.num_computed_tokens, len(current.prefixes)) == (8, 1)
    assert (preempted.num_computed_tokens, len(preempted.prefixes)) == (4, 0)
    assert 0 < preempted.epoch == engine._scheduler._running.epoch
    run_to_end(engine).check(first, second)
