"""Drafts of an engine: the tokens stay the same, and their number follows what they bring."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from app.engine.batch import ScheduledSequence, StepBatch, StepResult
from app.engine.engine import Engine
from app.engine.model_runner import ModelRunner
from app.engine.request import FinishReason, Grammar, GrammarKind, Request
from app.engine.speculation.drafter import Drafter, LookupDrafter
from app.engine.speculation.prompt_lookup import PromptLookup, SequenceDrafts
from tests.engine.speculation.test_draft_model import MatchedDraftRunner, model_drafter
from tests.engine.test_combinations import STRATEGIES, workload
from tests.engine.test_matcher import LateMatchedRunner
from tests.engine.test_steps_in_flight import LateRunner, LateStep
from tests.kit.engine import (
    POLICIES,
    CountingRunner,
    FakeClock,
    KnowingDrafter,
    MadeMatchers,
    MatchedRunner,
    Outcome,
    TimedEngine,
    build_fake_engine,
    make_request,
    run_to_end,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("small_lengths")


class CyclingRunner(CountingRunner):
    """Draws 5, 6, 7, 8 in turn, by the position; a step takes time by its rows."""

    def __init__(self, clock: FakeClock, *, base_s: float, row_s: float) -> None:
        super().__init__()
        self._clock, self._base_s, self._row_s = clock, base_s, row_s

    def run(self, batch: StepBatch) -> StepResult:
        super().run(batch)
        self._clock.advance(self._base_s + self._row_s * batch.num_tokens)
        return StepResult([5 + item.end % 4 for item in batch.sampled])


def cycling(*, base_s: float, row_s: float, max_drafts: int = 4) -> tuple[Engine, CyclingRunner, FakeClock]:
    clock = FakeClock()
    runner = CyclingRunner(clock, base_s=base_s, row_s=row_s)
    engine = build_fake_engine(
        num_blocks=600, runner=runner, clock=clock, drafter=LookupDrafter(max_drafts), max_step_tokens=200
    )
    return engine, runner, clock


def test_text_that_repeats_takes_fewer_steps_where_rows_are_free() -> None:
    engine, runner, _ = cycling(base_s=0.01, row_s=0.0)
    outcome = run_to_end(engine, make_request((9,), max_tokens=200, request_id="one"))
    assert outcome.token_ids["one"] == [5 + place % 4 for place in range(1, 201)]
    assert len(runner.batches) < 70
    stats = engine.stats()
    assert stats.total_generated_tokens == 200
    assert stats.total_accepted_tokens == 200 - len(runner.batches)
    assert stats.total_drafted_tokens >= stats.total_accepted_tokens > 120


def test_only_probes_have_drafts_where_a_step_is_bound_by_computing() -> None:
    engine, runner, _ = cycling(base_s=0.0, row_s=0.01)
    run_to_end(engine, *(make_request((9,), max_tokens=300) for _ in range(8)))
    with_drafts = [batch.has_drafts for batch in runner.batches]
    assert 0 < sum(with_drafts[:20]) <= 5, "until it is known what a draft takes"
    assert sum(with_drafts[20:]) <= 1 + len(with_drafts) / 64, "probes"


def asking(text: str, **sampling: Any) -> Request:
    grammar = Grammar(GrammarKind.REGEX, text)
    return make_request(request_id=text, grammar=grammar, **{"max_tokens": 30} | sampling)


@pytest.mark.parametrize("make_runner", [MatchedRunner, LateMatchedRunner])
@pytest.mark.parametrize(
    "make_drafter",
    [lambda: LookupDrafter(4), lambda: KnowingDrafter(3), lambda: model_drafter(MatchedDraftRunner())],
    ids=["forced", "wrong", "draft_model"],
)
def test_a_grammar_has_the_same_tokens_and_the_same_end_with_drafts(
    make_drafter: Callable[[], Drafter], make_runner: Callable[[], ModelRunner]
) -> None:
    requests = [
        asking("3 4 5 6"),
        asking("7 8", frequency_penalty=0.5),
        asking("9 10 11 !"),
        make_request(max_tokens=9),
    ]
    drafter = make_drafter()
    plain, drafting = (
        build_fake_engine(runner=make_runner(), clock=FakeClock(), drafter=each) for each in (None, drafter)
    )
    outcomes = []
    for engine in (plain, drafting):
        for request in requests:
            engine.add(request, matcher=MadeMatchers().matcher_of(request).result())
        outcomes.append(run_to_end(engine))
    assert outcomes[0].token_ids == outcomes[1].token_ids
    assert outcomes[0].reasons == outcomes[1].reasons
    assert outcomes[1].reasons["9 10 11 !"] is FinishReason.ERROR
    assert drafting.stats().total_drafted_tokens > 0
    if not isinstance(drafter, KnowingDrafter):
        assert drafting.stats().total_steps < plain.stats().total_steps / 2


def test_no_draft_goes_beyond_max_tokens_and_none_shares_a_step_with_a_prompt() -> None:
    engine, runner, _ = cycling(base_s=0.01, row_s=0.0)
    outcome = run_to_end(engine, make_request((9,), max_tokens=21, request_id="one"))
    assert len(outcome.token_ids["one"]) == 21
    assert outcome.reasons["one"] is FinishReason.LENGTH
    for batch in runner.batches:
        assert not batch.has_drafts or all(sequence.num_generated_tokens for sequence in batch.sequences)


def test_an_end_token_among_drafts_ends_the_request_there() -> None:
    engine, _, _ = cycling(base_s=0.01, row_s=0.0)
    prompt = (5, 6, 7, 8, 9, 10, 5, 6, 7)
    outcome = run_to_end(engine, make_request(prompt, max_tokens=50, request_id="one", stop_token_ids=(8,)))
    assert outcome.token_ids["one"][-1] == 8
    assert outcome.token_ids["one"].count(8) == 1
    assert outcome.reasons["one"] is FinishReason.STOP


@pytest.mark.parametrize("make_runner", [CountingRunner, LateRunner])
@pytest.mark.parametrize(
    "make_drafter", [lambda: KnowingDrafter(3), lambda: model_drafter(wrong_every=6)], ids=["known", "draft_model"]
)
@pytest.mark.parametrize(
    "sampling",
    [{"presence_penalty": 0.5}, {"repetition_penalty": 1.5}, {"bad_words": ((30, 31),)}, {"min_tokens": 60}],
    ids=lambda sampling: next(iter(sampling)),
)
def test_a_draw_that_depends_on_the_tokens_before_it_sees_the_drafts_among_them(
    sampling: dict[str, object], make_drafter: Callable[[], Drafter], make_runner: Callable[[], ModelRunner]
) -> None:
    engine = build_fake_engine(runner=make_runner(), drafter=make_drafter(), clock=FakeClock())
    request = make_request(max_tokens=60, **sampling)
    run_to_end(engine, request).check(request)
    assert engine.stats().total_accepted_tokens > 30


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy["name"])
def test_the_tokens_are_the_same_under_every_strategy_and_policy(strategy: object, policy: str) -> None:
    requests, limits = workload()[:32], {"num_blocks": 14, "max_running": 6, "max_waiting": 100}
    timed = TimedEngine(strategy=strategy, policy=policy, drafter=model_drafter(wrong_every=5), **limits)
    timed.finish(*requests).check(*requests)
    stats = timed.stats
    assert stats.total_preemptions > 0
    assert stats.total_drafted_tokens > stats.total_accepted_tokens > 0
    assert stats.num_free_blocks == stats.num_blocks


def test_drafts_take_no_block_while_others_wait_for_blocks() -> None:
    engine = build_fake_engine(num_blocks=6, drafter=KnowingDrafter(3), max_running=4)
    for _ in range(4):
        engine.add(make_request(max_tokens=12))
    most = 0
    while engine.has_work:
        engine.step()
        running = engine.running
        if engine.stats().num_waiting:
            most = max([most, *(len(each.blocks) * 4 - each.num_computed_tokens for each in running)])
    assert most <= 4, "no block beside the one that the next token needs"


def test_acceptance_follows_what_is_kept_and_a_long_match_is_tried_all_the_same() -> None:
    drafts = SequenceDrafts(PromptLookup(tuple(range(20)) * 2))
    for _ in range(30):
        drafts.note(4, 0)
    assert drafts.num_worthwhile(0.3) == 0
    assert drafts.lookup.has_match()
    assert drafts.num_worthwhile(0.3) == 3
    for _ in range(30):
        drafts.note(4, 4)
    assert drafts.num_worthwhile(0.3) > 8
    assert drafts.num_worthwhile(1.0) == 0


def test_a_preempted_sequence_gives_its_index_up() -> None:
    engine, _, _ = cycling(base_s=0.01, row_s=0.0)
    engine.add(make_request((9,), max_tokens=40))
    for _ in range(8):
        engine.step()
    (sequence,) = engine.running
    assert sequence.drafts is not None
    sequence.take_blocks()
    assert sequence.drafts is None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy["name"])
def test_the_tokens_are_the_same_where_steps_without_drafts_are_launched_ahead(strategy: object, policy: str) -> None:
    clock, requests = FakeClock(), workload()[:32]
    runner = LateRunner(clock)
    engine = build_fake_engine(
        num_blocks=14, max_running=6, max_waiting=100, runner=runner, clock=clock, strategy=strategy, policy=policy,
        drafter=KnowingDrafter(3),
    )  # fmt: skip
    run_to_end(engine, *requests, clock=clock).check(*requests)
    stats = engine.stats()
    assert stats.total_preemptions > 0
    assert stats.total_drafted_tokens > stats.total_accepted_tokens > 0
    assert runner.num_ahead > 0
    assert stats.num_free_blocks == stats.num_blocks


class PacedRunner(LateRunner):
    """A device that takes 10 ms for a step, and a host that takes `host_s` to launch it; the host's time shows where
    the device waits for it. Some requests draw 5, 6, 7, 8 in turn."""

    def __init__(self, repeating: set[str], *, host_s: float) -> None:
        self.clock = FakeClock()
        super().__init__(self.clock)
        self._step_s, self._host_s, self._repeating = 0.0, host_s, repeating
        self._free_at = 0.0
        self._ends_at: deque[float] = deque()

    def launch(self, batch: StepBatch) -> LateStep:
        self.clock.advance(self._host_s)
        self._free_at = max(self._free_at, self.clock()) + 0.01
        self._ends_at.append(self._free_at)
        return super().launch(batch)

    def compute(self, step: LateStep) -> StepResult:
        self.clock.advance(max(0.0, self._ends_at.popleft() - self.clock()))
        return super().compute(step)

    def _draw(self, item: ScheduledSequence) -> int:
        return 5 + item.end % 4 if item.request_id in self._repeating else super()._draw(item)

    @property
    def num_waits(self) -> int:
        return sum(batch.launched_alone for batch in self.batches)


def launched(
    num_sequences: int, num_repeating: int, *, host_s: float, drafter: Drafter | None, prediction: tuple[int, ...] = ()
) -> tuple[PacedRunner, Engine]:
    """So many requests of 120 tokens, some of which repeat themselves."""
    runner = PacedRunner({str(number) for number in range(num_repeating)}, host_s=host_s)
    engine = build_fake_engine(
        num_blocks=2000, runner=runner, clock=runner.clock, drafter=drafter, max_running=128, max_step_tokens=256
    )
    requests = [
        replace(make_request((9, 10 + number), max_tokens=120, request_id=str(number)), prediction_token_ids=prediction)
        for number in range(num_sequences)
    ]
    run_to_end(engine, *requests).check(*requests[num_repeating:])
    return runner, engine


@pytest.mark.parametrize(
    ("num_sequences", "num_repeating", "most_launches"),
    [(1, 1, 45), (8, 1, 120), (8, 8, 45), (32, 1, 120), (32, 32, 85)],
)
def test_launches_become_fewer_where_that_is_worth_that_the_device_waits(
    num_sequences: int, num_repeating: int, most_launches: int
) -> None:
    plain, _ = launched(num_sequences, num_repeating, host_s=0.003, drafter=None)
    runner, engine = launched(num_sequences, num_repeating, host_s=0.003, drafter=LookupDrafter())
    stats = engine.stats()
    assert (len(plain.batches), plain.num_waits) == (120, 1)
    assert len(runner.batches) <= most_launches
    assert runner.clock.at - 100 <= 1.03 * (plain.clock.at - 100)
    assert stats.total_accepted_tokens > 0


@pytest.mark.parametrize("num_right", [1, 2])
def test_hopes_that_fail_and_drafts_that_are_rejected_make_few_steps_wait(num_right: int) -> None:
    """Of three tokens of the prediction one comes at its place, or two: then a draft behind the second is computed."""
    tokens = tokens_of(make_request((9, 10), max_tokens=120))
    prediction = tuple(token if place % 3 < num_right else 2 + (token - 1) % 48 for place, token in enumerate(tokens))
    plain, _ = launched(1, 0, host_s=0.003, drafter=None, prediction=prediction)
    runner, engine = launched(1, 0, host_s=0.003, drafter=LookupDrafter(), prediction=prediction)
    assert num_right == 1 or engine.stats().total_drafted_tokens > 0
    assert 1 < runner.num_waits <= 12
    assert runner.clock.at - 100 <= 1.05 * (plain.clock.at - 100)


def test_behind_a_step_that_has_waited_for_nothing_the_next_is_launched_ahead() -> None:
    class EmptyDrafter(KnowingDrafter):
        def draft_of(self, sequence: object) -> list[int]:
            return []

    runner, _ = launched(1, 0, host_s=0.003, drafter=EmptyDrafter(3))
    assert [batch.launched_alone for batch in runner.batches] == [True, False] * 60


def test_a_step_with_drafts_has_no_more_rows_than_requests_may_run_and_no_more_drafts_than_a_graph_holds() -> None:
    for max_running, num_sequences, most in ((9, 6, 9), (9, 9, 9), (200, 9, 73)):
        runner = PacedRunner({str(number) for number in range(num_sequences)}, host_s=0.0)
        engine = build_fake_engine(
            num_blocks=2000, runner=runner, clock=runner.clock, drafter=LookupDrafter(), max_running=max_running,
            max_step_tokens=256,
        )  # fmt: skip
        requests = [make_request((9,), max_tokens=60, request_id=str(number)) for number in range(num_sequences)]
        run_to_end(engine, *requests)
        decoding = [batch.num_tokens for batch in runner.batches[1:]]
        assert max(decoding) == most


@pytest.mark.parametrize("fails", ["fails_next", "fails_later"])
def test_a_step_that_fails_once_is_computed_again_whether_it_has_drafts(fails: str) -> None:
    num_drafted = 0
    for num_steps in range(2, 14):
        clock = FakeClock()
        runner = LateRunner(clock)
        engine = build_fake_engine(runner=runner, clock=clock, drafter=KnowingDrafter(3))
        requests = [make_request((5, 6), max_tokens=16), make_request((7, 8), max_tokens=16, presence_penalty=0.5)]
        for request in requests:
            engine.add(request)
        outcome = Outcome()
        for _ in range(num_steps):
            outcome.book(engine.step())
        setattr(runner, fails, True)
        run_to_end(engine, outcome=outcome).check(*requests)
        num_drafted += engine.stats().total_drafted_tokens
        assert not outcome.errors
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert num_drafted


def predicting(request: Request, *, num_wrong: int = 0) -> Request:
    """With what it will generate as its prediction, in which so many tokens are others."""
    tokens = tokens_of(request)
    for place in range(3, len(tokens), max(1, len(tokens) // (num_wrong or 1))) if num_wrong else ():
        tokens[place] = 2 + tokens[place] % 40
    return replace(request, prediction_token_ids=tuple(tokens))


def predictions_only(**settings: Any) -> Engine:
    return build_fake_engine(drafter=LookupDrafter(only_predictions=True), clock=FakeClock(), **settings)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy["name"])
def test_predictions_change_no_token_under_any_strategy_and_policy(strategy: object, policy: str) -> None:
    requests = [
        predicting(request, num_wrong=number % 3) if number % 2 else request
        for number, request in enumerate(workload()[:32])
    ]
    limits = {"num_blocks": 14, "max_running": 6, "max_waiting": 100}
    timed = TimedEngine(strategy=strategy, policy=policy, drafter=LookupDrafter(only_predictions=True), **limits)
    timed.finish(*requests).check(*requests)
    stats, outcome = timed.stats, timed.outcome
    assert stats.total_preemptions > 0
    assert stats.total_drafted_tokens > stats.total_accepted_tokens > 0
    assert stats.num_free_blocks == stats.num_blocks
    assert set(outcome.predicted) <= {request.request_id for request in requests if request.prediction_token_ids}


def test_what_is_predicted_takes_few_steps_and_is_counted() -> None:
    engine = predictions_only()
    request = predicting(make_request(max_tokens=80, request_id="one"))
    outcome = run_to_end(engine, request)
    outcome.check(request)
    stats = engine.stats()
    assert stats.total_steps < 20
    accepted, rejected = outcome.predicted["one"]
    assert (accepted + rejected, accepted) == (stats.total_drafted_tokens, stats.total_accepted_tokens)
    assert accepted == 80 - stats.total_steps
    assert rejected == 0


def test_a_prediction_of_something_else_costs_its_drafts_only() -> None:
    engine = predictions_only()
    request = make_request(max_tokens=80, request_id="one")
    request = replace(request, prediction_token_ids=(tokens_of(request)[0], *(30,) * 200))
    outcome = run_to_end(engine, request)
    outcome.check(request)
    accepted, rejected = outcome.predicted["one"]
    assert 8 <= rejected < 80
    assert accepted < rejected


def test_only_a_request_with_a_prediction_is_drafted_for_where_the_settings_say_off() -> None:
    engine = predictions_only()
    copied = make_request((5, 6, 7, 8) * 6, max_tokens=40)
    outcome = run_to_end(engine, copied, asked := predicting(make_request(max_tokens=40, request_id="asked")))
    outcome.check(copied, asked)
    assert list(outcome.predicted) == ["asked"]
    assert engine.stats().total_drafted_tokens == sum(outcome.predicted["asked"])
    for _ in range(3):
        run_to_end(engine, make_request((5, 6, 7, 8) * 6, max_tokens=40))
    assert engine.stats().total_drafted_tokens == sum(outcome.predicted["asked"])


@pytest.mark.parametrize("drafter", [LookupDrafter(), LookupDrafter(only_predictions=True)], ids=["lookup", "off"])
def test_a_request_that_another_replica_began_goes_on_in_its_prediction(drafter: LookupDrafter) -> None:
    engine = build_fake_engine(drafter=drafter, clock=FakeClock())
    request = predicting(make_request(max_tokens=80, request_id="one"), num_wrong=1)
    begun = replace(request, generated_token_ids=tuple(tokens_of(request)[:40]))
    outcome = run_to_end(engine, begun)
    outcome.check(begun)
    assert engine.stats().total_steps < 12


def test_draws_that_look_back_and_grammars_are_the_same_with_a_prediction() -> None:
    requests = [
        asking("3 4 5 6"),
        asking("9 10 11 !"),
        make_request(max_tokens=60, request_id="penalties", presence_penalty=0.5, repetition_penalty=1.5),
        make_request(max_tokens=60, request_id="words", bad_words=((30, 31),), min_tokens=60),
    ]
    outcomes = []
    for predicts in (False, True):
        engine = predictions_only(runner=MatchedRunner())
        for request in requests:
            given = replace(request, prediction_token_ids=tuple(tokens_of(request))) if predicts else request
            engine.add(given, matcher=MadeMatchers().matcher_of(request).result())
        outcomes.append(run_to_end(engine))
    assert outcomes[0].token_ids == outcomes[1].token_ids
    assert outcomes[0].reasons == outcomes[1].reasons
    assert not outcomes[0].predicted
    assert outcomes[1].predicted["penalties"][0] > 30


def test_what_is_predicted_takes_few_launches_and_is_counted_where_others_are_launched_ahead() -> None:
    clock = FakeClock()
    runner = LateRunner(clock)
    engine = build_fake_engine(runner=runner, clock=clock, drafter=LookupDrafter(only_predictions=True))
    plain, request = make_request(max_tokens=20), predicting(make_request(max_tokens=80, request_id="one"))
    run_to_end(engine, plain).check(plain)
    assert (runner.num_ahead, engine.stats().total_drafted_tokens) == (19, 0)
    outcome = run_to_end(engine, request)
    outcome.check(request)
    assert engine.stats().total_steps - 20 < 25
    assert outcome.predicted["one"] == (engine.stats().total_accepted_tokens, 0)


def test_tenants_are_charged_for_the_tokens_that_were_kept() -> None:
    counters = []
    for drafter in (None, KnowingDrafter(3)):
        engine = build_fake_engine(policy="fair", drafter=drafter)
        run_to_end(engine, make_request(max_tokens=24, tenant="a"))
        counters.append(engine._scheduler._policy.shares.served("a"))  # type: ignore[attr-defined]
    assert counters[0] == counters[1] > 24
