"""Requests with a matcher, in both engines, with matchers made for the purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from app.engine.batch import ScheduledSequence, StepBatch, StepResult
from app.engine.engine import Engine
from app.engine.matcher import TokenSet, allowed_after_bans, any_token, with_tokens, without_tokens
from app.engine.request import FinishReason, Grammar, GrammarKind, Request
from app.errors import InvalidRequest
from tests.engine.test_steps_in_flight import LateRunner
from tests.kit.engine import (
    EOS,
    VOCAB_SIZE,
    MadeMatchers,
    MatchedRunner,
    Outcome,
    async_engine,
    build_fake_engine,
    expected_tokens,
    first_allowed,
    make_request,
    run_to_end,
)


class LateMatchedRunner(LateRunner):
    """Computes as late as it may, and asks the matchers then."""

    def run(self, batch: StepBatch) -> StepResult:
        drawn = super().run(batch)
        for item in batch.sampled:
            assert not item.lacks_history, "a grammar needs known tokens"
        tokens = [_drawn(token, item) for token, item in zip(drawn.token_ids, batch.sampled, strict=True)]
        return drawn._replace(token_ids=tokens)


def _drawn(token: int, item: ScheduledSequence) -> int:
    return token if item.matcher is None else first_allowed(item.allowed(), token)


@pytest.fixture(params=[MatchedRunner, LateMatchedRunner])
def engine(request: pytest.FixtureRequest) -> Engine:
    built = build_fake_engine(runner=request.param())
    assert built.runner.launches == (request.param is LateMatchedRunner)
    return built


def asking(text: str, **sampling: Any) -> Request:
    return make_request(grammar=Grammar(GrammarKind.REGEX, text), **{"max_tokens": 6} | sampling)


def served(engine: Engine, requests: Sequence[Request]) -> Outcome:
    outcome = Outcome()
    for request in requests:
        engine.add(request, matcher=MadeMatchers().matcher_of(request).result())
    run_to_end(engine, outcome=outcome)
    return outcome


def test_each_request_follows_its_own_matcher(engine: Engine) -> None:
    some, others, free = asking("3 4"), asking("7"), make_request(max_tokens=6)
    outcome = served(engine, [some, others, free])
    assert outcome.token_ids[some.request_id] == [3, 4, 3, 4, 3, 4]
    assert outcome.token_ids[others.request_id] == [7] * 6
    outcome.check(free)


def test_a_request_ends_where_only_its_end_is_allowed(engine: Engine) -> None:
    request = asking(f"3 4 {EOS}", ignore_eos=True, min_tokens=5)
    outcome = served(engine, [request])
    assert outcome.token_ids[request.request_id] == [3, 4, EOS]
    assert outcome.reasons[request.request_id] is FinishReason.STOP


def test_a_matcher_that_fails_ends_its_request_and_no_other(engine: Engine) -> None:
    failing, fine, free = asking("3 4 5!"), asking("8 9"), make_request(max_tokens=6)
    outcome = served(engine, [failing, fine, free])
    error = outcome.errors[failing.request_id]
    assert isinstance(error, InvalidRequest)
    assert (error.code, error.param, str(error)) == ("grammar_too_complex", "structured_outputs", "it has failed")
    assert outcome.token_ids[failing.request_id] == [3, 4, 5]
    assert outcome.token_ids[fine.request_id] == [8, 9, 8, 9, 8, 9]
    outcome.check(free)
    assert engine.stats().total_failed == 1
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_preempted_request_continues_where_it_was() -> None:
    engine = build_fake_engine(runner=MatchedRunner(), num_blocks=8)
    requests = [asking(f"{n} {n + 1} {n + 2}", max_tokens=16) for n in range(3, 9)]
    outcome = served(engine, requests)
    assert engine.stats().total_preemptions > 0
    for first, request in zip(range(3, 9), requests, strict=True):
        assert outcome.token_ids[request.request_id] == [first + n % 3 for n in range(16)]


def test_bad_words_are_not_completed(engine: Engine) -> None:
    free = make_request(max_tokens=12)
    wanted = expected_tokens(free.prompt_token_ids, 12)
    request = asking("3 4", bad_words=((3,), (3, 4)))
    assert served(engine, [request]).token_ids[request.request_id] == [3, 4, 3, 4, 3, 4]  # nothing else is allowed
    assert wanted == served(engine, [free]).token_ids[free.request_id]


def test_what_may_not_go_together_is_refused(engine: Engine) -> None:
    for request, words in (
        (asking("3", allowed_token_ids=(3,)), "send only one of them"),
        (asking("x" * 131_073), "131,073 characters; at most 131,072"),
        (make_request(allowed_token_ids=(VOCAB_SIZE,)), "allowed_token_ids contains the token id"),
        (make_request(bad_words=((3, -1),)), "bad_words contains the token id"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            engine.check(request)


def test_a_model_without_an_end_token_takes_no_grammar() -> None:
    engine = build_fake_engine()
    engine.model_info = type(engine.model_info)(max_model_len=100, vocab_size=VOCAB_SIZE, eos_token_ids=())
    with pytest.raises(InvalidRequest, match="this model has no end token"):
        engine.check(asking("3"))


async def test_an_async_engine_gets_matchers_before_it_queues_anything() -> None:
    with async_engine(MatchedRunner(), matchers=MadeMatchers()) as engine:
        tokens = [token async for delta in engine.generate(asking("3 4")) for token in delta.token_ids]
        assert tokens == [3, 4, 3, 4, 3, 4]
        with pytest.raises(InvalidRequest, match="this grammar is no use"):
            await anext(aiter(engine.generate(asking("bad"))))
        assert engine.stats().num_waiting == 0
    with async_engine() as without, pytest.raises(InvalidRequest, match="does not support structured output"):
        await anext(aiter(without.generate(asking("3 4"))))


def test_sets_of_tokens() -> None:
    some = TokenSet((0, 9, 49), vocab_size=VOCAB_SIZE)
    assert some.allowed() == with_tokens(bytes(7), (49, 9, 0))
    assert without_tokens(some.allowed(), (9,)) == with_tokens(bytes(7), (0, 49))
    assert not any_token(without_tokens(some.allowed(), (0, 9, 49, 3)))
    assert allowed_after_bans(some, (0, 9)) == with_tokens(bytes(7), (49,))
    assert allowed_after_bans(some, (0, 9, 49)) == some.allowed()


def test_requests_for_the_same_tokens_share_their_bits() -> None:
    """The prompts of one body have equal lists, each decoded for itself: 128 times 16,384 bits would hold up a step."""
    lists = [tuple(range(0, 40, 3)) for _ in range(3)]
    first, *others = [TokenSet(each, vocab_size=VOCAB_SIZE).allowed() for each in lists]
    assert all(each is first for each in others)
    assert TokenSet((1,), vocab_size=VOCAB_SIZE).allowed() != first
