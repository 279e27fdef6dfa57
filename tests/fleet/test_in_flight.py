"""A request that an ingress has not finished: what is kept for its reader, and what later attempts are told."""

from __future__ import annotations

import asyncio
import tracemalloc
from dataclasses import replace

import pytest

from app.engine.request import EngineTimes, FinishReason, Queued, Request, TokenDelta, TokenLogprobs
from app.errors import CarouselError, DeadlineMissed, DeviceFault, EngineStopped, Overloaded
from app.fleet.dispatch import Candidate, Decision
from app.fleet.dispatch.decision import Scoring
from app.fleet.in_flight import InFlightRequest, ReplicaLost
from tests.kit.engine import make_full_request, make_request


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
            request_id,
            (5,),
            num_cached_tokens=2,
            prompt_logprobs=scores[1:2],
            logprobs=scores[2:3],
            times=times,
            num_rejected=3,
        ),
        TokenDelta(request_id, (6, 7), num_cached_tokens=2, logprobs=scores[2:], num_accepted=1, num_rejected=2),
        TokenDelta(request_id, (4,), FinishReason.STOP, stop_token_id=4, num_cached_tokens=2, embedding=b"0000"),
    ):
        in_flight.put(each)
    assert await in_flight.next() == TokenDelta(
        request_id, (5, 6, 7, 4), FinishReason.STOP, stop_token_id=4, num_cached_tokens=2, queued=queued,
        logprobs=(scores[2], *scores[2:]), prompt_logprobs=scores[:2], embedding=b"0000", times=times,
        num_accepted=1, num_rejected=5,
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
    assert (await in_flight.next()).num_cached_tokens == 0
    in_flight.begin_attempt(1.0)
    in_flight.put(delta(in_flight, 5, num_cached_tokens=3))
    assert (await in_flight.next()).num_cached_tokens == 3
    in_flight.begin_attempt(2.0)
    in_flight.put(delta(in_flight, 6, num_cached_tokens=40))
    assert (await in_flight.next()).num_cached_tokens == 3
    in_flight.begin_attempt(3.0)
    in_flight.put(delta(in_flight, 7))
    assert (await in_flight.next()).num_cached_tokens == 3


async def test_a_later_attempt_has_its_own_id_the_tokens_so_far_and_the_time_that_is_left() -> None:
    request = make_request(deadline_s=10.0)
    in_flight = InFlightRequest(request, began_at=100.0)
    assert in_flight.begin_attempt(103.0) is request
    assert in_flight.needs_weights == 0
    in_flight.put(TokenDelta(request.request_id, (5, 6), prompt_logprobs=(TokenLogprobs(-1.0, 1),)))
    assert not in_flight.has_progressed
    await in_flight.next()
    assert in_flight.has_progressed
    again = in_flight.begin_attempt(104.0)
    assert (again.request_id, again.deadline_s) == (f"{request.request_id}.1", 6.0)
    assert (again.generated_token_ids, again.num_scored_tokens, in_flight.num_tokens) == ((5, 6), 1, 2)
    assert not in_flight.has_progressed
    in_flight.put(delta(in_flight, 7))
    assert (await in_flight.next()).request_id == request.request_id
    with pytest.raises(DeadlineMissed, match="the deadline of 10 s has passed with 3 tokens"):
        in_flight.begin_attempt(110.0)


def chosen(candidate: Candidate) -> Decision:
    return Decision(policy="any", rule="any", candidates=(candidate,), scoring=Scoring(1, 0.0))


def test_tokens_need_the_weights_that_made_them() -> None:
    in_flight = begun(replace(make_request(), generated_token_ids=(5,)))
    assert not in_flight.is_trusted
    assert in_flight.needs_weights == 0
    in_flight.place(chosen(Candidate(replica_id="a")), weights=7)
    assert (in_flight.replica_id, in_flight.needs_weights, in_flight.is_trusted) == ("a", 7, True)
    in_flight.place(chosen(Candidate(replica_id="b", is_suspect=True)))
    assert (in_flight.replica_id, in_flight.needs_weights, in_flight.is_trusted) == ("b", 0, False)


async def test_after_the_end_of_an_attempt_nothing_counts() -> None:
    in_flight = begun()
    in_flight.put(TokenDelta(in_flight.sent.request_id, (5,), FinishReason.STOP))
    assert in_flight.has_ended
    assert in_flight.is_accepted
    in_flight.put(delta(in_flight, 6))
    in_flight.fail(EngineStopped("late"))
    assert (await in_flight.next()).token_ids == (5,)
    assert in_flight.num_tokens == 1


@pytest.mark.parametrize(
    ("error", "raised"),
    [(Overloaded("full"), Overloaded), (EngineStopped("stopped"), ReplicaLost), (DeviceFault("broken"), ReplicaLost)],
)
async def test_an_error_comes_after_the_tokens_and_one_of_the_whole_engine_is_none_of_the_request(
    error: CarouselError, raised: type[Exception]
) -> None:
    in_flight = begun()
    in_flight.put(TokenDelta(in_flight.sent.request_id, (5,), FinishReason.ERROR, error=error))
    assert (in_flight.has_ended, in_flight.is_accepted) == (True, False)
    assert await in_flight.next() == delta(in_flight, 5)
    with pytest.raises(raised, match=str(error)) as caught:
        await in_flight.next()
    assert not isinstance(caught.value, ReplicaLost) or caught.value.reason == "engine_failed"


async def test_a_reader_that_waits_is_woken_by_a_failure_and_by_nothing_after_it() -> None:
    in_flight = begun()
    reader = asyncio.create_task(in_flight.next())
    await asyncio.sleep(0)
    in_flight.fail(ReplicaLost("gone", reason="silent"))
    in_flight.fail(EngineStopped("later"))
    with pytest.raises(ReplicaLost, match="gone"):
        await reader


def test_a_later_attempt_has_all_fields_of_the_request() -> None:
    request = make_full_request()
    assert begun(request).begin_attempt(1.5) == replace(request, request_id="full.1", deadline_s=8.0)
