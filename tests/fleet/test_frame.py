"""Frames cross processes as plain tuples and arrive as what they were."""

from __future__ import annotations

import pickle

from app.engine.request import FinishReason, Queued, TokenDelta
from app.errors import Overloaded
from app.fleet import Frame, Report
from tests.fleet.reports import make_report

REPORT = make_report(group="blue", num_requests=3)


def test_a_frame_arrives_as_it_was_sent() -> None:
    deltas = (
        TokenDelta("one", (), queued=Queued(2, 0.5, "replica", "the shortest queue")),
        TokenDelta("two", (5,), num_cached_tokens=16),
        TokenDelta("three", (6, 7), FinishReason.STOP, stop_token_id=7),
    )
    sent = Frame(4, REPORT, deltas)
    arrived = pickle.loads(pickle.dumps(sent))
    assert arrived == sent
    assert isinstance(arrived.report, Report)
    assert {type(delta) for delta in arrived.deltas} == {TokenDelta}
    assert arrived.deltas[0].queued == deltas[0].queued
    assert arrived.deltas[2].finish_reason is FinishReason.STOP


def test_an_error_arrives_with_its_numbers() -> None:
    delta = TokenDelta("one", (), FinishReason.ERROR, error=Overloaded("full", retry_after_s=3.0))
    [arrived] = pickle.loads(pickle.dumps(Frame(0, REPORT, (delta,)))).deltas
    assert isinstance(arrived.error, Overloaded)
    assert (str(arrived.error), arrived.error.retry_after_s) == ("full", 3.0)
