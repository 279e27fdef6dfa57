from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config import SchedulerConfig
from app.engine.engine import StepError
from app.engine.request import FinishReason
from app.errors import ContextTooLong, InvalidRequest
from tests.kit.engine import (
    VOCAB_SIZE,
    CountingRunner,
    Outcome,
    PoisonedRunner,
    build_fake_engine,
    expected_tokens,
    make_request,
    run_to_end,
)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (make_request(()), "prompt"),
        (make_request(max_tokens=-1), "max_tokens"),
        (make_request(logprobs=-1), "logprobs"),
        (make_request(prompt_logprobs=VOCAB_SIZE + 1), "prompt_logprobs"),
        (make_request((1, VOCAB_SIZE)), "prompt"),
        (make_request((1, -1)), "prompt"),
        (make_request(logit_bias=((VOCAB_SIZE, 1.0),)), "logit_bias"),
        (make_request(stop_token_ids=(VOCAB_SIZE,)), "stop_token_ids"),
    ],
)
def test_what_can_never_be_served_is_refused_by_name(request_, param) -> None:  # type: ignore[no-untyped-def]
    engine = build_fake_engine()
    with pytest.raises(InvalidRequest) as refused:
        engine.add(request_)
    assert refused.value.param == param
    assert not engine.has_work


def test_a_request_over_the_context_is_refused_with_the_numbers() -> None:
    with pytest.raises(ContextTooLong, match=r"prompt has 60 tokens and max_tokens is 50; this model accepts 100"):
        build_fake_engine(max_model_len=100).add(make_request((5,) * 60, max_tokens=50))


def test_a_request_over_the_pool_is_refused_with_the_numbers() -> None:
    with pytest.raises(ContextTooLong, match="accepts 16 tokens in total"):
        build_fake_engine(num_blocks=4).add(make_request((5,) * 10, max_tokens=7))


def test_a_request_id_in_use_is_refused_and_can_be_used_again_later() -> None:
    engine = build_fake_engine()
    engine.add(make_request(request_id="same"))
    with pytest.raises(InvalidRequest, match="same"):
        engine.add(make_request(request_id="same"))
    run_to_end(engine)
    engine.add(make_request(request_id="same"))


def test_a_device_that_fails_on_every_request_ends_those_of_the_batch_and_no_others() -> None:
    runner = PoisonedRunner()
    engine = build_fake_engine(runner=runner, max_running=2)
    first, second, waiting = (make_request((5, 6, n)) for n in (7, 8, 9))
    for request in (first, second, waiting):
        engine.add(request)
    engine.step()
    runner.poison = ""
    with pytest.raises(StepError) as failed:
        engine.step()
    runner.poison = "bad"
    assert set(failed.value.request_ids) == {first.request_id, second.request_id}
    assert isinstance(failed.value.__cause__, RuntimeError)
    run_to_end(engine).check(waiting)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert engine.stats().total_failed == 2


@pytest.mark.parametrize("num_done", [1, 3, 7])
def test_a_request_generated_in_part_elsewhere_continues_after_its_tokens(num_done: int) -> None:
    prompt = (5, 6, 7, 8, 9)
    whole = expected_tokens(prompt, 8)
    request = replace(make_request(prompt, max_tokens=8), generated_token_ids=tuple(whole[:num_done]))
    outcome = run_to_end(build_fake_engine(), request)
    assert outcome.token_ids[request.request_id] == whole[num_done:]
    assert outcome.reasons[request.request_id] is FinishReason.LENGTH


def test_what_was_generated_elsewhere_counts_for_min_tokens_and_penalties() -> None:
    runner = CountingRunner()
    request = replace(
        make_request((5, 6), max_tokens=6, min_tokens=4, presence_penalty=0.5), generated_token_ids=(20, 21, 22)
    )
    run_to_end(build_fake_engine(runner=runner), request)
    drawn = [item for batch in runner.batches for item in batch.sampled]
    assert [bool(item.banned_token_ids) for item in drawn] == [True, False, False]
    assert runner.deductions[0] == {20: -0.5, 21: -0.5, 22: -0.5}
    assert [item.end for item in drawn] == [5, 6, 7]


def test_a_request_with_nothing_left_to_generate_is_refused_with_the_numbers() -> None:
    request = replace(make_request(max_tokens=3), generated_token_ids=(4, 5, 6))
    with pytest.raises(InvalidRequest, match="3 tokens have already been generated and max_tokens is 3"):
        build_fake_engine().add(request)


@given(
    num_blocks=st.integers(3, 60), block_size=st.integers(1, 5), num_window_groups=st.integers(1, 3),
    window_tokens=st.integers(1, 9), max_step_tokens=st.integers(1, 12),
)  # fmt: skip
def test_the_longest_sequence_finds_room_beside_its_windows(
    num_blocks: int, block_size: int, num_window_groups: int, window_tokens: int, max_step_tokens: int
) -> None:
    runner = CountingRunner(block_size)
    runner.window_tokens = window_tokens
    settings = {"max_running": 1, "max_step_tokens": max_step_tokens, "prefill_chunk_tokens": max_step_tokens}
    engine = build_fake_engine(
        num_blocks=max(num_blocks, 2 * num_window_groups + 2), block_size=block_size, runner=runner,
        num_window_groups=num_window_groups, window_tokens=window_tokens, **settings,
    )  # fmt: skip
    longest = engine.model_info.max_model_len
    prompt = tuple(5 + at % 7 for at in range(longest - 1))
    # A step that may be larger later takes no more of one sequence than there is room for.
    engine.reconfigure(SchedulerConfig.model_validate(settings | {"max_step_tokens": 99, "prefill_chunk_tokens": 99}))
    request = make_request(prompt, max_tokens=1, ignore_eos=True)
    outcome = Outcome()
    engine.add(request)
    for _ in range(2 * longest):
        if not engine.has_work:
            break
        outcome.book(engine.step())
    assert outcome.token_ids[request.request_id] == expected_tokens(prompt, 1)
    assert engine.stats().total_preemptions == 0


def test_sequences_that_look_back_a_window_hold_few_blocks_of_it_and_hits_are_whole() -> None:
    runner = CountingRunner()
    runner.window_tokens = 9
    engine = build_fake_engine(num_blocks=100, runner=runner, num_window_groups=2, window_tokens=9)
    prompt = tuple(5 + at % 7 for at in range(160))
    first = make_request(prompt, max_tokens=20, ignore_eos=True)
    engine.add(first)
    held = []
    outcome = Outcome()
    while engine.has_work:
        outcome.book(engine.step())
        held.append(100 - engine._scheduler.pool.num_free)
    assert outcome.token_ids[first.request_id] == expected_tokens(prompt, 20)
    # 45 blocks hold 180 tokens; of each window group a step of 16 tokens and the 9 before it.
    assert max(held) <= 45 + 2 * 8 < 3 * 45
    again = make_request((*prompt, *expected_tokens(prompt, 20)[:8], 3), max_tokens=3, ignore_eos=True)
    outcome = run_to_end(engine, again)
    assert outcome.token_ids[again.request_id] == expected_tokens(again.prompt_token_ids, 3)
    assert engine.stats().total_cached_tokens == 168
