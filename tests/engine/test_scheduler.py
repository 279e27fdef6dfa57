"""The scheduler through the engine, with a runner that derives each token from every token in the KV cache."""

from typing import Any

import pytest

from app.build import assemble
from app.config import CacheConfig, SchedulerConfig
from app.engine.batch import StepBatch, StepResult
from app.engine.model_runner import ModelRunner
from app.engine.request import FinishReason, ModelInfo, TokenDelta
from app.errors import InvalidSetup
from tests.kit.engine import EOS, CountingRunner, Outcome, TimedEngine, build_fake_engine, make_request, run_to_end


def prompt(length: int, first: int = 2) -> tuple[int, ...]:
    return tuple(2 + (first + 3 * i) % 47 for i in range(length))


def batch_sizes(runner: CountingRunner) -> list[list[int]]:
    return [[len(item.token_ids) for item in batch.scheduled] for batch in runner.batches]


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


@pytest.mark.parametrize(
    ("first_length", "length", "num_cached"), [(10, 10, 8), (8, 8, 4), (5, 5, 4), (4, 5, 4), (4, 4, 0)]
)
def test_equal_prompts_share_their_full_blocks_and_one_token_is_always_computed(
    first_length: int, length: int, num_cached: int
) -> None:
    runner = CountingRunner()
    engine = build_fake_engine(runner=runner)
    first, second = make_request(prompt(first_length), max_tokens=1), make_request(prompt(length), max_tokens=2)
    run_to_end(engine, first)
    run_to_end(engine, second).check(second)
    assert batch_sizes(runner)[-2:] == [[length - num_cached], [1]]
    assert engine.stats().total_cached_tokens == num_cached


def test_a_later_turn_reuses_what_was_generated() -> None:
    engine = build_fake_engine()
    first = make_request(prompt(6), max_tokens=6)
    answer = run_to_end(engine, first).token_ids[first.request_id]
    turn = make_request((*first.prompt_token_ids, *answer, 9, 9), max_tokens=2)
    run_to_end(engine, turn).check(turn)
    assert engine.stats().total_cached_tokens == 8  # 11 tokens were computed: two full blocks


def test_requests_of_different_salts_share_nothing() -> None:
    engine = build_fake_engine()
    run_to_end(engine, make_request(prompt(10), cache_salt="a"))
    run_to_end(engine, make_request(prompt(10), cache_salt="b"))
    assert engine.stats().total_cached_tokens == 0


def test_when_memory_runs_short_the_last_arrived_is_preempted_and_all_tokens_stay_right() -> None:
    requests = [make_request(prompt(6, first=n), max_tokens=14) for n in range(4)]
    engine = build_fake_engine(num_blocks=8)  # 32 slots for 80 tokens
    outcome = run_to_end(engine, *requests)
    assert engine.stats().total_memory_preemptions == engine.stats().total_preemptions > 0
    outcome.check(*requests)
    assert list(outcome.reasons) == [request.request_id for request in requests]


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
    run_to_end(engine, request).check(request)


class DrawingRunner(ModelRunner):
    """Draws a token, and another where it is banned."""

    def __init__(self, token: int, other: int) -> None:
        self._token, self._other = token, other

    def run(self, batch: StepBatch) -> StepResult:
        return StepResult(
            [self._other if self._token in item.banned_token_ids else self._token for item in batch.sampled]
        )


@pytest.mark.parametrize(
    ("drawn", "sampling", "expected", "reason"),
    [
        ((EOS, 7), {}, [EOS], FinishReason.STOP),
        ((EOS, 7), {"min_tokens": 2}, [7, 7, EOS], FinishReason.STOP),
        ((EOS, 7), {"ignore_eos": True}, [EOS] * 5, FinishReason.LENGTH),
        ((7, 8), {"min_tokens": 2, "ignore_eos": True, "stop_token_ids": (7,)}, [8, 8, 7], FinishReason.STOP),
    ],
    ids=["the end token", "banned before min_tokens", "ignored", "a stop token though the end token is ignored"],
)
def test_what_ends_a_request(
    drawn: tuple[int, int], sampling: dict[str, Any], expected: list[int], reason: FinishReason
) -> None:
    engine = build_fake_engine(runner=DrawingRunner(*drawn))
    engine.add(make_request(max_tokens=5, **sampling))
    deltas = [delta for _ in range(6) for delta in engine.step()]
    assert [token for delta in deltas for token in delta.token_ids] == expected
    stop_token_id = expected[-1] if reason is FinishReason.STOP else None
    assert (deltas[-1].finish_reason, deltas[-1].stop_token_id) == (reason, stop_token_id)


def test_an_aborted_request_frees_its_blocks_and_the_others_go_on() -> None:
    engine = build_fake_engine()
    gone, stays = make_request(prompt(9), max_tokens=9), make_request(prompt(5, first=3), max_tokens=9)
    engine.add(gone)
    engine.add(stays)
    outcome = Outcome()
    outcome.book(engine.step())
    assert engine.abort(gone.request_id) == TokenDelta(gone.request_id, (), FinishReason.ABORT)
    assert engine.abort(gone.request_id) is None
    run_to_end(engine, outcome=outcome).check(stays)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


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
    timed = TimedEngine(step_s=0.1, max_running=2)
    timed.add(*(make_request(prompt(4, first=n), max_tokens=10) for n in range(2)))
    assert timed.stats.num_waiting_tokens == 8
    timed.step(8)
    timed.add(*(make_request(prompt(4, first=9 + n), max_tokens=10) for n in range(4)))
    stats = timed.stats
    assert (stats.num_waiting, stats.num_waiting_tokens) == (4, 16)
    assert stats.estimated_wait_s == pytest.approx(4 * 14 / (2 * (3 + 8) / 0.8), rel=0.1)
    begin = timed.clock.at
    while timed.stats.num_waiting:
        timed.step()
    assert timed.clock.at - begin < stats.estimated_wait_s + 1.0
    assert timed.stats.ended_per_s == pytest.approx(2 / 1.0, rel=0.4)


def test_a_short_request_waits_until_one_that_runs_is_expected_to_end() -> None:
    timed = TimedEngine(step_s=0.1, max_running=1)
    timed.finish(*(make_request(max_tokens=20, cache_salt=str(n)) for n in range(3)))
    timed.add(make_request(max_tokens=20))
    timed.step()
    timed.add(make_request((5,), max_tokens=1, ignore_eos=True))
    assert timed.stats.ended_per_s == pytest.approx(0.5, rel=0.1)
    assert timed.stats.estimated_wait_s == pytest.approx(2.0, rel=0.1)


def test_fewer_may_run_from_one_step_to_the_next_and_the_last_in_order_wait_again() -> None:
    timed = TimedEngine(max_running=6)
    requests = [make_request(prompt(4, first=n), request_id=str(n), max_tokens=8) for n in range(6)]
    timed.add(*requests)
    timed.step()
    timed.engine.reconfigure(SchedulerConfig(max_running=2, max_step_tokens=4, prefill_chunk_tokens=4))
    assert timed.step() == ["0", "1"]
    assert timed.stats.total_preemptions == 4
    timed.finish().check(*requests)


def test_a_strategy_with_unchanged_settings_keeps_what_it_has_learnt() -> None:
    adaptive = {"name": "adaptive", "target_latency_ms": 10_000, "max_wait_ms": 0}
    timed = TimedEngine(strategy=adaptive)
    for _ in range(3):
        timed.finish(make_request())
    assert timed.stats.batch_size == 4
    for strategy, size in ((adaptive, 4), (adaptive | {"target_latency_ms": 9_000}, 1)):
        timed.engine.reconfigure(SchedulerConfig(strategy=strategy, policy="sjf", max_running=5))
        assert timed.stats.batch_size == size


def test_a_step_larger_than_memory_was_sized_for_is_refused_with_the_numbers() -> None:
    sized_for = SchedulerConfig(max_running=8, max_step_tokens=64)
    engine = assemble(
        sized_for, CacheConfig(block_size=4), num_blocks=64, runner=CountingRunner(), largest_step=sized_for,
        model_info=ModelInfo(max_model_len=100, vocab_size=50, eos_token_ids=()),
    )  # fmt: skip
    engine.reconfigure(SchedulerConfig(max_running=4, max_step_tokens=32))
    with pytest.raises(InvalidSetup, match="max_step_tokens: got 128, but this replica's memory was sized for 64"):
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
    pool = engine._scheduler.pool
    pool._cached = cache = CountedCache(pool._cached)
    for _ in range(10):
        engine.step()
    assert engine.stats().num_waiting == 1
    assert cache.num_lookups <= 2 * 10  # not ten blocks in each step
    run_to_end(engine).check(waiting)
