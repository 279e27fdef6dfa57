"""A request that an ingress has not finished: what is kept for its reader, and what later attempts are told."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
import weakref
from contextlib import suppress
from dataclasses import replace

import pytest

from app.engine.request import EngineTimes, FinishReason, Queued, Request, TokenDelta, TokenLogprobs
from app.errors import Cancelled, CarouselError, DeadlineMissed, DeviceFault, EngineStopped, Overloaded
from app.fleet.dispatch import Candidate, Decision
from app.fleet.dispatch.decision import Scoring
from app.fleet.in_flight import InFlightRequest, ReplicaLost, Turns
from tests.kit.engine import make_full_request, make_request


def begun(request: Request | None = None, *, turns: Turns | None = None) -> InFlightRequest:
    in_flight = InFlightRequest(request or make_request(), began_at=0.0, turns=turns or Turns())
    in_flight.begin_attempt(0.0)
    return in_flight


def delta(in_flight: InFlightRequest, *token_ids: int, num_cached_tokens: int = 0) -> TokenDelta:
    return TokenDelta(in_flight.sent.request_id, token_ids, num_cached_tokens=num_cached_tokens)


async def test_what_is_not_read_takes_little_more_than_its_tokens_numbers() -> None:
    num_tokens = 20_000
    in_flight = begun(make_request(max_tokens=num_tokens))
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
    in_flight = begun(make_request(prompt_logprobs=0))
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
    in_flight = InFlightRequest(replace(make_request(), no_queue=True), began_at=0.0, turns=Turns())
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
    request = make_request(deadline_s=10.0, prompt_logprobs=0)
    in_flight = InFlightRequest(request, began_at=100.0, turns=Turns())
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
    with pytest.raises(DeadlineMissed, match="the deadline of 10 s passed after 3 generated tokens"):
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


async def test_the_readers_of_requests_that_are_lost_at_once_are_woken_a_few_in_each_turn_in_their_order() -> None:
    turns, woken = Turns(at_once=3), []

    async def read(number: int, in_flight: InFlightRequest) -> None:
        with suppress(ReplicaLost):
            await in_flight.next()
        woken.append(number)

    lost = [begun(turns=turns) for _ in range(10)]
    other = begun(turns=turns)
    readers = [asyncio.create_task(read(number, each)) for number, each in enumerate([*lost, other])]
    await asyncio.sleep(0)
    for each in lost:
        each.fail(ReplicaLost("gone", reason="ended"))
        assert each.has_ended, "nothing that comes from now on counts"
    most, before = 0, 0
    other.put(delta(other, 5))
    while len(woken) < len(readers):
        await asyncio.sleep(0)
        most, before = max(most, len(woken) - before), len(woken)
    assert most <= 4, "three, and the one that is not lost"
    assert woken.index(10) <= 3, "it does not wait for them"
    assert [number for number in woken if number != 10] == list(range(10))


async def test_a_turn_of_an_earlier_attempt_wakes_no_reader_of_a_later_one() -> None:
    in_flight = begun()
    reader = asyncio.create_task(in_flight.next())
    await asyncio.sleep(0)
    in_flight.fail(ReplicaLost("gone", reason="ended"))
    reader.cancel()
    in_flight.begin_attempt(1.0)
    later = asyncio.create_task(in_flight.next())
    for _ in range(5):
        await asyncio.sleep(0)
    in_flight.put(delta(in_flight, 5))
    assert (await later).token_ids == (5,)


async def test_a_request_that_is_cancelled_before_it_is_told_of_its_loss_does_not_go_on() -> None:
    in_flight = begun()
    reader = asyncio.create_task(in_flight.next())
    await asyncio.sleep(0)
    in_flight.fail(ReplicaLost("gone", reason="ended"))
    in_flight.fail(Cancelled("no more"))
    with pytest.raises(Cancelled):
        await reader


async def freed_with(*errors: CarouselError | ReplicaLost) -> list[bool]:
    """Whether each of some requests, which fail with these, is freed when it has ended, without a collection."""
    gc.disable()
    try:
        in_flights = [begun() for _ in errors]
        for in_flight, error in zip(in_flights, errors, strict=True):
            in_flight.fail(error)
            with suppress(Overloaded, ReplicaLost):
                await in_flight.next()
        found = [weakref.ref(each) for each in in_flights]
        del errors, error, in_flight, in_flights
        return [each() is None for each in found]
    finally:
        gc.enable()


async def test_a_request_that_has_failed_is_freed_without_a_collection() -> None:
    assert await freed_with(Overloaded("full"), Overloaded("full")) == [True, True]


async def test_the_loss_of_a_replica_keeps_no_more_than_the_last_of_its_requests() -> None:
    """Its connection has it until it is open again."""
    lost = ReplicaLost("gone", reason="ended")
    assert (await freed_with(lost, lost, lost))[:2] == [True, True]


def test_a_later_attempt_has_all_fields_of_the_request() -> None:
    request = make_full_request()
    assert begun(request).begin_attempt(1.5) == replace(request, request_id="full.1", deadline_s=8.0)


class Taker:
    """Takes deltas in the reader's place, while it may."""

    def __init__(self) -> None:
        self.taken: list[TokenDelta] = []
        self.may_take = True

    def __call__(self, each: TokenDelta) -> bool:
        if self.may_take:
            self.taken.append(each)
        return self.may_take

    @property
    def token_ids(self) -> list[int]:
        return [token_id for each in self.taken for token_id in each.token_ids]


async def waiting(in_flight: InFlightRequest) -> asyncio.Task[TokenDelta]:
    """A reader that waits for the next delta."""
    reader = asyncio.create_task(in_flight.next())
    await asyncio.sleep(0)
    return reader


async def test_deltas_between_the_first_token_and_the_end_are_taken_while_the_reader_waits() -> None:
    in_flight, taker = begun(make_request(max_tokens=50)), Taker()
    in_flight.take = taker
    reader = await waiting(in_flight)
    in_flight.put(TokenDelta(in_flight.sent.request_id, (), queued=Queued(0, 0.0)))
    assert (await reader).queued is not None
    reader = await waiting(in_flight)
    in_flight.put(delta(in_flight, 5))
    assert (await reader).token_ids == (5,)
    assert taker.taken == []
    in_flight.put(delta(in_flight, 6))  # nobody waits
    reader = await waiting(in_flight)
    assert (await reader).token_ids == (6,)
    reader = await waiting(in_flight)
    in_flight.put(delta(in_flight, 7))
    in_flight.put(delta(in_flight, 8, 9))
    assert taker.token_ids == [7, 8, 9]
    assert not reader.done()
    taker.may_take = False
    in_flight.put(delta(in_flight, 10))
    taker.may_take = True
    in_flight.put(delta(in_flight, 11))  # the reader has been woken, and comes first
    assert (await reader).token_ids == (10, 11)
    reader = await waiting(in_flight)
    in_flight.put(TokenDelta(in_flight.sent.request_id, (12,), FinishReason.LENGTH))
    assert (await reader).finish_reason is FinishReason.LENGTH
    assert taker.token_ids == [7, 8, 9]
    assert in_flight.num_tokens == 8


async def test_another_replica_goes_on_behind_what_was_taken_and_its_first_token_is_read() -> None:
    in_flight, taker = begun(make_request(max_tokens=50)), Taker()
    in_flight.take = taker
    in_flight.put(delta(in_flight, 5, num_cached_tokens=2))
    await in_flight.next()
    reader = await waiting(in_flight)
    in_flight.put(delta(in_flight, 6, num_cached_tokens=2))
    in_flight.fail(ReplicaLost("gone", reason="ended"))
    with pytest.raises(ReplicaLost):
        await reader
    assert in_flight.begin_attempt(1.0).generated_token_ids == (5, 6)
    reader = await waiting(in_flight)
    in_flight.put(delta(in_flight, 7))
    assert (await reader).token_ids == (7,)
    reader = await waiting(in_flight)
    in_flight.put(delta(in_flight, 8))
    assert taker.token_ids == [6, 8]
    # Whichever replica they come from, they look as those of the first one.
    assert {(each.request_id, each.num_cached_tokens) for each in taker.taken} == {(in_flight.request.request_id, 2)}
    reader.cancel()


async def test_an_error_of_the_taker_is_the_requests_own() -> None:
    in_flight = begun()

    def take(each: TokenDelta) -> bool:
        raise ZeroDivisionError

    in_flight.take = take
    in_flight.put(delta(in_flight, 5))
    await in_flight.next()
    reader = await waiting(in_flight)
    in_flight.put(delta(in_flight, 6))
    with pytest.raises(ZeroDivisionError):
        await reader
    assert in_flight.has_ended


async def test_nothing_is_taken_for_a_reader_that_has_gone() -> None:
    in_flight, taker = begun(make_request(max_tokens=50)), Taker()
    in_flight.take = taker
    in_flight.put(delta(in_flight, 5))
    await in_flight.next()
    reader = await waiting(in_flight)
    reader.cancel()
    in_flight.put(delta(in_flight, 6))
    assert taker.taken == []
