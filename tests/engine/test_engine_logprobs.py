"""Log-probabilities through the engine: each belongs to its token, none is lost and none comes twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from app.engine.request import FinishReason, MergedDelta, Request, TokenDelta, TokenLogprobs
from tests.engine.test_steps_in_flight import LateRunner
from tests.kit.engine import (
    CountingRunner,
    Outcome,
    build_fake_engine,
    logprobs_after,
    make_request,
    run_to_end,
    tokens_of,
)

RUNNERS: list[Callable[[], CountingRunner]] = [CountingRunner, LateRunner]


def prompt(length: int, first: int = 2) -> tuple[int, ...]:
    return tuple(first + n * 3 % 40 for n in range(length))


def check(outcome: Outcome, request: Request) -> None:
    """Every place has its value, once, in its order."""
    tokens = [*request.prompt_token_ids, *tokens_of(request)]
    assert outcome.token_ids[request.request_id] == tokens[len(request.prompt_token_ids) :]
    for given, num_top, places in (
        (outcome.logprobs, request.sampling.logprobs, range(len(request.prompt_token_ids), len(tokens))),
        (outcome.prompt_logprobs, request.sampling.prompt_logprobs, range(1, len(request.prompt_token_ids))),
    ):
        wanted = [] if num_top is None else [logprobs_after(tokens[:at], tokens[at], num_top) for at in places]
        assert given[request.request_id] == wanted


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("max_scored_tokens", [1, 5, 512])
def test_each_gets_what_it_asked_for_among_others(
    runner: Callable[[], CountingRunner], max_scored_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.engine.batch.MAX_SCORED_TOKENS", max_scored_tokens)
    requests = [
        make_request(prompt(30), logprobs=3, prompt_logprobs=1),
        make_request(prompt(9, first=5), max_tokens=9),
        make_request(prompt(41, first=7), prompt_logprobs=0),
        make_request(prompt(6, first=8), logprobs=0, max_tokens=12),
        make_request(prompt(1), logprobs=1, prompt_logprobs=2),
    ]
    outcome = run_to_end(build_fake_engine(runner=runner()), *requests)
    for request in requests:
        check(outcome, request)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_prompt_alone_is_scored_and_nothing_is_generated(runner: Callable[[], CountingRunner]) -> None:
    engine = build_fake_engine(runner=runner(), max_model_len=40)
    request, beside = make_request(prompt(40), max_tokens=0, prompt_logprobs=2), make_request(max_tokens=20)
    outcome = run_to_end(engine, request, beside)
    check(outcome, request)
    check(outcome, beside)
    assert outcome.reasons[request.request_id] is FinishReason.LENGTH
    assert engine.stats().total_generated_tokens == 20
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_prompt_in_the_prefix_cache_is_scored_all_the_same() -> None:
    engine = build_fake_engine()
    first, again = make_request(prompt(30)), make_request(prompt(30), prompt_logprobs=1)
    run_to_end(engine, first)
    check(run_to_end(engine, again), again)
    after = make_request(prompt(30), logprobs=1)
    check(run_to_end(engine, after), after)
    assert engine.stats().total_cached_tokens == 28  # of the last one: that of the scored one was not read


def test_the_prefix_cache_is_read_as_far_as_the_prompt_is_scored_already() -> None:
    engine = build_fake_engine()
    run_to_end(engine, make_request(prompt(30)))
    request = make_request(prompt(30), prompt_logprobs=0)
    outcome = run_to_end(engine, replace(request, num_scored_tokens=14))
    tokens = list(request.prompt_token_ids)
    assert outcome.prompt_logprobs[request.request_id] == [
        logprobs_after(tokens[:at], tokens[at], 0) for at in range(15, 30)
    ]
    assert engine.stats().total_cached_tokens == 12  # whole blocks of 4


def test_joined_deltas_have_the_logprobs_of_all() -> None:
    one, two = TokenLogprobs(-1.0, 1, (5,), (-1.0,)), TokenLogprobs(-2.0, 2, (6,), (-1.5,))
    deltas = [
        TokenDelta("r", (), prompt_logprobs=(one,)),
        TokenDelta("r", (7,), prompt_logprobs=(two,), logprobs=(one,)),
        TokenDelta("r", (8,), logprobs=(two,)),
    ]
    whole = MergedDelta(*deltas).delta()
    assert (whole.token_ids, whole.logprobs, whole.prompt_logprobs) == ((7, 8), (one, two), (one, two))
