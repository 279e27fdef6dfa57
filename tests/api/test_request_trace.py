"""The spans of requests: what was when, by the times that ingress and replicas note anyway."""

from __future__ import annotations

import asyncio

import pytest

from app.api.request_trace import RequestTrace, Span
from app.batches import ItemOrigin
from app.engine.request import EngineTimes, FinishReason, Queued, Request, TokenDelta
from app.errors import Overloaded, StepFailed
from app.text import Tokenizer
from tests.kit.service import Script, Service, last, say

TIMES = EngineTimes(0.002, 0.003, "continuous-fcfs-00c0ffee")
BODY = {"prompt": "Hi", "stream": True}


class KeptTraces:
    """A tracer that keeps what it gets."""

    def __init__(self) -> None:
        self.traces: list[RequestTrace] = []

    def record(self, trace: RequestTrace) -> None:
        self.traces.append(trace)


def traced(tokenizer: Tokenizer, script: Script, body: dict[str, object], **headers: str) -> RequestTrace:
    service, kept = Service(tokenizer, script), KeptTraces()
    service.handler.tracer = kept
    service.app = service.built()
    service.call("POST", "/v1/completions", body, headers)
    [trace] = kept.traces
    return trace


def served(request: Request) -> list[TokenDelta]:
    return [
        TokenDelta(request.request_id, (20,), queued=Queued(0, 0.0, "r1"), times=TIMES),
        last(request, (21,), FinishReason.LENGTH),
    ]


def resumed(request: Request) -> list[TokenDelta]:
    return [
        *served(request)[:1],
        TokenDelta(request.request_id, (22,), queued=Queued(0, 0.0, "r2"), times=TIMES),
        last(request, (21,), FinishReason.LENGTH),
    ]


def named(trace: RequestTrace, name: str) -> list[Span]:
    return [span for span in trace.spans() if span.name == name]


def test_a_request_is_checked_queued_prefilled_decoded_and_streamed(tokenizer: Tokenizer) -> None:
    trace = traced(tokenizer, served, BODY, **{"x-request-id": "mine", "traceparent": "00-a-b-01"})
    spans = list(trace.spans())
    assert [span.name for span in spans] == ["check", "queue", "prefill", "decode", "stream"]
    assert (trace.name, trace.parent) == ("POST /v1/completions", {"traceparent": "00-a-b-01"})
    check, queue, prefill, decode, stream = spans
    assert check.began_ns == trace.began_ns
    assert (queue.ended_ns - queue.began_ns, prefill.ended_ns - prefill.began_ns) == (2_000_000, 3_000_000)
    assert queue.ended_ns == prefill.began_ns
    assert prefill.ended_ns == decode.began_ns == stream.began_ns <= decode.ended_ns <= stream.ended_ns
    assert stream.ended_ns == trace.ended_ns
    assert decode.attributes["carousel.replica"] == "r1"
    assert trace.attributes["carousel.request_id"] == "mine"
    assert str(trace.attributes["gen_ai.response.id"]).startswith("cmpl-mine-")
    assert trace.attributes["gen_ai.usage.output_tokens"] == 2
    assert trace.error is None


def test_a_request_that_goes_on_elsewhere_has_the_spans_of_both_replicas(tokenizer: Tokenizer) -> None:
    trace = traced(tokenizer, resumed, BODY)
    assert [span.attributes["carousel.replica"] for span in named(trace, "decode")] == ["r1", "r2"]
    [again] = named(trace, "resumed")
    assert again.attributes == {"carousel.replica": "r2", "carousel.choice": 0, "carousel.attempt": 1} | {
        "carousel.settings": TIMES.settings
    }
    assert len(named(trace, "stream")) == 1


def test_each_choice_has_its_spans(tokenizer: Tokenizer) -> None:
    trace = traced(tokenizer, served, {"prompt": "Hi", "n": 3})
    assert sorted(span.attributes["carousel.choice"] for span in named(trace, "decode")) == [0, 1, 2]


def test_errors_are_in_the_trace(tokenizer: Tokenizer) -> None:
    refused = traced(tokenizer, say(tokenizer, "3"), {"prompt": "Hi", "max_tokens": 100_000})
    assert type(refused.error).__name__ == "ContextTooLong"
    assert [span.name for span in refused.spans()] == ["check"]
    full = traced(tokenizer, lambda request: [Overloaded("full")], BODY)
    assert isinstance(full.error, Overloaded)
    broken = traced(tokenizer, lambda request: [*served(request)[:1], StepFailed("poison")], BODY)
    assert isinstance(broken.error, StepFailed)
    assert [span.name for span in broken.spans()] == ["check", "queue", "prefill", "decode", "stream"]


def test_a_request_that_was_only_queued_has_its_wait(tokenizer: Tokenizer) -> None:
    queued = TokenDelta("", (), queued=Queued(3, 1.0, "r1"))
    trace = traced(tokenizer, lambda request: [queued, StepFailed("poison")], BODY)
    assert [span.name for span in trace.spans()] == ["check", "queue"]


def traced_item(tokenizer: Tokenizer, script: Script, body: dict[str, object]) -> list[RequestTrace]:
    service, kept = Service(tokenizer, script), KeptTraces()
    service.handler.tracer = kept
    asyncio.run(service.handler.handle_item("", "/v1/completions", body, ItemOrigin("batch_1", 7)))
    return kept.traces


def test_an_item_of_a_batch_has_the_spans_of_a_request_and_one_trace_for_all_its_attempts(tokenizer: Tokenizer) -> None:
    [trace] = traced_item(tokenizer, resumed, {"prompt": "Hi"})
    assert (trace.name, trace.error) == ("item /v1/completions", None)
    assert (trace.attributes["carousel.request_id"], trace.attributes["carousel.batch_id"]) == ("batch_1-7", "batch_1")
    assert str(trace.attributes["gen_ai.response.id"]).startswith("cmpl-batch_1-7-")
    assert [span.attributes["carousel.replica"] for span in named(trace, "decode")] == ["r1", "r2"]
    assert len(named(trace, "resumed")) == 1
    again = RequestTrace.of_item("/v1/completions", ItemOrigin("batch_1", 7))
    other = RequestTrace.of_item("/v1/completions", ItemOrigin("batch_1", 8))
    assert trace.trace_id == again.trace_id != other.trace_id


def test_an_item_that_fails_is_traced_and_one_that_finds_no_room_is_not(tokenizer: Tokenizer) -> None:
    [wrong] = traced_item(tokenizer, served, {"prompt": "Hi", "temperature": 9})
    assert type(wrong.error).__name__ == "InvalidRequest"
    full, kept = Service(tokenizer, lambda request: [Overloaded("full")]), KeptTraces()
    full.handler.tracer = kept
    with pytest.raises(Overloaded):
        asyncio.run(full.handler.handle_item("", "/v1/completions", {"prompt": "Hi"}, ItemOrigin("batch_1", 7)))
    assert not kept.traces
