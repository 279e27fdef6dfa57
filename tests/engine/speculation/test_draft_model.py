"""A draft model: it follows every sequence in blocks that it shares with the model, and is asked where that pays."""

from __future__ import annotations

import logging

import pytest

from app.engine.batch import ScheduledSequence, StepBatch, StepResult
from app.engine.engine import Engine
from app.engine.model_runner import ModelRunner
from app.engine.request import ModelInfo
from app.engine.speculation.draft_model import MAX_CATCH_UP_TOKENS, ModelDrafter
from tests.engine.test_steps_in_flight import LateRunner, LateStep
from tests.kit.engine import (
    EOS,
    VOCAB_SIZE,
    CountingRunner,
    EagerModelDrafter,
    FakeClock,
    MatchedRunner,
    Outcome,
    TimedEngine,
    TimedRunner,
    build_fake_engine,
    make_request,
    run_to_end,
)

pytestmark = pytest.mark.usefixtures("small_lengths")


class DraftRunner(CountingRunner):
    """Draws what a CountingRunner draws after the tokens in its own KV memory; at some positions another."""

    may_write_twice = True  # two sequences compute the same shared prefix

    def __init__(self, *, wrong_every: int = 0, clock: FakeClock | None = None, row_s: float = 0.0) -> None:
        super().__init__()
        self._wrong_every, self._clock, self._row_s = wrong_every, clock, row_s

    def run(self, batch: StepBatch) -> StepResult:
        if self._clock is not None:
            self._clock.advance(self._row_s * batch.num_tokens)
        return super().run(batch)

    def _draw(self, item: ScheduledSequence) -> int:
        drawn = super()._draw(item)
        return 3 if self._wrong_every and item.end % self._wrong_every == 0 else drawn


class MatchedDraftRunner(MatchedRunner):
    """A draft model that equals a MatchedRunner."""

    may_write_twice = True


def model_drafter(runner: ModelRunner | None = None, *, wrong_every: int = 0) -> ModelDrafter:
    model_info = ModelInfo(max_model_len=1000, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    return ModelDrafter(
        runner or DraftRunner(wrong_every=wrong_every), max_drafts=3, max_model_len=1000, model_info=model_info
    )


def timed(*, step_s: float, draft_s: float, wrong_every: int = 0, **scheduler: int) -> tuple[Engine, TimedRunner]:
    """An engine with steps of one length, and a draft model that takes so long for each token."""
    clock = FakeClock()
    runner = TimedRunner(clock, step_s=step_s)
    drafter = model_drafter(DraftRunner(wrong_every=wrong_every, clock=clock, row_s=draft_s))
    return build_fake_engine(num_blocks=2000, runner=runner, clock=clock, drafter=drafter, **scheduler), runner


def test_all_drafts_of_a_model_that_draws_the_same_are_kept_with_shared_prefixes_and_preemptions() -> None:
    timed = TimedEngine(num_blocks=14, drafter=model_drafter(), max_running=4)
    shared = tuple(range(5, 17))
    requests = [make_request((*shared, 20 + number), max_tokens=12 + number) for number in range(10)]
    timed.finish(*requests).check(*requests)
    stats = timed.stats
    assert stats.total_preemptions > 0
    assert stats.total_cached_tokens > 0
    assert stats.total_drafted_tokens == stats.total_accepted_tokens > 50
    assert stats.num_free_blocks == stats.num_blocks


def test_what_the_draft_model_computes_again_of_a_shared_prefix_disturbs_no_sequence_that_has_it() -> None:
    drafting = DraftRunner()
    engine = build_fake_engine(drafter=model_drafter(drafting), clock=FakeClock())
    prompt = tuple(range(5, 21))
    engine.add(make_request(prompt, max_tokens=40))
    for _ in range(4):
        engine.step()
    engine.add(make_request((*prompt, 30), max_tokens=20))
    run_to_end(engine)
    assert engine.stats().total_cached_tokens == len(prompt)
    first, *others = [item for batch in drafting.batches for item in batch.scheduled if item.start == 0]
    assert [len(item.token_ids) >= len(prompt) for item in others] == [True], "once for each sequence"
    assert others[0].block_ids[:4] == first.block_ids[:4]
    stats = engine.stats()
    assert stats.total_drafted_tokens == stats.total_accepted_tokens > 30


def test_where_the_draft_model_takes_longer_than_it_saves_only_probes_are_drafted_for() -> None:
    engine, runner = timed(step_s=0.01, draft_s=0.002, max_running=16, max_step_tokens=64)
    run_to_end(engine, *(make_request((9,), max_tokens=400) for _ in range(16)))
    with_drafts = [batch.has_drafts for batch in runner.batches]
    assert 0 < sum(with_drafts[:20]) <= 6, "until it is known what a draft takes"
    assert sum(with_drafts[20:]) <= 3, "each probe after twice as many steps"


def test_where_the_draft_model_is_fast_it_drafts_in_nearly_all_steps() -> None:
    engine, runner = timed(step_s=0.01, draft_s=0.0005, max_running=1)
    run_to_end(engine, make_request((9,), max_tokens=400))
    assert len(runner.batches) < 150
    assert sum(batch.has_drafts for batch in runner.batches[10:]) > 0.9 * len(runner.batches[10:])


def test_a_draft_model_that_draws_others_is_hardly_asked() -> None:
    engine, runner = timed(step_s=0.01, draft_s=0.002, wrong_every=1, max_running=1)
    request = make_request((9,), max_tokens=600)
    run_to_end(engine, request).check(request)
    stats = engine.stats()
    assert stats.total_accepted_tokens < 0.1 * stats.total_drafted_tokens
    assert sum(batch.has_drafts for batch in runner.batches[100:]) <= 4


def test_long_prompts_are_caught_up_with_in_chunks_those_that_lack_the_fewest_first() -> None:
    drafting = DraftRunner()
    limits = {"num_blocks": 600, "max_step_tokens": 600, "prefill_chunk_tokens": 600}
    engine = build_fake_engine(drafter=model_drafter(drafting), clock=FakeClock(), **limits)
    short = make_request(tuple(range(5, 25)), max_tokens=100, request_id="short")
    long = make_request(tuple(range(2, 45)) * 13, max_tokens=100, request_id="long")
    run_to_end(engine, long, short)
    first, second, *_ = [batch for batch in drafting.batches if batch.num_tokens > 10]
    assert [item.request_id for item in first.scheduled if item.samples] == ["short"]
    assert sum(item.start == 0 for item in second.scheduled) == 0
    assert max(batch.num_tokens for batch in drafting.batches) <= MAX_CATCH_UP_TOKENS + 4
    stats = engine.stats()
    assert stats.total_drafted_tokens == stats.total_accepted_tokens > 100


def test_a_prompt_that_is_long_beside_what_is_expected_after_it_is_not_caught_up_with() -> None:
    drafting = DraftRunner()
    engine = build_fake_engine(num_blocks=600, drafter=model_drafter(drafting), clock=FakeClock(), max_step_tokens=600)
    run_to_end(engine, make_request(tuple(range(2, 45)) * 3, max_tokens=8))
    assert drafting.batches == []


def test_a_sequence_beyond_what_the_draft_model_can_compute_is_not_drafted_for() -> None:
    drafting = DraftRunner()
    model_info = ModelInfo(max_model_len=1000, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    drafter = EagerModelDrafter(drafting, max_drafts=4, max_model_len=20, model_info=model_info)
    engine = build_fake_engine(drafter=drafter)
    request = make_request(max_tokens=40)
    run_to_end(engine, request).check(request)
    assert max(item.end for batch in drafting.batches for item in batch.scheduled) == 20


def test_a_draft_model_that_fails_ends_speculation_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    class FailingRunner(DraftRunner):
        def run(self, batch: StepBatch) -> StepResult:
            if len(self.batches) == 5:
                raise RuntimeError("no memory")
            return super().run(batch)

    engine = build_fake_engine(drafter=model_drafter(FailingRunner()), clock=FakeClock())
    request = make_request(max_tokens=40)
    with caplog.at_level(logging.ERROR):
        run_to_end(engine, request).check(request)
    (record,) = caplog.records
    assert record.getMessage().startswith("the draft model failed; serving continues without drafts: RuntimeError")


class SleepyRunner(DraftRunner):
    """Notes when it sleeps and wakes; it can fail to wake."""

    def __init__(self, *, wakes: bool = True) -> None:
        super().__init__()
        self._wakes = wakes
        self.told: list[str] = []

    def sleep(self) -> None:
        self.told.append("sleep")
        self._slots.clear()

    def wake(self) -> None:
        if not self._wakes:
            raise RuntimeError("no memory")
        self.told.append("wake")


def test_where_the_draft_model_does_not_wake_the_model_gives_its_memory_up_again() -> None:
    runner = SleepyRunner()
    engine = build_fake_engine(runner=runner, drafter=model_drafter(SleepyRunner(wakes=False)))
    engine.sleep()
    with pytest.raises(RuntimeError, match="no memory"):
        engine.wake()
    assert engine.is_asleep
    assert runner.told == ["sleep", "wake", "sleep"]


def test_the_draft_model_sleeps_and_wakes_with_the_engine() -> None:
    drafting = SleepyRunner()
    engine = build_fake_engine(drafter=model_drafter(drafting), clock=FakeClock())
    request, outcome = make_request(max_tokens=40), Outcome()
    engine.add(request)
    for _ in range(5):
        outcome.book(engine.step())
    engine.sleep()
    assert drafting.told == ["sleep"]
    engine.wake()
    run_to_end(engine, outcome=outcome).check(request)
    assert drafting.told == ["sleep", "wake"]
    stats = engine.stats()
    assert stats.total_drafted_tokens == stats.total_accepted_tokens > 10


class FailingLaunch(LateRunner):
    """Fails the second launch of a step with drafts."""

    num_launches = 0

    def launch(self, batch: StepBatch) -> LateStep:
        self.num_launches += batch.has_drafts
        if batch.has_drafts and self.num_launches == 2:
            raise RuntimeError("asked to fail")
        return super().launch(batch)


def test_after_a_failed_launch_drafts_continue_from_the_sequence_s_last_token() -> None:
    runner = DraftRunner()
    engine = build_fake_engine(num_blocks=200, runner=FailingLaunch(), drafter=model_drafter(runner))
    outcome = run_to_end(engine, make_request((5, 6, 7), max_tokens=40))
    assert outcome is not None
    assert all(item.token_ids for batch in runner.batches for item in batch.scheduled)
    assert engine.stats().total_accepted_tokens > 0
