"""A replica that sends nonsense, too much or too often is lost, and other replicas notice nothing."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from math import inf, nan
from typing import Any

import msgspec
import pytest

from app.engine.request import TokenDelta, TokenLogprobs
from app.fleet import Frame, FrameReader, ReplicaLost
from app.fleet.connection import ReplicaConnection
from app.fleet.dispatch import Candidate, PrefixChanges, RequestSize
from app.fleet.dispatch.decision import Scoring
from app.fleet.frames import FRAME_VERSION, MAX_MESSAGE_BYTES, encode
from app.fleet.in_flight import InFlightRequest, Turns
from tests.fleet.test_connection import Ingress, Transport
from tests.kit.engine import make_request
from tests.kit.fleet import LocalFleet, make_report
from tests.waiting import until


async def lost_by(ingress: Ingress, *pieces: bytes) -> ReplicaLost:
    """Feed a reader; the last piece ends it. Returns the reason."""
    reader = ingress.reader()
    for piece in pieces[:-1]:
        reader.data_received(piece)
    assert ingress.registry.reports["r0"] == make_report()
    reader.data_received(pieces[-1])
    return await asyncio.wait_for(reader.ended(), 0.1)


def with_report(number: int, **fields: Any) -> bytes:
    return encode(Frame(number, make_report(**fields), ()))


NUMBERS = (
    "num_requests", "num_background", "num_unpreemptible_background", "max_requests", "max_running",
    "num_waiting_tokens", "num_kv_tokens", "num_own", "num_free_kv_tokens", "num_prompt_tokens_of_others",
)  # fmt: skip
AMOUNTS = ("tokens_per_s", "ended_per_s", "step_age_s", "wake_s")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in NUMBERS for value in (-1, 1 << 63, 1.5, "many", [])),
        *((name, value) for name in AMOUNTS for value in (nan, inf, -inf, -0.5, 1e300, "much", None)),
        ("group", "g" * 100_000),
        ("group", 5),
        ("state", "s" * 100_000),
        ("backend", "b" * 100_000),
        ("adapters", tuple(map(str, range(100_000)))),
        ("adapters", ("a" * 100_000,)),
        ("backends_failed", {str(number): "" for number in range(1_000)}),
    ],
)  # fmt: skip
async def test_a_report_that_no_replica_can_make_loses_the_replica_and_leaves_the_report_before(
    name: str, value: Any
) -> None:
    ingress = Ingress()
    assert (await lost_by(ingress, with_report(0), with_report(1, **{name: value}))).reason == "broken"
    assert ingress.registry.reports["r0"] == make_report()


@pytest.mark.parametrize("token_id", [-1, 1 << 32, 1.5, "a"])
async def test_tokens_that_are_in_no_vocabulary_lose_the_replica_and_not_the_request(token_id: Any) -> None:
    ingress = Ingress()
    assert (await lost_by(ingress, ingress.frame(0), ingress.frame(1, 5, token_id))).reason == "broken"
    assert not ingress.request.has_ended
    assert ingress.request.num_tokens == 0


async def test_more_tokens_than_a_request_asks_for_lose_the_replica() -> None:
    ingress = Ingress()
    whole = ingress.request.request.sampling.max_tokens
    assert (await lost_by(ingress, ingress.frame(0, *[5] * whole), ingress.frame(1, 6))).reason == "broken"
    assert (await ingress.request.next()).token_ids == (5,) * whole


SCORE, TWO = TokenLogprobs(-1.0, 1), TokenLogprobs(-1.0, 1, (5, 6), (-1.0, -2.0))
PLAIN, SCORED = {"logprobs": 2}, {"prompt_logprobs": 0}


@pytest.mark.parametrize(
    ("asked", "fields"),
    [
        (PLAIN, {"prompt_logprobs": (SCORE,)}),
        (SCORED, {"prompt_logprobs": (SCORE,) * 2}),
        (SCORED, {"prompt_logprobs": (TWO,)}),
        (SCORED, {"logprobs": (TWO,)}),
        (PLAIN, {"logprobs": (SCORE,) * 2}),
        (PLAIN, {"logprobs": (TWO._replace(top_token_ids=(5, 6, 7)),)}),
        (PLAIN | {"logprob_token_ids": (5,)}, {"logprobs": (TWO,)}),
    ],
)
async def test_more_log_probabilities_than_a_request_asks_for_lose_the_replica(
    asked: dict[str, Any], fields: dict[str, Any]
) -> None:
    ingress = Ingress()
    ingress.request = InFlightRequest(make_request((5, 6, 7), **asked), began_at=0.0, turns=Turns())
    request_id = ingress.request.begin_attempt(0.0).request_id
    ingress.in_flight = {request_id: ingress.request}
    scores = (SCORE,) if asked is SCORED else ()
    fine = encode(Frame(0, make_report(), (TokenDelta(request_id, (), prompt_logprobs=scores),)))
    more = encode(Frame(1, make_report(), (TokenDelta(request_id, (5,), **fields),)))
    lost = await lost_by(ingress, fine, more)
    assert lost.reason == "broken"
    assert "log-probabilities" in str(lost)
    assert (await ingress.request.next()).prompt_logprobs == scores


async def test_prefixes_that_are_no_digests_lose_the_replica() -> None:
    ingress = Ingress()
    odd = encode(Frame(1, make_report(), (), None, PrefixChanges(held=b"1234567")))
    assert (await lost_by(ingress, with_report(0), odd)).reason == "broken"


async def test_the_length_of_a_message_is_bounded_before_its_bytes_come() -> None:
    ingress = Ingress()
    header = bytes([FRAME_VERSION]) + (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big")
    lost = await lost_by(ingress, with_report(0), header)
    assert lost.reason == "broken"
    assert "67,108,865 bytes" in str(lost)


def flood(ingress: Ingress) -> Callable[[int], bytes]:
    return lambda number: with_report(number)


def flood_of_strangers(ingress: Ingress) -> Callable[[int], bytes]:
    return lambda number: encode(Frame(number, make_report(), (TokenDelta("of nobody", (5,)),)))


@pytest.mark.parametrize("frames_of", [flood, flood_of_strangers])
async def test_a_flood_of_frames_that_bring_nothing_loses_the_replica(
    frames_of: Callable[[Ingress], Callable[[int], bytes]],
) -> None:
    ingress = Ingress()
    frame = frames_of(ingress)
    reader = ingress.reader()
    number = 0
    while not reader._ended.done():
        reader.data_received(frame(number))
        number += 1
        assert number < 1_000_000
    assert number > 5_000, "some are no flood"
    assert (await reader.ended()).reason == "broken"


async def test_a_few_large_messages_that_bring_nothing_are_a_flood() -> None:
    ingress = Ingress()
    strangers = tuple(TokenDelta(f"{number:0>1000}", ()) for number in range(1_000))  # 1 MB
    reader = ingress.reader()
    for number in range(30):
        reader.data_received(encode(Frame(number, make_report(), strangers)))
    assert (await asyncio.wait_for(reader.ended(), 0.1)).reason == "broken"


@pytest.mark.parametrize("are_asked", [True, False])
async def test_views_are_a_flood_unless_they_were_asked_for(are_asked: bool) -> None:
    async with LocalFleet(1) as local:
        [replica] = local.replicas
        if are_asked:
            local.fleet.watch(lambda replica_id, view: None)
        stream, view = replica.stream, await replica.engine.snapshot()
        assert stream is not None
        for _ in range(10_000):
            stream.show(view)
        await until(lambda: stream._to_reader.empty() or not stream.is_writable)
        assert stream.is_writable == are_asked


async def test_frames_with_tokens_are_no_flood() -> None:
    ingress = Ingress()
    ingress.request.request = make_request(max_tokens=1_000_000)
    ingress.in_flight = {ingress.request.begin_attempt(0.0).request_id: ingress.request}
    reader = ingress.reader()
    for number in range(20_000):
        reader.data_received(ingress.frame(number, 5))
    assert not reader._ended.done()
    assert len((await ingress.request.next()).token_ids) == 20_000


async def test_a_replica_that_sends_nonsense_each_time_is_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    ingress = Ingress()
    lost: list[str] = []

    async def connect(reader: FrameReader) -> Transport:
        asyncio.get_running_loop().call_soon(reader.data_received, with_report(0, tokens_per_s=nan))
        return Transport()

    connection = ReplicaConnection("r0", ingress.reader, connect, lambda _, why: lost.append(str(why)), lambda: None)
    await until(lambda: len(lost) >= 3)
    connection.close()
    with_it = [each for each in caplog.records if "tokens_per_s" in each.message or "replica r0" in each.message]
    assert [each.levelno for each in with_it] == [logging.WARNING]


@pytest.mark.parametrize("tokens_per_s", [5e-324, 1e15])
def test_the_weight_of_a_reported_speed_is_bounded(tokens_per_s: float) -> None:
    usual = [Candidate(replica_id=f"r{n}", tokens_per_s=1_000.0, num_prefill_tokens=500) for n in range(3)]
    odd = Candidate(replica_id="odd", tokens_per_s=tokens_per_s, num_prefill_tokens=500)
    scoring = Scoring.of([*usual, odd], RequestSize(num_prompt_tokens=10, num_expected_tokens=10))
    assert 0.005 < scoring.score(odd) / scoring.score(usual[0]) < 200


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_a_frame_has_in_place_of_its_parts_it_is_refused_or_makes_sense(seed: int) -> None:
    rng = random.Random(seed)
    odd = [None, -1, 1 << 63, nan, inf, "", "a", b"1", [], {}, [[]], True, [nan], {"a": 1}]
    ingress = Ingress()
    for _ in range(50):
        frame = Frame(0, make_report(), (TokenDelta("a", (5,)),), None, PrefixChanges(b""))
        plain = msgspec.msgpack.decode(msgspec.msgpack.encode(frame))
        place = rng.choice([plain, plain[1], plain[2], plain[2][0], plain[4]])
        place[rng.randrange(len(place))] = rng.choice(odd)
        body = msgspec.msgpack.encode(plain)
        reader = ingress.reader()
        reader.data_received(bytes([FRAME_VERSION]) + len(body).to_bytes(4, "big") + body)
        reader.end(None)
        placed = ingress.registry.place(make_request(request_id="one"), ["r0"])
        assert placed.scoring.score(placed.candidates[0]) < inf
        ingress.registry.end("one")
