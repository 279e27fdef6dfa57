"""The trace of one request or batch item. Its spans are built when it ends, from times that are measured anyway.

A `Tracer` sends the spans to OpenTelemetry (`deployments/serve/tracing.py`). Without a tracer, nothing is recorded.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from app.batches import ItemOrigin
from app.engine.request import EngineTimes

Attributes = Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One part of a request's time. All times are nanoseconds of wall time, on the ingress's clock."""

    name: str
    began_ns: int
    ended_ns: int
    attributes: Attributes = field(default_factory=dict)


class Tracer(Protocol):
    """Sends the spans of requests to a collector."""

    def record(self, trace: RequestTrace) -> None:
        """Send the trace of a request that has ended, with or without an error. Must neither block nor raise."""
        ...


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """One attempt to generate a choice, on one replica."""

    index: int  # of the choice
    number: int  # counts the attempts at this choice from 0
    replica_id: str
    accepted_ns: int
    first_token_ns: int | None = None
    times: EngineTimes | None = None
    ended_ns: int | None = None

    @property
    def began_ns(self) -> int:
        """When the replica queued the choice. `accepted_ns` is later if the replica reports only its first token."""
        if self.first_token_ns is None or self.times is None:
            return self.accepted_ns
        return self.first_token_ns - _ns(self.times.queue_s + self.times.prefill_s)


@dataclass(slots=True)
class PipelineStepTimes:
    """The times of one pipeline step, in nanoseconds of wall time."""

    name: str
    model: str
    began_ns: int
    ended_ns: int | None = None

    def end(self) -> None:
        """Record that the step has finished."""
        self.ended_ns = time.time_ns()


class RequestTrace:
    """The times of one HTTP request or item, including the times that replicas report. Not thread-safe."""

    def __init__(
        self, name: str, headers: Mapping[str, str] = MappingProxyType({}), *, trace_id: int | None = None
    ) -> None:
        """The W3C Trace Context in `headers` (names in lower case) identifies the trace that the request belongs to.

        A batch item has no headers, so `trace_id` identifies its trace.
        """
        self.name = name
        self.trace_id = trace_id
        propagated = ("traceparent", "tracestate")
        self.parent = {each: headers[each] for each in propagated if each in headers}
        self.attributes: dict[str, str | int | float] = {}
        self.error: BaseException | None = None
        self.began_ns = self.ended_ns = time.time_ns()
        self._checked_ns: int | None = None
        self._attempts: list[_Attempt] = []
        self._steps: list[PipelineStepTimes] = []

    @classmethod
    def of_item(cls, path: str, origin: ItemOrigin) -> RequestTrace:
        """Return the trace of one attempt to answer an item. All attempts use a trace id made from the request id."""
        digest = hashlib.sha256(origin.request_id.encode()).digest()
        trace = cls(f"item {path}", trace_id=int.from_bytes(digest[:16]))
        trace.attributes |= {"carousel.request_id": origin.request_id, "carousel.batch_id": origin.job_id}
        return trace

    @property
    def has_replica(self) -> bool:
        """Whether a replica has queued a choice, or a pipeline step has finished."""
        return bool(self._attempts) or any(step.ended_ns for step in self._steps)

    def checked(self) -> None:
        """Record that the request was checked and its first generation is starting."""
        self._checked_ns = self._checked_ns or time.time_ns()

    def step(self, name: str, model: str) -> PipelineStepTimes:
        """Record the start of a pipeline step that uses this model."""
        step = PipelineStepTimes(name, model, time.time_ns())
        self._steps.append(step)
        return step

    def accepted(self, index: int, replica_id: str) -> None:
        """Record that a replica has queued a choice. Ends earlier attempts at the choice, whose replicas were lost."""
        now, number = time.time_ns(), 0
        for before in self._of_choice(index):
            before.ended_ns, number = before.ended_ns or now, number + 1
        self._attempts.append(_Attempt(index=index, number=number, replica_id=replica_id, accepted_ns=now))

    def first_token(self, index: int, times: EngineTimes) -> None:
        """Record the first token of the latest attempt at a choice."""
        for attempt in [*self._of_choice(index)][-1:]:
            attempt.first_token_ns, attempt.times = time.time_ns(), times

    def finished(self, index: int) -> None:
        """Record that a choice has finished normally."""
        for attempt in [*self._of_choice(index)][-1:]:
            attempt.ended_ns = time.time_ns()

    def end(self, error: BaseException | None = None) -> None:
        """Record that the last byte was sent, or that an error has ended the request."""
        self.ended_ns = time.time_ns()
        self.error = self.error or error

    def spans(self) -> Iterator[Span]:
        """Yield the spans within the request. Call after `end`."""
        checked_ns = self._checked_ns or self.ended_ns
        yield Span(name="check", began_ns=self.began_ns, ended_ns=checked_ns)
        for step in self._steps:
            yield Span(
                name=step.name,
                began_ns=step.began_ns,
                ended_ns=step.ended_ns or self.ended_ns,
                attributes={"gen_ai.request.model": step.model},
            )
        for attempt in self._attempts:
            yield from self._spans_of(attempt)
        firsts = [each.first_token_ns for each in self._attempts if each.first_token_ns is not None]
        if firsts:
            yield Span(name="stream", began_ns=min(firsts), ended_ns=self.ended_ns)

    def _spans_of(self, attempt: _Attempt) -> Iterator[Span]:
        began_ns, ended_ns = attempt.began_ns, attempt.ended_ns or self.ended_ns
        attributes: dict[str, str | int | float] = {
            "carousel.replica": attempt.replica_id,
            "carousel.choice": attempt.index,
            "carousel.attempt": attempt.number,
        }
        if attempt.number:
            yield Span(name="resumed", began_ns=began_ns, ended_ns=ended_ns, attributes=attributes)
        if attempt.first_token_ns is None or attempt.times is None:
            yield Span(name="queue", began_ns=began_ns, ended_ns=ended_ns, attributes=attributes)
            return
        joined_ns, first_ns = attempt.first_token_ns - _ns(attempt.times.prefill_s), attempt.first_token_ns
        attributes["carousel.settings"] = attempt.times.settings
        yield Span(name="queue", began_ns=began_ns, ended_ns=joined_ns, attributes=attributes)
        yield Span(name="prefill", began_ns=joined_ns, ended_ns=first_ns, attributes=attributes)
        yield Span(name="decode", began_ns=first_ns, ended_ns=max(first_ns, ended_ns), attributes=attributes)

    def _of_choice(self, index: int) -> Iterator[_Attempt]:
        return (each for each in self._attempts if each.index == index)


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)
