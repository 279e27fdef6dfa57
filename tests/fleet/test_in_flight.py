"""A request that an ingress has not finished: what is kept for its reader, and what later attempts are told."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

from app.engine.request import EngineTimes, FinishReason, Queued, Request, TokenDelta, TokenLogprobs
from app.fleet.in_flight import InFlightRequest
from tests.kit.engine import make_request


def begun(request: Request | None = None) -> InFlightRequest:
    in_flight = InFlightRequest(request or make_request(), began_at=0.0)
    in_flight.begin_attempt(0.0)
    return in_flight


def delta(in_flight: InFlightRequest, *token_ids: int, num_cached_tokens: int = 0) -> TokenDelta:
    return TokenDelta(in_flight.sent.request_id, token_ids, num_cached_tokens=num_cached_tokens)


async def test_what_is_not_read_takes_little_more_than_its_tokens_numbers() -> None:
    in_flight, num_tokens = begun(), 20_000
    tracemalloc.start()
    try:
        for number in range(num_tokens):
            in_flight.put(delta(in_flight, 1000 + number))
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 8 * num_tokens
    assert (await in_flight.next()).token_ids == tuple(range(1000, 1000 + num_tokens))


async def test_what_is_read_late_says_all_that_came() -> None:
    in_flight = begun()
    request_id = in_flight.sent.request_id
    queued, times = Queued(3, 1.5, "r0"), EngineTimes(0.1, 0.2)
    scores = tuple(TokenLogprobs(-float(number), 1) for number in range(4))
    for each in (
        TokenDelta(request_id, (), queued=queued),
        TokenDelta(request_id, (), prompt_logprobs=scores[:1]),
        TokenDelta(
            request_id, (5,), num_cached_tokens=2, prompt_logprobs=scores[1:2], logprobs=scores[2:3], times=times
        ),
        TokenDelta(request_id, (6, 7), num_cached_tokens=2, logprobs=scores[2:]),
        TokenDelta(request_id, (4,), FinishReason.STOP, stop_token_id=4, num_cached_tokens=2, embedding=b"0000"),
    ):
        in_flight.put(each)
    assert await in_flight.next() == TokenDelta(
        request_id, (5, 6, 7, 4), FinishReason.STOP, stop_token_id=4, num_cached_tokens=2, queued=queued,
        logprobs=(scores[2], *scores[2:]), prompt_logprobs=scores[:2], embedding=b"0000", times=times,
    )  # fmt: skip


async def test_a_request_that_is_not_to_wait_may_have_to_once_it_has_begun() -> None:
    """A refusal would end a stream that its client reads."""
    in_flight = InFlightRequest(replace(make_request(), no_queue=True), began_at=0.0)
    assert in_flight.begin_attempt(0.0).no_queue
    assert in_flight.begin_attempt(1.0).no_queue, "the first replica has refused it"
    in_flight.put(delta(in_flight, 5))
    await in_flight.next()
    in_flight.lost_at = 2.0
    assert not in_flight.begin_attempt(2.0).no_queue


async def test_cached_tokens_are_those_that_the_first_replica_with_tokens_found() -> None:
    in_flight = begun()
    in_flight.put(delta(in_flight))  # it is queued
    await in_flight.next()
    in_flight.begin_attempt(1.0)
    in_flight.put(delta(in_flight, 5, num_cached_tokens=3))
    assert (await in_flight.next()).num_cached_tokens == 3
    in_flight.begin_attempt(2.0)
    in_flight.put(delta(in_flight, 6, num_cached_tokens=40))
    assert (await in_flight.next()).num_cached_tokens == 3
    in_flight.begin_attempt(3.0)
    in_flight.put(delta(in_flight, 7))
    assert (await in_flight.next()).num_cached_tokens == 3
