"""Frames cross processes as plain values and arrive as what they were, in whatever pieces."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.request import FinishReason, Grammar, GrammarKind, Queued, Thought, TokenDelta, TokenLogprobs
from app.errors import CarouselError, DeadlineMissed, Failure, InvalidRequest, Overloaded
from app.fleet import Frame
from app.fleet.dispatch import ReplicaReport
from app.fleet.frames import (
    FRAME_VERSION,
    REQUEST_FIELDS,
    AbortRequest,
    InvalidFrame,
    SubmitRequest,
    encode,
    frame_decoder,
    message_decoder,
    used_fields,
)
from tests.kit.engine import make_full_request, make_request
from tests.kit.fleet import make_report

REPORT = make_report(group="blue", num_requests=3)
LOGPROBS = st.lists(
    st.builds(
        TokenLogprobs,
        st.floats(-1e4, 0),
        st.integers(1, 2**31),
        st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
        st.lists(st.floats(-1e4, 0), max_size=3).map(tuple),
    ),
    max_size=3,
).map(tuple)
DELTAS = st.builds(
    TokenDelta,
    request_id=st.text(max_size=40),
    token_ids=st.lists(st.integers(0, 2**31)).map(tuple),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_token_id=st.none() | st.integers(0, 2**31),
    num_cached_tokens=st.integers(0, 2**31),
    error=st.none(),
    queued=st.none() | st.builds(Queued, st.integers(0, 2**31), st.floats(0, 1e6), st.text(), st.text()),
    logprobs=LOGPROBS,
    prompt_logprobs=LOGPROBS,
    embedding=st.none() | st.binary(max_size=40),
    num_accepted=st.integers(0, 2**31),
    num_rejected=st.integers(0, 2**31),
)
FRAMES = st.builds(Frame, st.integers(0, 2**62), st.just(REPORT), st.lists(DELTAS, max_size=3).map(tuple))


def arrived(frame: Frame) -> Frame:
    [found] = frame_decoder().feed(encode(frame))
    return found


@given(frames=st.lists(FRAMES, max_size=3), cuts=st.lists(st.integers(0, 2000)))
def test_frames_arrive_as_they_were_sent_wherever_the_bytes_are_cut(frames: list[Frame], cuts: list[int]) -> None:
    data = b"".join(map(encode, frames))
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    decoder = frame_decoder()
    found = [
        frame
        for start, end in pairwise(places)
        for frame in decoder.feed(data[start:end])
    ]  # fmt: skip
    assert found == frames


def test_what_arrives_has_the_types_of_what_was_sent() -> None:
    deltas = (
        TokenDelta("one", (), queued=Queued(2, 0.5, "replica", "the shortest queue")),
        TokenDelta("two", (6, 7), FinishReason.STOP, stop_token_id=7),
        TokenDelta("three", (6,), logprobs=(TokenLogprobs(-1.5, 2, (5,), (-0.5,)),)),
    )
    found = arrived(Frame(4, REPORT, deltas))
    assert isinstance(found.report, ReplicaReport)
    assert {type(delta) for delta in found.deltas} == {TokenDelta}
    assert isinstance(found.deltas[0].queued, Queued)
    assert found.deltas[1].finish_reason is FinishReason.STOP
    assert found.deltas[2].logprobs[0].top_token_ids == (5,)


@pytest.mark.parametrize(
    "error",
    [
        Overloaded("full", retry_after_s=3.0),
        DeadlineMissed("late"),
        InvalidRequest("no", param="max_tokens", code="too_long"),
    ],
)
def test_an_error_arrives_with_its_numbers(error: CarouselError) -> None:
    [delta] = arrived(Frame(0, REPORT, (TokenDelta("one", (), FinishReason.ERROR, error=error),))).deltas
    assert type(delta.error) is type(error)
    assert vars(delta.error) == vars(error)


class NewerError(CarouselError):
    """Of a version that the reader does not have."""


def test_an_error_of_an_unknown_kind_is_a_failure_with_its_message() -> None:
    [delta] = arrived(Frame(0, REPORT, (TokenDelta("one", (), error=NewerError("new trouble")),))).deltas
    assert type(delta.error) is Failure
    assert str(delta.error) == "new trouble"


REQUEST = make_request(
    (5, 6, 7),
    request_id="one",
    max_tokens=9,
    grammar=Grammar(GrammarKind.CHOICE, '["a"]', thought=Thought("<think>", "</think>", is_open=False, max_tokens=7)),
    logit_bias=((5, -1.5),),
    bad_words=((5, 6), (7,)),
    deadline_s=2.5,
)


def test_a_request_arrives_as_it_was_sent() -> None:
    messages = [SubmitRequest(make_full_request()), AbortRequest("one")]
    assert message_decoder().feed(b"".join(map(encode, messages))) == messages


def test_a_request_names_the_fields_that_are_not_at_their_defaults() -> None:
    assert set(used_fields(make_request())) == {
        "request_id", "prompt_token_ids", "sampling", "sampling.max_tokens", "sampling.temperature",
    }  # fmt: skip
    full = set(used_fields(make_full_request()))
    assert full <= REQUEST_FIELDS
    assert {name for name in REQUEST_FIELDS - full if "=" not in name} == set()
    assert {"pooling=mean", "sampling.grammar.kind=regex"} <= full


def test_fields_of_a_newer_ingress_are_ignored_and_those_that_an_older_one_does_not_send_have_their_defaults() -> None:
    plain = msgspec.to_builtins(REQUEST)
    del plain["session"]
    del plain["sampling"]["bad_words"], plain["sampling"]["grammar"]["thought"]
    [found] = message_decoder().feed(framed([0, plain | {"new": 5}, None, "new"]))
    older = replace(REQUEST.sampling, bad_words=(), grammar=Grammar(GrammarKind.CHOICE, '["a"]'))
    assert found == SubmitRequest(replace(REQUEST, sampling=older))


def framed(body: object, *, version: int = FRAME_VERSION) -> bytes:
    data = msgspec.msgpack.encode(body)
    return bytes([version]) + len(data).to_bytes(4, "big") + data


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK",
        framed("hello"),
        framed((1, 2)),
        framed((1, (), ())),
        framed((1, msgspec.to_builtins(REPORT), [["one", ["not a token"]]])),
        framed((1, msgspec.to_builtins(REPORT), [["one", [], None, None, 0, "no error"]])),
    ],
)
def test_bytes_that_are_no_frame_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidFrame):
        frame_decoder().feed(data)


def test_a_frame_of_another_version_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidFrame, match=f"received version 9, but this process reads version {FRAME_VERSION}"):
        frame_decoder().feed(framed((0, msgspec.to_builtins(REPORT), []), version=9))


def test_fields_of_a_newer_replica_are_ignored() -> None:
    """A rolling update of code loses no stream: new fields are added at the end."""
    report = [*msgspec.to_builtins(REPORT), "new", 5]
    delta = [*msgspec.to_builtins(TokenDelta("one", (6, 7))), {"new": [1]}, 3]
    assert frame_decoder().feed(framed([4, report, [delta], None, None, [], None, "new"])) == [
        Frame(4, REPORT, (TokenDelta("one", (6, 7)),))
    ]


def test_fields_that_an_older_replica_does_not_send_have_their_defaults() -> None:
    [frame] = frame_decoder().feed(framed([4, msgspec.to_builtins(REPORT), [["one", [6]]]]))
    assert frame.deltas == (TokenDelta("one", (6,)),)


def test_a_frame_holds_plain_values_only() -> None:
    with pytest.raises(TypeError, match="but no object"):
        encode(Frame(0, REPORT, (TokenDelta("one", object()),)))  # type: ignore[arg-type]
