"""The scheduler through the engine, with a runner that derives each token from every token in the KV cache."""

import pytest

from app.build import assemble
from app.config import CacheConfig, SchedulerConfig
from app.engine.batch import StepResult
from app.engine.model_runner import ModelRunner
from app.engine.request import FinishReason, ModelInfo, Request
from app.errors import InvalidSetup
from tests.fakes import (
    EOS,
    CountingRunner,
    FakeClock,
    Outcome,
    TimedRunner,
    build_fake_engine,
    expected_tokens,
    make_request,
    run_to_end,
)


def prompt(length: int, first: int = 2) -> tuple[int, ...]:
    return tuple(2 + (first + 3 * i) % 47 for i in range(length))


def batch_sizes(runner: CountingRunner) -> list[list[int]]:
    return [[len(item.token_ids) for item in batch.scheduled] for batch in runner.batches]


def test_tokens_are_those_of_plain_generation() -> None:
    requests = [make_request(prompt(n), max_tokens=n) for n in (1, 3, 4, 5, 17, 40)]
    outcome = run_to_end(build_fake_engine(), *requests)
    for request in requests:
        expected = expected_tokens(request.prompt_token_ids, request.sampling.max_tokens)
        assert outcome.token_ids[request.request_id] == expected
        assert outcome.reasons[request.request_id] is FinishReason.LENGTH


def test_a_request_joins_while_others_are_running() -> None:
    runner = CountingRunner()
    engine = build_fake_engine(runner=runner)
    engine.add(make_request(prompt(3), max_tokens=5))
    engine.step()
    engine.step()
    engine.add(make_request(prompt(6), max_tokens=2))
    engine.step()
    assert batch_sizes(runner) == [[3], [1], [1, 6]]


def test_a_request_leaves_at_once_and_its_place_is_taken() -> None:
    runner = CountingRunner()
    engine = build_fake_engine(runner=runner, max_running=1)
    run_to_end(engine, make_request(prompt(2), max_tokens=2), make_request(prompt(3), max_tokens=1))
    assert batch_sizes(runner) == [[2], [1], [3]]


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_requests() -> None:
    runner = CountingRunner()
    engine = build_fake_engine(runner=runner, prefill_chunk_tokens=8)
    engine.add(make_request(prompt(2), max_tokens=9))
    engine.step()
    engine.add(make_request(prompt(20), max_tokens=1))
    for _ in range(3):
        engine.step()
    assert batch_sizes(runner) == [[2], [1, 8], [1, 8], [1, 4]]


def test_no_step_exceeds_the_token_budget_and_every_running_request_gets_a_token() -> None:
    runner = CountingRunner()
    engine = build_fake_engine(
        runner=runner, max_running=6, max_step_tokens=12, prefill_chunk_tokens=12, num_blocks=200
    )
    run_to_end(engine, *(make_request(prompt(30, first=n), max_tokens=6) for n in range(6)))
    assert max(sum(sizes) for sizes in batch_sizes(runner)) <= 12
    for request_id in {item.request_id for batch in runner.batches for item in batch.scheduled}:
        steps = [
            n for n, batch in enumerate(runner.batches) if any(i.request_id == request_id for i in batch.scheduled)
        ]
        assert steps == list(range(steps[0], steps[-1] + 1))  # none was left out of a step while it ran


def test_requests_join_in_order_of_arrival_and_none_overtakes() -> None:
    runner = CountingRunner()
    engine = build_fake_engine(runner=runner, num_blocks=6)  # 24 slots
    running, too_large, small = (make_request(prompt(n, first=n), max_tokens=3) for n in (13, 16, 1))
    run_to_end(engine, running, too_large, small)
    order = list(dict.fromkeys(item.request_id for batch in runner.batches for item in batch.scheduled))
    assert order == [running.request_id, too_large.request_id, small.request_id]


def test_equal_prompts_share_their_full_blocks() -> None:
    runner = CountingRunner()
    engine = build_fake_engine(runner=runner)
    first, second = make_request(prompt(10), max_tokens=2), make_request(prompt(10), max_tokens=2)
    run_to_end(engine, first)
    outcome = run_to_end(engine, second)
    assert batch_sizes(runner)[-2:] == [[2], [1]]  # 8 of 10 tokens were there
    assert engine.stats().total_cached_tokens == 8
    assert outcome.token_ids[second.request_id] == expected_tokens(second.prompt_token_ids, 2)


def test_a_later_turn_reuses_what_was_generated() -> None:
    engine = build_fake_engine()
    first = make_request(prompt(6), max_tokens=6)
    answer = run_to_end(engine, first).token_ids[first.request_id]
    turn = make_request((*first.prompt_token_ids, *answer, 9, 9), max_tokens=2)
    outcome = run_to_end(engine, turn)
    assert engine.stats().total_cached_tokens == 8  # 11 tokens were computed: two full blocks
    assert outcome.token_ids[turn.request_id] == expected_tokens(turn.prompt_token_ids, 2)


def test_requests_of_different_salts_share_nothing() -> None:
    engine = build_fake_engine()
    run_to_end(engine, make_request(prompt(10), cache_salt="a"))
    run_to_end(engine, make_request(prompt(10), cache_salt="b"))
    assert engine.stats().total_cached_tokens == 0


def test_when_memory_runs_short_the_last_arrived_is_preempted_and_all_tokens_stay_right() -> None:
    requests = [make_request(prompt(6, first=n), max_tokens=14) for n in range(4)]
    for prefix_caching in (True, False):
        engine = build_fake_engine(num_blocks=8, prefix_caching=prefix_caching)  # 32 slots for 80 tokens
        outcome = run_to_end(engine, *requests)
        assert engine.stats().total_memory_preemptions == engine.stats().total_preemptions > 0
        for request in requests:
            assert outcome.token_ids[request.request_id] == expected_tokens(request.prompt_token_ids, 14)
        order = list(outcome.reasons)
        assert order == [request.request_id for request in requests]


def test_a_preempted_sequence_reuses_its_cached_prefix() -> None:
    runner = CountingRunner()
    engine = build_fake_engine(runner=runner, num_blocks=8)
    first, second = make_request(prompt(8), max_tokens=20), make_request(prompt(8, first=9), max_tokens=12)
    run_to_end(engine, first, second)
    assert engine.stats().total_preemptions > 0
    starts = [i.start for b in runner.batches for i in b.scheduled if i.request_id == second.request_id]
    again = next(i for i in range(1, len(starts)) if starts[i] <= starts[i - 1])
    assert starts[again] > 0  # the start of its prompt was still there


def test_what_a_preempted_sequence_finds_again_counts_neither_as_cached_nor_as_another_prompt() -> None:
    engine = build_fake_engine(num_blocks=8)
    requests = [make_request(prompt(8), max_tokens=20), make_request(prompt(8, first=9), max_tokens=12)]
    for request in requests:
        engine.add(request)
    deltas = [delta for _ in range(100) for delta in engine.step()]
    assert engine.stats().total_preemptions > 0
    assert {delta.request_id for delta in deltas if delta.finish_reason} == {each.request_id for each in requests}
    assert {delta.num_cached_tokens for delta in deltas} == {0}
    assert engine.stats().total_cached_tokens == 0
    assert engine.stats().total_prompt_tokens == 16


def test_a_request_that_fills_the_pool_alone_is_served() -> None:
    engine = build_fake_engine(num_blocks=4)  # 16 slots
    request = make_request(prompt(10), max_tokens=6)
    assert run_to_end(engine, request).token_ids[request.request_id] == expected_tokens(request.prompt_token_ids, 6)


class EndingRunner(ModelRunner):
    """Draws the end token, unless it is banned."""

    def run(self, batch) -> StepResult:  # type: ignore[no-untyped-def]
        return StepResult([EOS if EOS not in item.banned_token_ids else 7 for item in batch.sampled])


def finished(request: Request) -> tuple[list[int], FinishReason]:
    outcome = run_to_end(build_fake_engine(runner=EndingRunner()), request)
    return outcome.token_ids[request.request_id], outcome.reasons[request.request_id]


def test_the_end_token_stops_a_request() -> None:
    assert finished(make_request(max_tokens=5)) == ([EOS], FinishReason.STOP)


def test_the_end_token_is_banned_before_min_tokens() -> None:
    assert finished(make_request(max_tokens=5, min_tokens=2)) == ([7, 7, EOS], FinishReason.STOP)


def test_ignore_eos_generates_up_to_max_tokens() -> None:
    assert finished(make_request(max_tokens=3, ignore_eos=True)) == ([EOS] * 3, FinishReason.LENGTH)


def test_a_stop_token_stops_a_request_even_if_the_end_token_is_ignored() -> None:
    request = make_request(max_tokens=5, min_tokens=2, ignore_eos=True, stop_token_ids=(7,))
    outcome = run_to_end(build_fake_engine(runner=_Sevens()), request)
    assert outcome.token_ids[request.request_id] == [8, 8, 7]
    assert outcome.reasons[request.request_id] is FinishReason.STOP


class _Sevens(ModelRunner):
    def run(self, batch) -> StepResult:  # type: ignore[no-untyped-def]
        return StepResult([8 if 7 in item.banned_token_ids else 7 for item in batch.sampled])


def test_an_aborted_request_frees_its_blocks_and_the_others_go_on() -> None:
    engine = build_fake_engine()
    gone, occupancies = make_request(prompt(9), max_tokens=9), make_request(prompt(5, first=3), max_tokens=9)
    engine.add(gone)
    engine.add(occupancies)
    tokens = [t for delta in engine.step() if delta.request_id == occupancies.request_id for t in delta.token_ids]
    delta = engine.abort(gone.request_id)
    assert delta is not None
    assert delta.finish_reason is FinishReason.ABORT
    assert engine.abort(gone.request_id) is None
    rest = run_to_end(engine)
    assert tokens + rest.token_ids[occupancies.request_id] == expected_tokens(occupancies.prompt_token_ids, 9)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_waiting_request_can_be_aborted() -> None:
    engine = build_fake_engine(max_running=1)
    first, waiting, last = (make_request(prompt(4, first=n)) for n in range(3))
    for request in (first, waiting, last):
        engine.add(request)
    engine.step()
    engine.abort(waiting.request_id)
    assert engine.stats().num_waiting == 1
    assert set(run_to_end(engine).reasons) == {first.request_id, last.request_id}


def test_a_chunk_in_flight_of_an_aborted_request_is_dropped() -> None:
    """Schedule and update are apart, so that a model may run between them; an abort may come there too."""
    engine = build_fake_engine()
    request = make_request(prompt(4))
    engine.add(request)
    scheduler = engine._scheduler
    batch = scheduler.schedule(now=1.0)
    scheduler.abort(request.request_id)
    assert scheduler.update(batch, StepResult([3]), now=2.0) == []
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_the_queue_is_counted_in_requests_and_tokens_and_its_wait_follows_the_pace() -> None:
    clock = FakeClock()
    engine = build_fake_engine(runner=TimedRunner(clock, step_s=0.1), clock=clock, max_running=2)
    for n in range(2):
        engine.add(make_request(prompt(4, first=n), max_tokens=10))
    assert engine.stats().num_waiting_tokens == 8
    for _ in range(8):
        engine.step()
    for n in range(4):
        engine.add(make_request(prompt(4, first=9 + n), max_tokens=10))
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_waiting_tokens) == (4, 16)
    assert stats.estimated_wait_s == pytest.approx(4 * 14 / (2 * (3 + 8) / 0.8), rel=0.1)
    begin = clock.at
    while engine.stats().num_waiting:
        engine.step()
    assert clock.at - begin < stats.estimated_wait_s + 1.0
    assert engine.stats().ended_per_s == pytest.approx(2 / 1.0, rel=0.4)


@pytest.mark.parametrize(
    "after", [("static", "fcfs"), ("bucketed", "fair"), ("hybrid", "priority"), ("continuous", "sjf")]
)
@pytest.mark.parametrize("before", [("adaptive", "deadline"), ("continuous", "fair"), ("dynamic", "fcfs")])
def test_strategy_and_policy_change_between_two_steps_without_losing_a_request(
    before: tuple[str, str], after: tuple[str, str]
) -> None:
    clock = FakeClock()
    limits = {"max_running": 4, "max_step_tokens": 32, "prefill_chunk_tokens": 16}
    engine = build_fake_engine(
        runner=TimedRunner(clock), clock=clock, num_blocks=10, strategy=before[0], policy=before[1], **limits
    )
    requests = [
        make_request(prompt(3 + n, first=n), max_tokens=9, tenant="ab"[n % 2], priority=n % 3) for n in range(9)
    ]
    outcome = Outcome()
    for request in requests:
        engine.add(request)
    for strategy, policy in (after, before, after):
        for _ in range(5):
            clock.advance(engine.idle_s or 0.0)
            outcome.book(engine.step())
        engine.reconfigure(SchedulerConfig(strategy=strategy, policy=policy, **limits))
        assert (engine.stats().strategy, engine.stats().policy) == (strategy, policy)
    while engine.has_work:
        clock.advance(engine.idle_s or 0.0)
        outcome.book(engine.step())
    for request in requests:
        assert outcome.token_ids[request.request_id] == expected_tokens(request.prompt_token_ids, 9)


def test_fewer_may_run_from_one_step_to_the_next_and_the_last_in_order_wait_again() -> None:
    runner = CountingRunner()
    engine = build_fake_engine(runner=runner, max_running=6)
    requests = [make_request(prompt(4, first=n), request_id=str(n), max_tokens=8) for n in range(6)]
    outcome = Outcome()
    for request in requests:
        engine.add(request)
    outcome.book(engine.step())
    engine.reconfigure(SchedulerConfig(max_running=2, max_step_tokens=4, prefill_chunk_tokens=4))
    outcome.book(engine.step())
    assert [item.request_id for item in runner.batches[-1].scheduled] == ["0", "1"]
    while engine.has_work:
        outcome.book(engine.step())
    for request in requests:
        assert outcome.token_ids[request.request_id] == expected_tokens(request.prompt_token_ids, 8)


def test_a_strategy_with_unchanged_settings_keeps_what_it_has_learnt() -> None:
    clock = FakeClock()
    adaptive = {"name": "adaptive", "target_latency_ms": 10_000, "max_wait_ms": 0}
    engine = build_fake_engine(runner=TimedRunner(clock), clock=clock, strategy=adaptive)
    for _ in range(3):
        run_to_end(engine, make_request(), clock=clock)
    assert engine.stats().batch_size == 4
    engine.reconfigure(SchedulerConfig(strategy=adaptive, policy="sjf", max_running=5))
    assert engine.stats().batch_size == 4
    engine.reconfigure(SchedulerConfig(strategy=adaptive | {"batch_size": 2}, policy="sjf", max_running=5))
    assert engine.stats().batch_size == 1


def test_a_step_larger_than_memory_was_sized_for_is_refused_with_the_numbers() -> None:
    sized_for = SchedulerConfig(max_running=8, max_step_tokens=64)
    engine = assemble(
        sized_for, CacheConfig(block_size=4), num_blocks=64, runner=CountingRunner(), largest_step=sized_for,
        facts=ModelInfo(max_model_len=100, vocab_size=50, eos_token_ids=()),
    )  # fmt: skip
    engine.reconfigure(SchedulerConfig(max_running=4, max_step_tokens=32))
    with pytest.raises(InvalidSetup, match="max_step_tokens: got 128; this replica's memory was sized for 64"):
        engine.reconfigure(SchedulerConfig(max_running=4, max_step_tokens=128))
    assert run_to_end(engine, make_request()).reasons


class CountedCache(dict):  # type: ignore[type-arg]
    num_lookups = 0

    def get(self, *args):  # type: ignore[no-untyped-def]
        self.num_lookups += 1
        return super().get(*args)


def test_a_waiting_request_that_lacks_blocks_keeps_the_match_of_its_prefix() -> None:
    engine = build_fake_engine(num_blocks=24, block_size=4)
    shared = tuple(range(2, 42))
    run_to_end(engine, make_request(shared, max_tokens=1))
    engine.add(make_request((43,) * 20, max_tokens=40))
    engine.step()
    waiting = make_request((*shared, *([44] * 40)), max_tokens=2)
    engine.add(waiting)
    engine.step()
    pool = engine._scheduler._pool
    pool._cached = cache = CountedCache(pool._cached)
    for _ in range(10):
        engine.step()
    assert engine.stats().num_waiting == 1
    assert cache.num_lookups <= 2 * 10  # not ten blocks in each step
    outcome = run_to_end(engine)
    assert outcome.token_ids[waiting.request_id] == expected_tokens(waiting.prompt_token_ids, 2)
