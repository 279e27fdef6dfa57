"""One streamed answer as a client sees it: the text, the arrival times of its parts, and how the answer ended."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.harness.http_call import EventStream, Target, call
from benchmarks.harness.timeline import Deliveries

TIMEOUT = "timeout"
_MAX_KEPT_BYTES = 4096  # maximum bytes stored of an answer that is not a stream


@dataclass(slots=True)
class Answer(Deliveries):
    """One request and its answer, updated as the answer arrives. Times are from `time.perf_counter`."""

    name: str = ""  # of the request
    begun_s: float = field(default_factory=time.perf_counter)  # when the client began, before it connected
    status: int | None = None  # None: the server sent no status
    headers: Mapping[str, str] = field(default_factory=dict)
    events_s: list[float] = field(default_factory=list)  # times of the events of all choices, with and without text
    num_pieces: int = 0  # number of events with text
    texts: dict[int, str] = field(default_factory=dict)  # by choice
    finish_reasons: dict[int, str] = field(default_factory=dict)  # by choice
    num_reported_tokens: int | None = None  # the number of output tokens in the server's usage
    is_done: bool = False  # whether [DONE] has arrived
    has_surplus: bool = False  # whether an event came after [DONE], or a choice ended twice
    refusal: bytes = b""  # the first bytes of a body with a status other than 200
    error: dict[str, Any] | None = None  # the error in the server's error event or in the refusal
    failure: str | None = None  # the client's description of a failed connection
    ended_s: float = 0.0  # 0: the request still runs

    @property
    def said(self) -> tuple[Any, ...]:
        """The parts of an answer that must be equal each time the server answers the same request."""
        return (sorted(self.texts.items()), sorted(self.finish_reasons.items()), self.num_reported_tokens)

    @property
    def num_tokens(self) -> int:
        """The number of output tokens that the server reported, or else the number of text pieces."""
        return self.num_pieces if self.num_reported_tokens is None else self.num_reported_tokens

    @property
    def has_succeeded(self) -> bool:
        """Whether the answer ended normally with some text. Servers that report no usage can succeed."""
        is_whole = self.status == 200 and self.is_done and self.failure is None and self.error is None
        return is_whole and bool(self.delivered_s)

    @property
    def is_complete(self) -> bool:
        """Whether the answer is well-formed and without an error, and the server has reported the number of tokens."""
        return self.is_well_formed and self.error is None and self.num_reported_tokens is not None

    @property
    def is_well_formed(self) -> bool:
        """Whether a client library accepts the end: an API error, or each choice ended once, followed by one [DONE]."""
        if self.status is None or self.failure is not None:
            return False
        if self.status != 200:
            return self.error is not None
        return self.is_done and not self.has_surplus

    @property
    def outcome(self) -> str:
        """`completed`, or a few words about how the request failed."""
        if self.failure is not None:
            return self.failure
        if self.status != 200:
            return f"status {self.status}"
        if self.error is not None:
            return f"error event: {self.error.get('code') or self.error.get('type')}"
        if self.is_done and not self.delivered_s:
            return "no text"
        return "completed" if self.is_complete else "malformed"

    @property
    def in_words(self) -> str:
        """The outcome with the server's error or refusal."""
        return f"{self.outcome} {self.error or self.refusal.decode(errors='replace')}".strip()

    def longest_pause_s(self, from_s: float, to_s: float) -> float:
        """Return the longest of the pauses that touch this time span. The wait for the first event is a pause."""
        moments = [self.begun_s, *self.events_s]
        pauses = [after - before for before, after in pairwise(moments) if after >= from_s and before <= to_s]
        return max(pauses, default=0.0)


def streamed(prompt: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """Return the body of a completion request with a streamed answer and usage; greedy by default."""
    asked = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
    return asked | {"stream": True, "stream_options": {"include_usage": True}} | more


def random_prompt(source: random.Random, num_tokens: int) -> list[int]:
    """Return random token ids from 300 to 599, which stand for text in most vocabularies."""
    return source.choices(range(300, 600), k=num_tokens)


async def ask(target: Target, request: bytes, *, timeout_s: float, arrival_s: float | None = None) -> Answer:
    """Send a streaming request of the OpenAI API and return its answer. The answer records errors of the server.

    request: the bytes from `Target.request`. arrival_s: the time at which the request was due; None: now.
    """
    answer = Answer(time.perf_counter() if arrival_s is None else arrival_s)
    await follow(answer, target, request, timeout_s=timeout_s)
    return answer


async def follow(answer: Answer, target: Target, request: bytes, *, timeout_s: float) -> None:
    """Send a request and update `answer` as the parts arrive, until the end. Cancelling closes the connection."""
    try:
        async with asyncio.timeout(timeout_s):
            await call(target, request, AnswerReader(answer))
    except TimeoutError:
        answer.failure = TIMEOUT
    except OSError as error:
        answer.failure = "no connection" if answer.status is None else f"cut off: {type(error).__name__}"
    finally:
        answer.ended_s = time.perf_counter()


class AnswerReader:
    """A `Reader` that parses the bytes of a response into an `Answer`."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._events = EventStream()

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self._answer.status, self._answer.headers = status, headers

    def body(self, data: bytes, *, at_s: float) -> None:
        answer = self._answer
        if answer.status != 200:
            answer.refusal = (answer.refusal + data)[:_MAX_KEPT_BYTES]
            answer.error = _error_in(answer.refusal)
            return
        num_pieces = answer.num_pieces
        for content in self._events.feed(data):
            self._read(content, at_s)
        if answer.num_pieces > num_pieces:
            answer.delivered_s.append(at_s)

    def _read(self, content: bytes, at_s: float) -> None:
        answer = self._answer
        answer.has_surplus |= answer.is_done
        if content == b"[DONE]":
            answer.is_done = True
            return
        chunk: dict[str, Any] = json.loads(content)
        answer.error = chunk.get("error", answer.error)
        for choice in chunk.get("choices") or ():
            self._read_choice(choice, at_s)
        if usage := chunk.get("usage"):
            answer.num_reported_tokens = usage.get("completion_tokens")

    def _read_choice(self, choice: dict[str, Any], at_s: float) -> None:
        answer, index, delta = self._answer, choice.get("index", 0), choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
        answer.events_s.append(at_s)
        answer.num_pieces += bool(text)
        answer.texts[index] = answer.texts.get(index, "") + text
        if choice.get("finish_reason") is not None:
            answer.has_surplus |= index in answer.finish_reasons
            answer.finish_reasons[index] = choice["finish_reason"]


def _error_in(body: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, dict) else None
